"""How far a command is, on stderr: a line in place on a terminal, plain lines in a log. stdout stays the command's own."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from typing import Any, Self

from lockstep import shapes
from lockstep.cli.output import note
from lockstep.placement import ranks_per_host
from lockstep.run import Run, Spec, read_json
from lockstep.text import printable
from lockstep.units import clock, counted
from lockstep.ways import ROUND_FILE

PLAIN_EVERY_S = 10.0


class StatusLine:
    """One line that is replaced by the next one; in a log, a line every ten seconds. It is gone when the block ends."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet, self._in_place = quiet, sys.stderr.isatty()
        self._next_plain = time.monotonic() + PLAIN_EVERY_S
        self._is_there = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        if self._quiet:
            return
        if self._in_place:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r\x1b[2K" + printable(text)[:width])
            sys.stderr.flush()
            self._is_there = True
        elif time.monotonic() >= self._next_plain:
            self._next_plain = time.monotonic() + PLAIN_EVERY_S
            note(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        if not self._quiet:
            note(text)

    def clear(self) -> None:
        if self._is_there:
            self._is_there = False
            with suppress(OSError):
                sys.stderr.write("\r\x1b[2K")
                sys.stderr.flush()


class ProgressLine(StatusLine):
    """Follows a run through its folder."""

    def __init__(self, label: str = "", quiet: bool = False) -> None:
        super().__init__(quiet)
        self._label = f"{label}: " if label else ""
        self._epochs_shown = 0
        self._began: tuple[float, int] | None = None
        self._told_cores = False

    def __call__(self, run: Run, spec: Spec) -> None:
        if not self._told_cores:
            self._told_cores = True
            if cores_are_taken(run, spec):
                self.say(
                    f"{self._label}warning: other runs hold cores that this one needs, so its ranks are not pinned"
                )
        epochs = run.epochs()
        for record in epochs[self._epochs_shown :]:
            where = f"{self._label}epoch {record['epoch']}{_of(spec.recipe.epochs, spec)}"
            self.say(f"{where}  {_figures(record)}")
        self._epochs_shown = len(epochs)
        beat = read_json(run.rank_folder(0) / "status.json", shapes.Beat)
        self.show(self._label + (self._text(beat, spec) if beat and "epoch" in beat else _starting(spec)))

    def _text(self, beat: dict[str, float], spec: Spec) -> str:
        step, total = int(beat["step"]), spec.plan.total_steps
        if self._began is None:
            self._began = (time.monotonic(), step)
        seconds, steps = time.monotonic() - self._began[0], step - self._began[1]
        left = f"{clock((total - step) * seconds / steps)} left" if steps > 0 else "…"
        left = "" if spec.options.script else left
        rate = f"{beat['images_per_second']:,.0f} samples/s  " if beat.get("images_per_second") else ""
        loss = f"loss {beat['loss']:.4f}  " if beat.get("loss") is not None else ""
        epochs, steps_in_all = _of(spec.recipe.epochs, spec), _of(total, spec)
        return f"epoch {int(beat['epoch'])}{epochs}  step {step}{steps_in_all}  {rate}{loss}{left}"


class ProbeLine(StatusLine):
    """Follows a probe, which has rounds instead of epochs."""

    def __init__(self, label: str, quiet: bool) -> None:
        super().__init__(quiet)
        self._label = label

    def __call__(self, run: Run, spec: Spec) -> None:
        beat = read_json(run.rank_folder(0) / ROUND_FILE, shapes.Round)
        self.show(f"{self._label}: " + (f"round {beat['round']}/{beat['rounds']}" if beat else _starting(spec)))


def _starting(spec: Spec) -> str:
    return f"starting {counted(spec.plan.ranks, 'rank')} …"


def cores_are_taken(run: Run, spec: Spec) -> bool:
    """Whether there are enough cores, and other runs have them (launch/cores.py)."""
    placement = spec.placement
    text = str(run.recorded_status().get("cores") or "")
    local = placement.ranks if placement.emulated else ranks_per_host(placement)
    return text.startswith("any:") and local * (placement.threads or 1) <= len(text.split(","))


def _figures(record: dict[str, Any]) -> str:
    """What an epoch came to; a loss that is not finite stands in a record as none."""
    from lockstep.metrics import recorded

    loss = record.get("train_loss")
    found = [f"train loss {'not finite' if loss is None else recorded('train_loss').text(loss)}"]
    tested = [name for name in record if name.startswith("test_") and name not in ("test_loss", "test_samples")]
    if record.get("test_accuracy") is None:
        tested.insert(0, "test_loss")
    others = [name for name in (*tested, "images_per_second", "train_seconds") if record.get(name) is not None]
    return "  ".join([*found, *(f"{recorded(name).label} {recorded(name).text(record[name])}" for name in others)])


def _of(total: int, spec: Spec) -> str:
    """How many there will be, where that is known: the loop of a script knows it alone."""
    return "" if spec.options.script else f"/{total}"
