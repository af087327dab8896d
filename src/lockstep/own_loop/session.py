"""The session that a user's own loop runs in: sharding, steps, times and records around their code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.models import cautions, layers
from lockstep.own_loop.record import Book
from lockstep.own_loop.share import Shares
from lockstep.own_loop.step import Step, Stepping
from lockstep.parallel import group, strategies
from lockstep.parallel.ranks import Rank
from lockstep.placement import share_of
from lockstep.run import MODEL_NOTES, Run, Spec, write_atomic
from lockstep.training.capture import weights
from lockstep.training.state import whole_state


class Session:
    """What a loop knows of its place, and what it tells of itself. Every rank makes the same calls in the same order."""

    def __init__(self, run: Run, spec: Spec, rank: Rank, device: torch.device, recorded: bool) -> None:
        self.rank, self.world, self.is_first = rank.rank, rank.world, rank.is_first
        self.device, self.placement = device, spec.placement
        self.recorded = recorded
        """Whether `lockstep run` started this, and so there is a run folder."""
        self.finished = False
        """Whether it came to its end and everything is written."""
        self.scratch: TemporaryDirectory[str] | None = None
        """The folder of a session that leaves nothing."""
        self._run, self._spec, self._place = run, spec, rank
        self._model: nn.Module | None = None
        self._stepping: Stepping | None = None

    def __enter__(self) -> Session:
        if self.world > 1:
            group.join(self.placement, self._place, self._run.folder)
        if self.recorded and self.is_first:
            watcher = {k: v for k, v in self._run.recorded_status().items() if k in ("supervisor_pid", "host", "job")}
            self._run.write_status("running", **watcher)
        return self

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, under the placement's strategy. Make the optimizer after it."""
        if self._model is not None:
            raise InputError("s.wrap: a session has one model; put several into one torch.nn.Module")
        self._model = model = model.to(self.device)
        layers.prepare(model)
        strategy = strategies.build(self.placement.strategy, model, self.placement, self.device)
        book = Book(self._run, self._spec, self._place, self.device)
        self._stepping = Stepping(model, strategy, book, self.device, self.world)
        return strategy.model

    def share(self, count: int, *, batch: int, epoch: int, shuffle: bool = True, seed: int = 123) -> Shares:
        """This rank's part of each global batch that `steps` with the same arguments goes through; for a DataLoader's sampler."""
        return Shares(count, batch, epoch, shuffle, seed, self.rank, self.world)

    def steps(self, count: int, *, batch: int, epoch: int, shuffle: bool = True, seed: int = 123) -> Iterator[Step]:
        """One epoch of optimizer steps over a set of `count` samples, in global batches of `batch` over all ranks.

        Nothing is padded or left out. The order depends on (seed, epoch) alone, so global batch k is the same with one
        rank and with many.
        """
        shares, stepping = self.share(count, batch=batch, epoch=epoch, shuffle=shuffle, seed=seed), self._known()
        stepping.begin(shares)
        for part in shares:
            yield stepping.open(part, seed)
        stepping.finish()

    def part(self, count: int) -> slice:
        """This rank's part of 0 … count, for an evaluation; the parts of all ranks make up the whole."""
        return slice(*share_of(count, self.rank, self.world))

    @contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """Around an evaluation: the bare model in eval mode, the same on all ranks, without gradients."""
        self._known().finish()
        assert self._model is not None
        self._settle()
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        with torch.inference_mode():
            yield self._model
        for module, training in modes.items():
            module.training = training
        self._call("restore")

    def end_epoch(
        self,
        *,
        loss_sum: torch.Tensor | float | None = None,
        correct: torch.Tensor | float | None = None,
        samples: int = 0,
    ) -> dict[str, Any]:
        """Record the epoch, with sums over this rank's part of the test set. Returns the record, over all ranks."""
        stepping = self._known()
        stepping.finish()
        return stepping.book.end_epoch(
            stepping.epoch,
            None if loss_sum is None else float(loss_sum),
            None if correct is None else float(correct),
            samples,
        )

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
            self._close()
            self.finished = True
        elif not self.recorded and self._stepping is not None:
            self._stepping.book.recorder.close(
                {}
            )  # its thread ends; a rank that fails under `lockstep run` ends as a whole
        self._stepping = None
        if self.scratch is not None:
            self.scratch.cleanup()

    def _close(self) -> None:
        stepping, model = self._stepping, self._model
        if stepping is None or model is None:
            if self.recorded:
                raise InputError("the script did not train within lockstep.session(): use s.wrap and s.steps")
            return
        stepping.finish()
        if not stepping.book.between_epochs:
            self.end_epoch()
        self._settle()
        summary, state = stepping.book.close(model), whole_state(model)
        if not self.recorded:
            return
        if stepping.book.steps == 0:
            raise InputError("the script took no step within lockstep.session(): go through s.steps")

        def write_results() -> None:
            if self._spec.options.save_model:
                weights(self._run, state)
            # What forward draws or writes is not known here: nobody has tried it beside the loop.
            found = cautions.cautions(model) + cautions.unkeyed(model)
            write_atomic(self._run.folder / MODEL_NOTES, {"remarks": cautions.remarks(model), "cautions": found})
            write_atomic(self._run.folder / "summary.json", summary)

        group.first_alone(write_results)

    def _known(self) -> Stepping:
        if self._stepping is None:
            raise InputError("lockstep.session: no model yet: call s.wrap(model) first")
        return self._stepping

    def _settle(self) -> None:
        """Make the model the one result, the same on all ranks."""
        self._call("settle")
        if self._model is not None:
            layers.settle(self._model)

    def _call(self, name: str) -> None:
        function = getattr(self._known().strategy, name, None)
        if function is not None:
            function()
