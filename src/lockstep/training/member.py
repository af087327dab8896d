"""One rank as a member of its run: its group, its strategy, its records and its result, whoever writes the loop.

A recipe's loop is loop.py; a user's own goes through session.py. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep import strategies
from lockstep.backends import group
from lockstep.errors import InputError
from lockstep.measure.recorder import Recorder
from lockstep.models import layers
from lockstep.placement import Placement
from lockstep.run import MODEL_NOTES, write_atomic
from lockstep.strategies import Strategy
from lockstep.training.checkpoint import Position, save_weights
from lockstep.training.context import Context
from lockstep.training.progress import Progress
from lockstep.training.state import whole_state

NO_MODEL = "lockstep.session: no model yet: call s.wrap(model) first"


class Member:
    """What a loop knows of its place, and what it tells of itself."""

    def __init__(self, context: Context, recorded: bool = True) -> None:
        self.context = context
        self.rank, self.world, self.is_first = context.rank.rank, context.rank.world, context.rank.is_first
        self.device, self.placement = context.device, context.placement
        self.recorded = recorded
        """Whether `lockstep run` started this, and so there is a run folder."""
        self._recorder: Recorder | None = None
        self._strategy: Strategy | None = None
        self._progress: Progress | None = None

    def join(self, rows: int | None, position: Position | None = None, steps_before: int = 0) -> None:
        """Open the rank's records, then meet the other ranks.

        `rows`: how many steps there will be, if that is known. `position`: where an earlier process had come to; `steps_before`: steps that
        the run which this one goes on from had taken.
        """
        context, position = self.context, position or Position()
        self._recorder = Recorder(
            context.run, self.rank, rows, self.device, position.step - steps_before, steps_before, context.spec
        )
        self._progress = Progress(context, self._recorder, position.sums, position.totals)
        if self.world > 1:
            group.join(self.placement, context.rank, context.run.folder)

    def running(self) -> None:
        """Say so in the run's status, which keeps who watches it."""
        if self.recorded and self.is_first:
            kept = ("supervisor_pid", "host", "job", "cores")
            recorded = self.context.run.recorded_status()
            self.context.run.write_status("running", **{key: recorded[key] for key in kept if key in recorded})

    def adopt(self, model: nn.Module, placement: Placement | None = None) -> Strategy:
        """Put the model under the placement's strategy. Collective. `placement`: with what a trial of the model has decided."""
        placement = placement or self.placement
        self._strategy = strategies.build(placement.strategy, model, placement, self.device)
        if self.recorder.trace is not None:
            self._strategy.watch(self.recorder.trace)
        return self._strategy

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    @property
    def progress(self) -> Progress:
        assert self._progress is not None
        return self._progress

    @property
    def strategy(self) -> Strategy:
        if self._strategy is None:
            raise InputError(NO_MODEL)
        return self._strategy

    def consolidate(self) -> None:
        """Make the model the one result, the same on all ranks. Collective."""
        self.strategy.consolidate()
        layers.average_statistics(self.strategy.bare)

    def close(
        self, steps: int, result: dict[str, Any], more: dict[str, Any], notes: dict[str, Any] | None = None
    ) -> None:
        """Write the model, the summary and what is to be noted of the model. Collective."""
        self.consolidate()
        model, context = self.strategy.bare, self.context
        summary = {**self.progress.close(model, steps, result, self.strategy.figures()), **more}
        state = whole_state(model)

        def write_results() -> None:
            if context.options.save_model:
                save_weights(context.run, state)
            if notes is not None:
                write_atomic(context.run.folder / MODEL_NOTES, notes)
            write_atomic(context.run.folder / "summary.json", summary)

        if self.recorded:
            group.first_alone(write_results)
