"""The record of every step of one rank: `steps.bin`, rows of fixed width in a memory-mapped file.

A row that was written is in the page cache at once, so `kill -9` loses nothing that was measured, and writing one costs
about a microsecond. A row counts once its `step` is not zero: that field is written last. Read it with `read_steps`,
or with numpy alone: `numpy.fromfile(path, dtype=ROW)`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep import shapes
from lockstep.inside.layout import HEAD, STEP
from lockstep.inside.layout import PHASES as PHASES
from lockstep.inside.layout import WARMUP_STEPS as WARMUP_STEPS
from lockstep.reading import Damaged, read_file, read_record, read_records
from lockstep.run import Run

if TYPE_CHECKING:
    import torch

ROW = np.dtype(
    [
        ("step", "<i8"),  # 1, 2, 3, … over the whole run
        ("epoch", "<i4"),
        ("warmup", "<i4"),  # 1 for the warm-up steps, while caches and allocators fill: kept, and marked
        ("samples", "<i8"),
        ("start_ns", "<i8"),  # perf_counter_ns: one clock for all ranks of a host
        ("data_ns", "<i8"),
        ("forward_ns", "<i8"),
        ("backward_ns", "<i8"),
        ("exchange_ns", "<i8"),  # exposed: after the last gradient was computed, before the exchange was over
        ("optimizer_ns", "<i8"),
        ("total_ns", "<i8"),
        ("loss_sum", "<f8"),  # over this rank's samples
        ("correct", "<i8"),
    ]
)
# Ten years in nanoseconds: no step takes longer, and sums of larger values would overflow.
MOST_NS = 10 * 365 * 24 * 3600 * 10**9


class StepLog:
    """Writes one row per step. On a GPU torch adds up the loss and the count of hits, so nothing waits for them."""

    def __init__(self, path: Path, rows: int, device: torch.device, rows_kept: int = 0, steps_before: int = 0) -> None:
        """`rows_kept`: how many rows of an earlier attempt stay; later ones are overwritten. `steps_before`: steps
        that another run has taken before the first row of this one."""
        import torch

        with path.open("r+b" if rows_kept else "w+b") as file:
            file.truncate(rows_kept * ROW.itemsize)
            # Reserve the whole file now: a full disk is an error here, not a SIGBUS in the middle of training.
            os.posix_fallocate(file.fileno(), 0, max(rows, 1) * ROW.itemsize)
            self._map = mmap.mmap(file.fileno(), 0)
        self._path = path
        self._rows = np.frombuffer(self._map, dtype=ROW)
        self._flushed = self.count = rows_kept
        self._before = steps_before
        self._losses, self._hits = self._rows["loss_sum"], self._rows["correct"]
        loss, correct = torch.from_numpy(self._losses), torch.from_numpy(self._hits)
        self._on_device = device.type != "cpu"
        if self._on_device:
            loss, correct = torch.zeros_like(loss, device=device), torch.zeros_like(correct, device=device)
        self.loss, self.correct = loss, correct

    def add_loss(self, row: int, loss: torch.Tensor) -> None:
        if self._on_device:
            self.loss[row].add_(loss)
        else:
            self._losses[row] += loss.item()

    def add_correct(self, row: int, correct: torch.Tensor | int) -> None:
        if self._on_device:
            self.correct[row].add_(correct)
        else:
            self._hits[row] += int(correct)

    def write(self, epoch: int, samples: int, start_ns: int, phases: list[int], total_ns: int) -> None:
        """The row of the next step."""
        offset = self.count * ROW.itemsize
        self.count += 1
        HEAD.pack_into(self._map, offset, 0, epoch, self.count <= WARMUP_STEPS, samples, start_ns, *phases, total_ns)
        STEP.pack_into(self._map, offset, self._before + self.count)

    def flush(self) -> None:
        """On a GPU: copy the losses of the steps so far into the file. It waits for the device, so it is not called every step."""
        if self._on_device and self._flushed < self.count:
            span = slice(self._flushed, self.count)
            self._rows["loss_sum"][span] = self.loss[span].cpu().numpy()
            self._rows["correct"][span] = self.correct[span].cpu().numpy()
        self._flushed = self.count

    def mean_loss(self, last: int) -> float | None:
        """The mean loss per sample over the newest steps in the file; None if there are none."""
        rows = self._rows[max(0, self._flushed - last) : self._flushed]
        samples = int(rows["samples"].sum())
        return float(rows["loss_sum"].sum()) / samples if samples else None

    def slowest(self, last: int) -> float:
        """Seconds of the slowest of the last steps, the first one of all left out: it fills caches, and may compile."""
        rows = self._rows[max(1, self.count - last) : self.count]
        return float(rows["total_ns"].max()) / 1e9 if len(rows) else 0.0

    def totals(self, since: int, upto: int | None = None) -> tuple[float, int, int]:
        """Sum of losses, hits and samples of the rows from `since` on."""
        rows = self._rows[since : self._flushed if upto is None else upto]
        return float(rows["loss_sum"].sum()), int(rows["correct"].sum()), int(rows["samples"].sum())

    def phase_seconds(self, since: int) -> dict[str, float]:
        """Seconds of each phase over the rows from `since` on."""
        rows = self._rows[since : self.count]
        return {phase: float(rows[f"{phase}_ns"].sum()) / 1e9 for phase in PHASES}

    def busy(self, since: int, samples: int) -> float:
        """The mean seconds of a step, from the row `since` on, in which the rank did not wait for an exchange.

        Of steps with so many samples, or of all where there is none of them.
        """
        rows = self._rows[since : self.count]
        alike = rows[rows["samples"] == samples]
        rows = alike if len(alike) else rows
        return float((rows["total_ns"] - rows["exchange_ns"]).mean()) / 1e9

    def first_not_finite(self) -> int | None:
        """The first step in the file whose loss is not finite."""
        rows = self._rows[: self._flushed]
        found = rows["step"][~np.isfinite(rows["loss_sum"])]
        return int(found[0]) if len(found) else None

    def close(self) -> None:
        """Cut the file to the rows that were written."""
        self.flush()
        os.truncate(self._path, self.count * ROW.itemsize)


def read_steps(path: Path) -> np.ndarray[Any, Any]:
    """The rows written so far, empty if the file is damaged; reserved rows and a truncated last row are skipped."""
    try:
        return check_steps(path)
    except Damaged:
        return np.empty(0, dtype=ROW)


def steps_taken(folder: Path) -> int:
    """How many steps a rank's folder tells of."""
    return len(read_steps(folder / "steps.bin"))


def check_steps(path: Path) -> np.ndarray[Any, Any]:
    """The same, but a damaged file is an error."""
    data = read_file(path) or b""
    rows = np.frombuffer(data[: len(data) - len(data) % ROW.itemsize], dtype=ROW)
    rows = np.asarray(rows[rows["step"] != 0])
    times = [f"{phase}_ns" for phase in PHASES]
    if (rows["step"] < 0).any() or (np.diff(rows["step"]) <= 0).any():
        raise Damaged(f"{path.name}: its steps are not in order")
    if (rows["total_ns"] <= 0).any() or (rows["samples"] < 0).any():
        raise Damaged(f"{path.name}: a step with no duration, or with a negative number of samples")
    # Negative ones too: a GPU's clock may run slightly backwards.
    if any(
        ((rows[name] > MOST_NS) | (rows[name] < -MOST_NS)).any() for name in ("total_ns", "start_ns", "samples", *times)
    ):
        raise Damaged(f"{path.name}: a step that took more than ten years")
    return rows


def mean_losses(ranks: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The mean loss of a sample at each step, over all ranks; NaN where a step had no samples. The ranks' rows are of the same steps."""
    loss, samples = (np.sum([rows[name] for rows in ranks], axis=0) for name in ("loss_sum", "samples"))
    return np.asarray(np.divide(loss, samples, out=np.full(np.shape(loss), np.nan), where=samples > 0))


def damage(run: Run) -> list[str]:
    """Which of the ranks' own files, and of the measurements beside the run, cannot be read, each with the reason."""
    from lockstep import ways
    from lockstep.measure import trace, traced

    kinds: dict[str, Callable[[Path], object]] = {
        "status.json": lambda path: read_record(path, shapes.Beat),
        "failure.json": lambda path: read_record(path, shapes.Failure),
        "summary.json": lambda path: read_record(path, shapes.RankSummary),
        "epochs.jsonl": lambda path: read_records(path, shapes.Epoch),
        "steps.bin": check_steps,
        trace.FILE: traced.check,
    }
    found = []
    for folder in run.rank_folders():
        for name, read in kinds.items():
            try:
                read(folder / name)
            except Damaged as error:
                found.append(f"ranks/{folder.name}/{error}")
    try:
        ways.check(run.folder / ways.BESIDE)
    except Damaged as error:
        found.append(f"{ways.BESIDE}/{error} (lockstep explain {run.id} --measure makes it anew)")
    return found
