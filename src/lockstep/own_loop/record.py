"""What a user's own loop leaves in the run folder: the same files, with the same contents, as a recipe's run."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict
from time import perf_counter, process_time
from typing import Any

import msgspec
import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.measure.clock import CpuClock, CudaClock, StepClock
from lockstep.measure.memory import MemoryMeter
from lockstep.measure.recorder import Recorder
from lockstep.measure.records import StepLog
from lockstep.own_loop.share import Batch
from lockstep.parallel.group import gather, reduce_max, reduce_sum
from lockstep.parallel.ranks import Rank
from lockstep.run import Run, Spec, append_line, folder_error
from lockstep.training.state import digest, whole_state
from lockstep.training.sums import Totals, not_finite_from

# How many steps a script will take is not known: the file of step rows starts with room for so many, and doubles.
FIRST_ROWS = 4096


class Book:
    """Steps, epochs and totals of one rank; what is written of all ranks, the first one writes."""

    def __init__(self, run: Run, spec: Spec, rank: Rank, device: torch.device) -> None:
        self.recorder = Recorder(run, rank.rank, FIRST_ROWS, device)
        self.steps = 0
        self._run, self._spec, self._rank, self._device = run, spec, rank, device
        self._rows = FIRST_ROWS
        self._totals, self._best = Totals(), (float("inf"), 0)
        self._last: dict[str, Any] = {}
        self._watch: Any = None
        self._rates: dict[str, list[tuple[float, float]]] = {}
        """Of each kind of optimizer, the least and the greatest learning rate of its groups, at first and now."""
        self._opened, self._memory = perf_counter(), MemoryMeter(device)
        self._epoch_opens()

    def _epoch_opens(self) -> None:
        self._first_row, self._logged = self.steps, self.recorder.logging_seconds
        self._begin: tuple[float, float] | None = None
        self._end = (0.0, 0.0)
        self._all_correct = True
        self._counts: list[int] = []
        self._passes = 1

    def watch_optimizers(self) -> None:
        """See which learning rate the script's optimizer steps with, if it is one of torch's."""
        optimizer = sys.modules.get("torch.optim.optimizer")  # not imported here: it takes a second
        if optimizer is not None and self._watch is None:
            self._watch = optimizer.register_optimizer_step_pre_hook(self._saw_optimizer)

    def _saw_optimizer(self, optimizer: Any, args: Any, words: Any) -> None:
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups if "lr" in group})
        if rates:
            self._rates.setdefault(type(optimizer).__name__, []).append((rates[0], rates[-1]))
            del self._rates[type(optimizer).__name__][1:-1]  # the first and the last

    def _rate_note(self) -> str:
        """What the script trained with; where its optimizer is not torch's, only it knows."""
        if not self._rates:
            return "the learning rate is known to the script alone"
        parts = []
        for name, seen in self._rates.items():
            low, high = seen[-1]
            now = f"{high:g}" if low == high else f"{low:g} to {high:g} by the group"
            before = f"{seen[0][1]:g} at first, " if seen[0] != seen[-1] else ""
            parts.append(f"{before}{now} ({name}, set by the script)")
        return "learning rate " + "; ".join(parts)

    @property
    def between_epochs(self) -> bool:
        """Whether no step has been taken since the last epoch was recorded."""
        return self.steps == self._first_row

    def training_begins(self) -> None:
        """The epoch's clock starts here, unless a step was taken already."""
        if self.between_epochs:
            self._begin = (perf_counter(), process_time())
            self.recorder.clock.start()

    @property
    def clock(self) -> StepClock:
        """The clock of the moment: there is a new one whenever the file of rows grows."""
        return self.recorder.clock

    def gradients_ready(self) -> None:
        self.recorder.clock.gradients_ready()

    def add_loss(self, loss_sum: torch.Tensor) -> None:
        """To the row of the step under way; written by torch, so nothing waits for the number."""
        self.recorder.log.loss[self.steps].add_(loss_sum)

    def add_correct(self, correct: torch.Tensor | int) -> None:
        self.recorder.log.correct[self.steps].add_(correct)

    def step_ends(self, epoch: int, batch: Batch, passes: int, correct_known: bool) -> None:
        """Write the step's row. The next step begins here, so that nothing between two steps is lost."""
        self.recorder.clock.finish(epoch, batch.samples)
        self._end = (perf_counter(), process_time())
        self.steps += 1
        self._counts.append(batch.count)
        self._passes = max(self._passes, passes)
        self._all_correct &= correct_known or batch.samples == 0
        self.recorder.after_step(epoch, self.steps, batch.count)
        if self.steps == self._rows:
            self._grow()
        self.recorder.clock.start()

    def _grow(self) -> None:
        """Map the file of rows anew with twice the room; the rows so far stay where they are."""
        recorder, began = self.recorder, perf_counter()
        recorder.clock.settle()
        self._rows *= 2
        try:
            recorder.log = StepLog(recorder.folder / "steps.bin", self._rows, self._device, rows_kept=self.steps)
        except OSError as error:
            raise folder_error(self._run.folder, error) from None
        recorder.clock = CudaClock(recorder.log) if self._device.type == "cuda" else CpuClock(recorder.log)
        recorder.logging_seconds += perf_counter() - began

    def end_epoch(self, epoch: int, loss: float | None, correct: float | None, samples: int) -> dict[str, Any]:
        """One record of the epoch, over all ranks. Collective. `loss`, `correct`, `samples`: this rank's test sums."""
        recorder = self.recorder
        if self.between_epochs or self._begin is None:
            raise InputError("end_epoch: no step was taken since the last one")
        recorder.clock.settle()
        eval_seconds = perf_counter() - self._end[0]
        logging = recorder.logging_seconds - self._logged
        seconds, cpu = self._end[0] - self._begin[0] - logging, self._end[1] - self._begin[1]
        own_loss, own_correct, own_samples = recorder.log.totals(self._first_row)
        sums = reduce_sum(
            [own_loss, float(own_correct), float(own_samples), cpu, loss or 0.0, correct or 0.0, float(samples)]
        )
        train_loss, train_correct, counted, cpu, test_loss, test_correct, tested = sums
        known = reduce_max([float(loss is None), float(correct is None), float(not self._all_correct)])
        results: dict[str, Any] = {
            "train_loss": train_loss / counted,
            "train_accuracy": None if known[2] else train_correct / counted,
            "test_loss": None if known[0] or not tested else test_loss / tested,
            "test_accuracy": None if known[1] or not tested else test_correct / tested,
            "test_samples": int(tested),
        }
        mine = {
            "epoch": epoch,
            "rank": self._rank.rank,
            "partial": False,
            "steps": self.steps - self._first_row,
            "samples": own_samples,
            "train_loss": own_loss / max(1, own_samples),
            "train_accuracy": own_correct / max(1, own_samples) if self._all_correct else None,
            "train_seconds": seconds,
            "eval_seconds": eval_seconds,
        }
        events = {f"test/{key}": results[f"test_{key}"] for key in ("loss", "accuracy")}
        recorder.epoch(mine, {key: value for key, value in events.items() if value is not None})
        logging = recorder.logging_seconds - self._logged
        seconds, eval_seconds, logging = reduce_max([seconds, eval_seconds, logging])
        self._count(seconds, cpu, eval_seconds, logging, int(counted))
        self._last = {
            "epoch": epoch,
            "step": self.steps,
            "partial": False,
            "samples": int(counted),
            **results,
            "train_seconds": seconds,
            "train_cpu_seconds": cpu,
            "eval_seconds": eval_seconds,
            "logging_seconds": logging,
            "images_per_second": counted / seconds,
            "time": time.time(),
        }
        if results["test_loss"] is not None:
            self._best = min(self._best, (results["test_loss"], epoch))
        if self._rank.is_first:
            append_line(self._run.folder / "epochs.jsonl", self._last)
            self._state_plan(epoch, int(tested))
        self._epoch_opens()
        return dict(self._last)

    def _count(self, seconds: float, cpu: float, evaluating: float, logging: float, samples: int) -> None:
        totals = self._totals
        totals.train_seconds += seconds
        totals.train_cpu_seconds += cpu
        totals.eval_seconds += evaluating
        totals.logging_seconds += logging
        totals.train_images += samples

    def _state_plan(self, epoch: int, tested: int) -> None:
        """Put into run.json what the loop has turned out to be: until it has run, nobody knows its batch or its data."""
        spec, counts = self._spec, self._counts
        batch = max(counts)
        share = -(-batch // self._rank.world)
        stated = msgspec.structs.replace(
            spec.plan,
            global_batch=batch,
            micro_batch=-(-share // self._passes),
            accumulation=self._passes,
            train_samples=sum(counts),
            test_samples=tested,
            steps_per_epoch=len(counts),
            last_batch=counts[-1],
            total_steps=self.steps,
            lr=next((seen[0][1] for seen in self._rates.values()), 0.0),
            lr_note=self._rate_note(),
        )
        recipe = msgspec.structs.replace(spec.recipe, global_batch=batch, epochs=epoch)
        self._run.write_spec(msgspec.structs.replace(spec, recipe=recipe, plan=stated))

    def close(self, model: nn.Module) -> dict[str, Any]:
        """End the rank's files. Collective. Returns the run's summary."""
        if self._watch is not None:
            self._watch.remove()
        found, growth = digest(whole_state(model)), self._memory.growth_bytes()
        rows = gather([float(int(found[:12], 16)), -1.0 if growth is None else float(growth)])
        # The same on all ranks, since the epoch's sums are.
        losses = [self._last.get(key) for key in ("train_loss", "test_loss")]
        finite = all(loss is None or math.isfinite(loss) for loss in losses)
        lost = None if finite else not_finite_from(self.recorder.log)
        self.recorder.close({"rank": self._rank.rank, "memory_growth_bytes": growth, "weights_sha256": found})
        totals, last = self._totals, self._last
        return {
            "epochs": last.get("epoch", 0),
            "steps": self.steps,
            "stopped_by": None,
            "not_finite": lost,
            "best_epoch": self._best[1],
            **asdict(totals),
            "train_images": int(totals.train_images),
            "fit_seconds": perf_counter() - self._opened,
            "images_per_second": totals.train_images / totals.train_seconds if totals.train_seconds else None,
            **{key: last.get(key) for key in ("train_loss", "train_accuracy", "test_loss", "test_accuracy")},
            "test_samples": last.get("test_samples", 0),
            "memory_growth_bytes": [None if row[1] < 0 else int(row[1]) for row in rows],
            "weights_sha256": found,
            "ranks_agree": len({row[0] for row in rows}) == 1,
        }
