"""The worker's side of a probe: all ways to take a step (lockstep/ways.py), in turns, on the ranks of a run.

Every way has a model, an optimizer and records of its own; the step is the one that training takes. In each round every way takes a
few steps. Ranks that have nothing to do in a way wait on the store, where waiting takes no processor time.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from lockstep.data import DataSet
from lockstep.data.batches import Batch, Batches, sample_order
from lockstep.measure.clock import CpuClock, CudaClock, StepClock
from lockstep.measure.records import PHASES, StepLog, read_steps
from lockstep.models import layers
from lockstep.parallel import group, strategies
from lockstep.parallel.ranks import Rank
from lockstep.parallel.strategies import Single, Strategy
from lockstep.run import Probe, Run, Spec, write_atomic
from lockstep.training import assemble, compiling
from lockstep.training.precision import Precision
from lockstep.training.step import Stepper
from lockstep.ways import FILE, ROUND_FILE, Way

ALONE = Rank(0, 1, 0, 1)
SLICE_S = 0.1
MOST_STEPS, FEWEST_STEPS = 100, 2
MOST_ROUNDS, FEWEST_ROUNDS = 25, 4
WARM_STEPS = 3
# What a wrapper or an exchange costs is a difference of two steps, whose noise grows with them: it is seen best in short ones.
SMALL_BATCHES = 2


@dataclass
class Lane:
    """One way on one rank, ready to run."""

    name: str
    samples: int
    """Of one rank in one step."""
    count: int
    """Of one step over all ranks that share it."""
    stepper: Stepper
    clock: StepClock
    log: StepLog
    visited: int
    """Samples in the order that its batches go through."""
    everyone: bool
    """Whether all ranks run it at once, or the first alone."""
    threads: int
    shared: bool = False
    """Whether the ranks exchange in it."""
    taken: int = 0
    steps: int = FEWEST_STEPS
    first_row: int = 0

    def run(self, steps: int) -> None:
        before = torch.get_num_threads()
        if self.threads != before:
            torch.set_num_threads(self.threads)
        room = self.visited - self.count + 1
        for _ in range(steps):
            self.stepper.run(1, self.taken * self.count % room, self.count)
            self.taken += 1
        if self.threads != before:
            torch.set_num_threads(before)


class Still:
    """Batches without a loader: the first one of each size, again and again."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
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
                    layer.synchronised = False
        if recipe.compile:
            compiling.compile_model(model, precision, spec.placement, plan, self._data, rank)
        strategy = self._strategy(model, wrapped, shared)
        batches = assemble.train_batches(spec, self._data, self._device)
        batches.visit(sample_order(recipe, 1, plan.train_samples) if recipe.shuffle else None, 1)
        batches.keyed = batches.keyed or layers.needs_keys(model)
        log = StepLog(self._file(name), MOST_ROUNDS * MOST_STEPS + 2 * WARM_STEPS, self._device)
        clock: StepClock = CudaClock(log) if self._device.type == "cuda" else CpuClock(log)
        source: Any = Still(batches) if still else batches
        alone = msgspec.structs.replace(spec, placement=msgspec.structs.replace(spec.placement, zero=False))
        optimizer = assemble.build_optimizer(spec if shared else alone, model, strategy)
        stepper = Stepper(recipe, strategy, optimizer, source, plan, rank, clock, log, precision)
        self.built.append(
            Lane(
                name,
                micro * accumulation,
                count,
                stepper,
                clock,
                log,
                plan.train_samples,
                everyone or shared,
                threads or spec.placement.threads or 1,
                shared,
            )
        )

    def rows(self, lane: Lane, since: int) -> np.ndarray[Any, Any]:
        """This rank's steps of a lane."""
        return read_steps(self._file(lane.name))[since:]

    def _file(self, name: str) -> Path:
        return self._run.rank_folder(self._rank.rank) / f"way-{name}.bin"

    def _strategy(self, model: Any, wrapped: bool, shared: bool) -> Strategy:
        placement = self._spec.placement
        if shared:
            return strategies.build(placement.strategy, model, placement, self._device)
        if wrapped and placement.strategy in strategies.IN_A_GROUP:
            return strategies.IN_A_GROUP[placement.strategy](model, placement, self._device, self._own_group)
        return Single(model, placement, self._device)


def _lanes(run: Run, spec: Spec, rank: Rank, device: torch.device, probe: Probe) -> Lanes:
    plan, placement = spec.plan, spec.placement
    micro, accumulation, threads = plan.micro_batch, plan.accumulation, placement.threads or 1
    lanes = Lanes(run, spec, rank, device)
    lanes.add("plain", micro, accumulation)
    many = plan.ranks > 1
    for_prediction = bool(probe.batches)
    if many:
        if not for_prediction:
            lanes.add("whole", micro * plan.ranks, accumulation)
        if placement.strategy in strategies.IN_A_GROUP:
            lanes.add("wrapped", micro, accumulation, wrapped=True)
        lanes.add("apart", micro, accumulation, wrapped=True, everyone=True)
        lanes.add("together", micro, accumulation, shared=True)
    if not for_prediction:
        lanes.add("no-data", micro, accumulation, shared=many, still=True)
        if threads > 1:
            lanes.add("half-threads", micro, accumulation, shared=many, threads=threads // 2)
    lanes.add("double", 2 * micro, accumulation, shared=many)
    small = sorted(probe.batches)[:SMALL_BATCHES]
    for batch in probe.batches:
        lanes.add(f"plain@{batch}", batch)
        if not many:
            continue
        lanes.add(f"apart@{batch}", batch, wrapped=True, everyone=True)
        if batch in small:
            if placement.strategy in strategies.IN_A_GROUP:
                lanes.add(f"wrapped@{batch}", batch, wrapped=True)
            lanes.add(f"together@{batch}", batch, shared=True)
    return lanes


def measure(run: Run, spec: Spec, rank: Rank, device: torch.device) -> None:
    """Build all lanes, warm them up, and go round; rank 0 writes what came out."""
    probe = spec.options.probe
    assert probe is not None
    lanes = _lanes(run, spec, rank, device, probe)
    gate = Gate(rank)
    rounds = _warm_up(lanes, rank, gate, probe.seconds)
    for number in range(rounds):
        if rank.is_first:
            _show(run, number + 1, rounds)
        # Another order every time: no way always comes after the same one.
        turn = number % len(lanes.built)
        for lane in (*lanes.built[turn:], *lanes.built[:turn]):
            gate.wait()
            if lane.everyone or rank.is_first:
                lane.run(lane.steps)
    gate.wait()
    ways = [_way(lanes, lane, rounds, rank) for lane in lanes.built]
    if rank.is_first:
        write_atomic(run.folder / FILE, {"ways": msgspec.to_builtins(ways)})
        run.write_status("done")


def _show(run: Run, number: int, rounds: int) -> None:
    """For whoever watches."""
    write_atomic(run.rank_folder(0) / ROUND_FILE, {"round": number, "rounds": rounds}, durable=False)


def _warm_up(lanes: Lanes, rank: Rank, gate: Gate, seconds: float) -> int:
    """Settle caches and hooks, find out how long a step of each takes, and divide the time: returns the number of rounds."""
    whole = 0.0
    for lane in lanes.built:
        gate.wait()
        if lane.everyone or rank.is_first:
            lane.run(2 * WARM_STEPS)
            lane.clock.settle()
            lane.first_row = lane.log.count
        mine = float(np.median(lanes.rows(lane, WARM_STEPS)["total_ns"])) / 1e9 if lane.first_row else 0.0
        step = group.reduce_max([mine])[0]
        lane.steps = min(MOST_STEPS, max(FEWEST_STEPS, round(SLICE_S / step)))
        whole += lane.steps * step
    return min(MOST_ROUNDS, max(FEWEST_ROUNDS, round(seconds / whole)))


def _way(lanes: Lanes, lane: Lane, rounds: int, rank: Rank) -> Way:
    """Collective: what all ranks that took part in a lane have measured."""
    ran = lane.everyone or rank.is_first
    if ran:
        lane.clock.settle()
        lane.log.close()
    steps = lane.steps * rounds
    rows = lanes.rows(lane, lane.first_row) if ran else None
    columns = ("total_ns", *(f"{phase}_ns" for phase in PHASES))
    mine = np.zeros((len(columns), steps)) if rows is None else np.stack([rows[column] for column in columns]) / 1e9
    found = [np.array(values).reshape(len(columns), steps) for values in group.gather(mine.ravel().tolist())]
    found = found if lane.everyone else found[:1]
    least = np.min([values[1 + PHASES.index("exchange")] for values in found], axis=0)
    return Way(
        name=lane.name,
        samples=lane.samples,
        ranks=len(found),
        threads=lane.threads,
        steps=lane.steps,
        rounds=np.stack([values[0].reshape(rounds, lane.steps).mean(1) for values in found], axis=1).tolist(),
        phases=[_phases(values, least, lane.shared) for values in found],
    )


def _phases(values: np.ndarray[Any, Any], least: np.ndarray[Any, Any], shared: bool) -> dict[str, float]:
    means = {phase: statistics.fmean(values[1 + index]) for index, phase in enumerate(PHASES)}
    waiting = statistics.fmean(values[1 + PHASES.index("exchange")] - least) if shared else 0.0
    total = statistics.fmean(values[0])
    return {
        **means,
        "exchange": means["exchange"] - waiting,
        "waiting": waiting,
        "other": total - sum(means.values()),
        "total": total,
    }


class Gate:
    """Where ranks wait for each other without a processor: on the store by which they met."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._number = rank, 0
        self._store = dist.distributed_c10d._get_default_store() if rank.world > 1 else None

    def wait(self) -> None:
        if self._store is None:
            return
        self._number += 1
        self._store.set(f"gate/{self._number}/{self._rank.rank}", "")
        self._store.wait([f"gate/{self._number}/{other}" for other in range(self._rank.world)])
