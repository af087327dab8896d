"""Lanes of a probe: ways to take a step (lockstep/ways.py), built on the ranks of a run.

Every lane has a model, an optimizer and records of its own; the step is the one that training takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from lockstep import strategies
from lockstep.backends import group
from lockstep.backends.ranks import Rank
from lockstep.data import DataSet
from lockstep.data.batches import Batch, Batches, sample_order
from lockstep.measure.clock import CpuClock, CudaClock, StepClock
from lockstep.measure.records import StepLog, read_steps
from lockstep.models import layers
from lockstep.placement import Placement
from lockstep.rounds import multiple
from lockstep.run import Run, Spec
from lockstep.strategies import Strategy
from lockstep.training import assemble, compiling, optimizers, trial
from lockstep.training.loss import Loss
from lockstep.training.precision import Precision
from lockstep.training.recipe_step import RecipeStep, TrainState
from lockstep.ways import MOST_ROUNDS

ALONE = Rank(0, 1, 0, 1)
MOST_STEPS, FEWEST_STEPS = 100, 2
WARM_STEPS = 3


@dataclass
class Lane:
    """One way on one rank, ready to run."""

    name: str
    samples: int
    """Of one rank in one step."""
    count: int
    """Of one step over all ranks that share it."""
    step: RecipeStep
    clock: StepClock
    log: StepLog
    visited: int
    """Samples in the order that its batches go through."""
    everyone: bool
    """Whether all ranks run it at once, or the first alone."""
    threads: int
    shared: bool = False
    """Whether the ranks exchange in it."""
    whole_steps: int = 1
    """How many belong together: with local SGD, those of a round."""
    steps: int = FEWEST_STEPS
    first_row: int = 0
    taken: int = 0

    def run(self, steps: int) -> None:
        before = torch.get_num_threads()
        if self.threads != before:
            torch.set_num_threads(self.threads)
        room = self.visited - self.count + 1
        for _ in range(steps):
            self.step.run(1, self.taken * self.count % room, self.count)
            self.taken += 1
        if self.threads != before:
            torch.set_num_threads(before)


class Still:
    """Batches without a loader: the first one of each size, again and again."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.one_class, self.units = batches.one_class, batches.units
        self._kept: dict[int, Batch] = {}

    def train_batch(self, low: int, high: int) -> Batch:
        if high - low not in self._kept:
            self._kept[high - low] = self._batches.train_batch(low, high)
        return self._kept[high - low]


class Lanes:
    """Builds lanes: what they have in common is read once."""

    def __init__(self, run: Run, spec: Spec, rank: Rank, device: torch.device) -> None:
        self._run, self._spec, self._rank, self._device = run, spec, rank, device
        self._data: DataSet = assemble.open_set(run, spec)
        self._own_group: Any = None
        if rank.world > 1:
            group.join(spec.placement, rank, run.folder)
            # Every rank has to take part in the making of every group.
            groups = [dist.new_group([member]) for member in range(rank.world)]
            self._own_group = groups[rank.rank]
        self.built: list[Lane] = []

    def add(
        self,
        name: str,
        micro: int,
        accumulation: int = 1,
        *,
        wrapped: bool = False,
        shared: bool = False,
        everyone: bool = False,
        still: bool = False,
        threads: int | None = None,
        bucket_mb: float | None = None,
    ) -> None:
        """`shared`: the placement's ranks exchange. `wrapped`: inside its strategy, in a group of one."""
        spec, recipe = self._spec, self._spec.recipe
        plan = spec.plan
        ranks = plan.ranks if shared else 1
        count = micro * accumulation * ranks
        if count > plan.train_samples:
            return
        plan = msgspec.structs.replace(
            plan, ranks=ranks, global_batch=count, micro_batch=micro, accumulation=accumulation, last_batch=count
        )
        rank = self._rank if shared else ALONE
        precision = Precision(recipe, self._device)
        model = assemble.build_model(recipe, spec, self._data, self._device, precision)
        if not shared:
            for layer in model.modules():
                if isinstance(layer, layers.BatchNorm2d):
                    # Its own way to compute is part of what a strategy costs; one process by itself would not go it.
                    layer.synchronised = layer.synchronised and wrapped
                    layer.group = self._own_group
        batches = assemble.train_batches(spec, self._data, self._device)
        loss = Loss(recipe, self._data.class_weights)
        placement, _ = trial.settle(recipe, spec.placement, model, batches, precision, loss)
        if recipe.compile:
            compiling.compile_model(model, precision, spec.placement, plan, batches, rank)
        strategy = self._strategy(model, placement, wrapped, shared, bucket_mb)
        batches.visit(sample_order(recipe, 1, plan.train_samples) if recipe.shuffle else None, 1)
        batches.keyed = batches.keyed or layers.needs_keys(model)
        together = strategies.kind_of(placement.strategy).whole_steps(placement) if shared else 1
        most = multiple(MOST_STEPS, together)
        log = StepLog(self._file(name), MOST_ROUNDS * most + 2 * multiple(WARM_STEPS, together), self._device)
        clock: StepClock = CudaClock(log) if self._device.type == "cuda" else CpuClock(log)
        source: Any = Still(batches) if still else batches
        optimizer = strategy.optimizer(partial(optimizers.build, recipe.optimizer))
        state = TrainState(model, strategy, optimizer, precision, loss)
        step = RecipeStep(recipe, plan, rank, state, source, SimpleNamespace(clock=clock, log=log))
        self.built.append(
            Lane(
                name,
                micro * accumulation,
                count,
                step,
                clock,
                log,
                plan.train_samples,
                everyone or shared,
                threads or spec.placement.threads or 1,
                shared,
                together,
            )
        )

    def rows(self, lane: Lane, since: int) -> np.ndarray[Any, Any]:
        """This rank's steps of a lane."""
        return read_steps(self._file(lane.name))[since:]

    def _file(self, name: str) -> Path:
        return self._run.rank_folder(self._rank.rank) / f"way-{name}.bin"

    def _strategy(
        self, model: Any, placement: Placement, wrapped: bool, shared: bool, bucket_mb: float | None
    ) -> Strategy:
        if bucket_mb is not None:
            ddp = msgspec.structs.replace(placement.ddp, bucket_mb=bucket_mb)
            placement = msgspec.structs.replace(placement, ddp=ddp)
        if not shared:
            placement = msgspec.structs.replace(placement, zero=False)
        if shared:
            return strategies.build(placement.strategy, model, placement, self._device)
        kind: Any = strategies.kind_of(placement.strategy)
        if wrapped and kind.takes_group:
            return kind(model, placement, self._device, self._own_group)  # type: ignore[no-any-return]
        return Strategy(model, placement, self._device)
