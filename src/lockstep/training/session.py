"""The session of a user's own loop (docs/own-loop.md): what a script calls, and what its run keeps of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lockstep import keyed
from lockstep.backends import group
from lockstep.errors import InputError
from lockstep.models import cautions, layers
from lockstep.training.context import Context
from lockstep.training.member import NO_MODEL, Member
from lockstep.training.observed import Observed
from lockstep.training.progress import now
from lockstep.training.share import Division, Shares
from lockstep.training.step import Step, Steps
from lockstep.training.turns import Turns


class Session(Member):
    """A script's place in its run. Every rank makes the same calls in the same order."""

    def __init__(self, context: Context, recorded: bool = True) -> None:
        super().__init__(context, recorded)
        self.finished = False
        """Whether it came to its end and everything is written."""
        self._steps: Steps | None = None
        self._turns: Turns | None = None
        self._division = Division(context)
        self._observed = Observed(context)
        self._epoch, self._end, self._keyed = 0, (0.0, 0.0), False
        self._evaluated = 0.0
        """Seconds of evaluations between steps of the epoch under way."""

    def __enter__(self) -> Session:
        self.join(rows=None)
        self.running()
        return self

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, under the placement's strategy. Make the optimizer after it."""
        if self._strategy is not None:
            raise InputError("s.wrap: a session has one model; put several into one torch.nn.Module")
        model = model.to(self.device)
        layers.prepare(model)
        strategy = self.adopt(model)
        self._steps = Steps(strategy, self.recorder, self.world)
        self._keyed = layers.needs_keys(model)
        if self.context.options.turns:
            self._turns = Turns(self.context, self.recorder)
        self.progress.start()
        return strategy.model

    def share(self, count: int, *, batch: int, epoch: int, shuffle: bool = True, seed: int = 123) -> Shares:
        """This rank's part of each global batch that `steps` with the same arguments goes through; for a DataLoader's sampler."""
        if self.placement.shares == "auto":
            raise InputError("s.share: with shares=auto a batch is divided when its step begins: state shares=[…]")
        return self._division.shares(count, batch, epoch, shuffle, seed)

    def steps(self, count: int, *, batch: int, epoch: int, shuffle: bool = True, seed: int = 123) -> Iterator[Step]:
        """One epoch of optimizer steps over a set of `count` samples, in global batches of `batch` over all ranks.

        Nothing is padded or left out. The order depends on (seed, epoch) alone, so global batch k is the same with one
        rank and with many.
        """
        shares, steps = self._division.shares(count, batch, epoch, shuffle, seed), _wrapped(self._steps)
        self._division.watch(self.recorder)
        self._finish_step()
        self._begin_epoch(shares)
        try:
            for part in shares:
                if self._turns:
                    self._turns.before_step(part.count)
                self._resume()
                layers.bind(keyed.sample_keys(seed, epoch, part.mine) if self._keyed else None, part.samples)
                yield steps.open(part.samples, part.count, part.mine)
                self._finish_step()
                self._division.after_step(part.count)
        finally:
            if self._turns:
                self._turns.pause()

    def part(self, count: int) -> slice:
        """This rank's part of 0 … count, for an evaluation; the parts of all ranks make up the whole."""
        return slice(*self._division.part(count))

    @contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """Around an evaluation: the bare model in eval mode, the same on all ranks, without gradients."""
        self._finish_step()
        # Steps may follow: their time must not have this in it.
        self.progress.pause(self._end)
        model = self.strategy.bare
        self.consolidate()
        modes = {module: module.training for module in model.modules()}
        model.eval()
        self.recorder.alone = "evaluating"
        try:
            with torch.inference_mode():
                yield model
        finally:
            self.recorder.alone = ""
        for module, training in modes.items():
            module.training = training
        self.strategy.resume_training()

    def end_epoch(
        self,
        *,
        loss_sum: torch.Tensor | float | None = None,
        correct: torch.Tensor | float | None = None,
        samples: int = 0,
    ) -> dict[str, Any]:
        """Record the epoch, with sums over this rank's part of the test set. Returns the record, over all ranks."""
        steps, observed = _wrapped(self._steps), self._observed
        self._finish_step()
        if not observed.counts:
            raise InputError("end_epoch: no step was taken since the last one")
        evaluating, self._evaluated = self._evaluated + perf_counter() - self._end[0], 0.0
        self.progress.pause(self._end)
        loss, hits, tested = group.reduce_sum([float(loss_sum or 0.0), float(correct or 0.0), float(samples)])
        unknown = [loss_sum is None, correct is None, not observed.all_correct]
        no_loss, no_hits, no_correct = group.reduce_max([float(each) for each in unknown])
        test = {
            "test_loss": None if no_loss or not tested else loss / tested,
            "test_accuracy": None if no_hits or not tested else hits / tested,
            "test_samples": int(tested),
        }
        partial = len(observed.counts) < observed.meant  # the script left its loop early
        record = self.progress.end_epoch(
            self._epoch, steps.taken, test, evaluating, observed.meant, partial, correct_known=not no_correct
        )
        observed.epoch_ends(record)
        return record

    def reduce_sum(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64."""
        return group.reduce_sum(list(map(float, values)))

    def print(self, *values: object) -> None:
        """Print on the first rank only."""
        if self.is_first:
            print(*values, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._close_script()
            self.finished = True
        elif not self.recorded and self._recorder is not None:
            self._recorder.close({})  # its thread ends; a rank that fails under `lockstep run` ends as a whole
        self._strategy = self._steps = None

    def _close_script(self) -> None:
        if self._steps is None:
            if self.recorded:
                raise InputError("the script did not train within lockstep.session(): use s.wrap and s.steps")
            self.recorder.close({})
            return
        self._finish_step()
        if self._observed.counts:
            self.end_epoch()
        self._observed.close()
        if self.recorded and self._steps.taken == 0:
            raise InputError("the script took no step within lockstep.session(): go through s.steps")
        # What forward draws or writes is not known here: nobody has tried it beside the loop.
        model = self.strategy.bare
        found = cautions.cautions(model) + cautions.unkeyed(model)
        result = self.progress.record
        more = {"epochs": result.get("epoch", 0), "stopped_by": None, "best_epoch": self._observed.best_epoch}
        more["shares"] = self._division.of_a_batch()
        self.close(self._steps.taken, result, more, {"remarks": cautions.remarks(model), "cautions": found})

    def _begin_epoch(self, shares: Shares) -> None:
        """The loop over an epoch's batches starts: so does its clock, unless a step of the epoch was taken already."""
        again, fresh = shares.epoch == self._epoch, not self._observed.counts
        if shares.epoch < self._epoch or (again and fresh):
            raise InputError(f"s.steps: epoch={shares.epoch} again: pass the number of the epoch, 1, 2, 3, …")
        self._epoch = shares.epoch
        self._observed.loop_begins(len(shares))
        if fresh:
            self.progress.begin()
            self.recorder.clock.start()

    def _resume(self) -> None:
        """A step follows: after an evaluation in the midst of an epoch, the clocks of training go on here."""
        if self.progress.paused:
            self._evaluated += perf_counter() - self._end[0]
            self.progress.begin()
            self.recorder.clock.start()

    def _finish_step(self) -> None:
        """End the step under way, if there is one. The next one's clock starts here, so that nothing between two steps is lost."""
        steps = _wrapped(self._steps)
        step = steps.finish(self._epoch)
        if step is None:
            return
        self._end = now()
        self._observed.step_ends(step)
        self.recorder.after_step(self._epoch, steps.taken, step.count)
        self.recorder.clock.start()


def _wrapped(steps: Steps | None) -> Steps:
    if steps is None:
        raise InputError(NO_MODEL)
    return steps
