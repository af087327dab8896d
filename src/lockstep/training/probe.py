"""The worker's side of a probe: all ways to take a step (lockstep/ways.py), in turns, on the ranks of a run.

In each round every way takes a few steps. Ranks that have nothing to do in a way wait on the store, where waiting takes no processor time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from time import perf_counter, process_time
from typing import Any

import msgspec
import numpy as np
import torch

from lockstep import strategies
from lockstep.backends import group
from lockstep.backends.ranks import Rank
from lockstep.lines import Line
from lockstep.machine import starving
from lockstep.machine.cores import cores
from lockstep.machine.cpu import waited_seconds
from lockstep.measure.records import PHASES
from lockstep.placement import DEFAULT_BUCKET_MB, Placement, ranks_per_host
from lockstep.rounds import multiple, rounds
from lockstep.run import Probe, Run, Spec, write_atomic
from lockstep.shapes import Spent
from lockstep.torch_private import default_store
from lockstep.training.lanes import FEWEST_STEPS, MOST_STEPS, WARM_STEPS, Lane, Lanes
from lockstep.ways import FILE, MOST_ROUNDS, ROUND_FILE, Way

SLICE_S = 0.1
FEWEST_ROUNDS = 4
# What a wrapper or an exchange costs is a difference of two steps, whose noise grows with them: it is seen best in short ones.
SMALL_BATCHES = 2


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
        if strategies.kind_of(placement.strategy).takes_group:
            lanes.add("wrapped", micro, accumulation, wrapped=True)
        lanes.add("apart", micro, accumulation, wrapped=True, everyone=True)
        lanes.add("together", micro, accumulation, shared=True)
    if not for_prediction:
        lanes.add("no-data", micro, accumulation, shared=many, still=True)
        if threads > 1:
            lanes.add("fewer-threads", micro, accumulation, shared=many, threads=_fewer(placement, threads))
        if many and placement.strategy == "ddp" and placement.ddp.bucket_mb < DEFAULT_BUCKET_MB:
            lanes.add("large-buckets", micro, accumulation, shared=True, bucket_mb=DEFAULT_BUCKET_MB)
    lanes.add("double", 2 * micro, accumulation, shared=many)
    small = sorted(probe.batches)[:SMALL_BATCHES]
    for batch in probe.batches:
        lanes.add(f"plain@{batch}", batch)
        if not many:
            continue
        lanes.add(f"apart@{batch}", batch, wrapped=True, everyone=True)
        if batch in small:
            if strategies.kind_of(placement.strategy).takes_group:
                lanes.add(f"wrapped@{batch}", batch, wrapped=True)
            lanes.add(f"together@{batch}", batch, shared=True)
    return lanes


def _fewer(placement: Placement, threads: int) -> int:
    """As many as there are cores for; where these are enough for all, half as many."""
    local = placement.ranks if placement.emulated else ranks_per_host(placement)
    fitting = max(1, cores() // local)
    return fitting if fitting < threads else threads // 2


def measure(run: Run, spec: Spec, rank: Rank, device: torch.device) -> None:
    """Build all lanes, warm them up, and go round; rank 0 writes what came out."""
    probe = spec.options.probe
    assert probe is not None
    lanes = _lanes(run, spec, rank, device, probe)
    gate = Gate(rank)
    count = _warm_up(lanes, rank, gate, probe.seconds)
    meter = starving.Meter(rank.is_first if spec.placement.emulated else rank.local_rank == 0)
    if spec.options.turns:
        count = _when_asked(lanes, Line(run, rank.rank), rank, gate)
    else:
        for number, order in enumerate(rounds(lanes.built, count), 1):
            if rank.is_first:
                _show(run, number, count)
            _go_round(order, rank, gate)
    spent = _spent(meter)
    gate.wait()
    ways = [_way(lanes, lane, count, rank) for lane in lanes.built]
    if rank.is_first:
        write_atomic(run.folder / FILE, {"ways": msgspec.to_builtins(ways), "spent": spent})
        run.write_status("done")


def _spent(meter: starving.Meter) -> Spent:
    """Of all ranks together. Collective."""
    mine = meter.read()
    used, waited, others, stolen = group.reduce_sum([mine["used"], mine["waited"], mine["others"], mine["stolen"]])
    return Spent(used=used, waited=waited, others=others, stolen=stolen)


def _go_round(order: Sequence[Lane], rank: Rank, gate: Gate) -> None:
    for lane in order:
        gate.wait()
        if lane.everyone or rank.is_first:
            lane.run(lane.steps)


def _when_asked(lanes: Lanes, line: Line, rank: Rank, gate: Gate) -> int:
    """A round for each order of a race, in which others take their windows in between; returns how many there were."""
    line.answer({})  # ready
    count = 0
    for order in rounds(lanes.built, MOST_ROUNDS):
        if not line.order():
            break
        begin, used, waited = perf_counter(), process_time(), waited_seconds()
        _go_round(order, rank, gate)
        count += 1
        spent = process_time() - used
        line.answer(
            {
                "samples": 1,
                "wall": perf_counter() - begin,
                "cpu": spent,
                "used": spent,
                "waited": waited_seconds() - waited,
                "phases": {},
            }
        )
    return count


def _show(run: Run, number: int, rounds: int) -> None:
    """For whoever watches."""
    write_atomic(run.rank_folder(0) / ROUND_FILE, {"round": number, "rounds": rounds}, durable=False)


def _warm_up(lanes: Lanes, rank: Rank, gate: Gate, seconds: float) -> int:
    """Settle caches and hooks, find out how long a step of each takes, and divide the time: returns the number of rounds."""
    whole = 0.0
    for lane in lanes.built:
        gate.wait()
        warm = multiple(WARM_STEPS, lane.whole_steps)
        if lane.everyone or rank.is_first:
            lane.run(2 * warm)
            lane.clock.flush()
            lane.first_row = lane.log.count
        seen = lanes.rows(lane, warm)["total_ns"].reshape(-1, lane.whole_steps).mean(1) if lane.first_row else [0.0]
        step = group.reduce_max([float(np.median(seen)) / 1e9])[0]
        lane.steps = multiple(min(MOST_STEPS, max(FEWEST_STEPS, round(SLICE_S / step))), lane.whole_steps)
        whole += lane.steps * step
    return min(MOST_ROUNDS, max(FEWEST_ROUNDS, round(seconds / whole)))


def _way(lanes: Lanes, lane: Lane, rounds: int, rank: Rank) -> Way:
    """Collective: what all ranks that took part in a lane have measured."""
    ran = lane.everyone or rank.is_first
    if ran:
        lane.clock.flush()
        lane.log.close()
    steps = lane.steps * rounds
    rows = lanes.rows(lane, lane.first_row) if ran else None
    columns = ("total_ns", *(f"{phase}_ns" for phase in PHASES))
    mine = np.zeros((len(columns), steps)) if rows is None else np.stack([rows[column] for column in columns]) / 1e9
    found = [np.array(values).reshape(len(columns), steps) for values in group.gather(mine.ravel().tolist())]
    found = found if lane.everyone else found[:1]
    exchange = np.stack([values[1 + PHASES.index("exchange")] for values in found])
    least = exchange.min(axis=0)
    waiting = exchange.mean(axis=0) - least if lane.shared else np.zeros(steps)
    return Way(
        name=lane.name,
        samples=lane.samples,
        ranks=len(found),
        threads=lane.threads,
        steps=lane.steps,
        rounds=np.stack([values[0].reshape(rounds, lane.steps).mean(1) for values in found], axis=1).tolist(),
        phases=[_phases(values, least, lane.shared) for values in found],
        exchange=(exchange.mean(axis=0) - waiting).reshape(rounds, lane.steps).mean(1).tolist(),
        waiting=waiting.reshape(rounds, lane.steps).mean(1).tolist(),
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
        self._store = default_store() if rank.world > 1 else None

    def wait(self) -> None:
        if self._store is None:
            return
        self._number += 1
        self._store.set(f"gate/{self._number}/{self._rank.rank}", "")
        self._store.wait([f"gate/{self._number}/{other}" for other in range(self._rank.world)])
