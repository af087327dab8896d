"""Measuring a fit: the probe for computing and contention, `lockstep comms` for the exchange, one pass for the layers."""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lockstep import probe
from lockstep.backends.costs import store
from lockstep.backends.costs.cells import Cell
from lockstep.backends.costs.plan import LARGEST, sizes
from lockstep.comms.measure import Settings, measure
from lockstep.errors import RunFailed
from lockstep.machine import starving
from lockstep.machine.cores import cores
from lockstep.measure.environment import version_of
from lockstep.measure.records import read_steps
from lockstep.placement import Placement
from lockstep.predict import layers
from lockstep.predict.compute import Compute, Point
from lockstep.predict.exchange import Software
from lockstep.predict.fit import Fit, Measured
from lockstep.predict.messages import Message, messages
from lockstep.predict.waiting import Noise, noise_of
from lockstep.recipe import EarlyStopping, Recipe
from lockstep.run import Probe, Run
from lockstep.shapes import Spent
from lockstep.ways import Way, pooled, spent_in

Tell = Callable[[str], None]

SECONDS = 40.0
"""Seconds of the probe's rounds; its start and its warm-up are extra."""
SHORTEST_S = 1e-6
MOST_BATCHES = 11
# The largest batch is chosen so that its step takes no longer than this: then a fit stays under two minutes.
LONGEST_STEP_S = 0.7
MOST_NOISE = 4000
CELL_S, CELL_ROUNDS, CELL_LIMIT_S = 0.05, 3, 20.0


class Wanted(NamedTuple):
    """What a fit has to measure."""

    recipe: Recipe
    placement: Placement
    layers: layers.Answer
    own: int
    """The batch of one rank."""
    others: list[int]

    @property
    def trial(self) -> Recipe:
        return _trial(self.recipe, self.own * self.placement.ranks)

    @property
    def probe(self) -> Probe:
        return Probe(batches=self.others, seconds=SECONDS)

    @property
    def sent(self) -> list[Message]:
        return messages(self.placement, self.layers.gradients, self.layers.norms)


def make(
    recipe: Recipe, placement: Placement, batch: int, tell: Tell, data_root: str | None = None, anew: bool = False
) -> Fit:
    """Measure; `recipe` and `placement` are those of `here`, `batch` the largest global batch to be predicted.

    `anew`: also measure the all-reduce if the store already has it.
    """
    began = time.time()
    tell("predict: looking at the model's layers …")
    wanted = want(recipe, placement, batch, data_root)
    with tempfile.TemporaryDirectory(prefix="lockstep-predict-") as scratch:
        sizes = ", ".join(map(str, sorted([wanted.own, *wanted.others])))
        tell(f"predict: measuring steps of {sizes} samples a rank …")
        run = Path(scratch) / "probe"
        ways = probe.measure(wanted.trial, placement, run, wanted.probe, data_root)
        seen = look(Run(run), ways)
        software = exchange(placement, wanted.sent, Path(scratch) / "comms", tell, anew)
    return fit_of(wanted, seen, software, began)


def want(recipe: Recipe, placement: Placement, batch: int, data_root: str | None = None) -> Wanted:
    found = layers.ask(layers.Question(recipe=recipe, placement=placement, data_root=data_root))
    own, others = grid(batch, placement.ranks, LONGEST_STEP_S / found.seconds_per_sample)
    return Wanted(recipe, placement, found, own, others)


class Seen(NamedTuple):
    """What a probe has measured."""

    ways: dict[str, Way]
    noise: Noise
    spent: Spent | None = None


def look(run: Run, ways: dict[str, Way]) -> Seen:
    """Read all that a fit needs of a probe's folder, before it goes."""
    if not ways:
        raise RunFailed("predict: the probe measured nothing")
    return Seen(ways, _noise(run, ways["apart" if "apart" in ways else "plain"]), spent_in(run.folder))


def together(starts: Sequence[Seen]) -> Seen:
    """What several starts of a probe have measured: one differs from another for its whole life."""
    noise = noise_of(np.concatenate([np.array(seen.noise) for seen in starts], axis=1), MOST_NOISE)
    spent = starving.total(seen.spent for seen in starts if seen.spent)
    return Seen(pooled([seen.ways for seen in starts]), noise, spent)


def fit_of(wanted: Wanted, seen: Seen, software: list[Software], began: float) -> Fit:
    ways, placement = seen.ways, wanted.placement
    return Fit(
        time=began,
        seconds=time.time() - began,
        machine=store.machine(),
        cores=cores(),
        recipe=wanted.recipe,
        placement=placement,
        compute=_compute(ways, placement.ranks),
        together=_together(ways),
        gradients=wanted.layers.gradients,
        norms=wanted.layers.norms,
        updates=wanted.layers.updates,
        software=software,
        noise=seen.noise,
        cores_had=starving.had(seen.spent),
        lockstep=version_of("lockstep") or "unknown",
    )


def grid(batch: int, ranks: int, most: float) -> tuple[int, list[int]]:
    """One rank's own batch, and others from 1 to the whole global batch, each at least twice the one before."""
    top = min(batch, max(ranks, 2 ** int(math.log2(max(1.0, most)))))
    own = max(1, top // ranks)
    step = 2
    while math.log(top, step) > MOST_BATCHES - 2:
        step *= 2
    found = {1, top, 2 * own} | {step**power for power in range(1, 40) if step**power < top}
    return own, sorted(found - {own})


def _trial(recipe: Recipe, global_batch: int) -> Recipe:
    """The recipe without anything that ends a run early or limits its data."""
    chosen: dict[str, Any] = {"epochs": 1, "max_steps": None, "train_limit": None, "early_stopping": EarlyStopping()}
    return msgspec.structs.replace(recipe, **chosen, global_batch=global_batch)


def _compute(ways: dict[str, Way], ranks: int) -> Compute:
    alone = [way for name, way in ways.items() if name == "plain" or name.startswith("plain@")]
    sharing = [way for name, way in ways.items() if name == "apart" or name.startswith("apart@")]
    wrapped = [
        (way, ways[name.replace("wrapped", "plain")]) for name, way in ways.items() if name.startswith("wrapped")
    ]
    found = [_difference(*pair) for pair in wrapped]
    wrapper = (
        float(np.average([one for one, _ in found], weights=[spread**-2 for _, spread in found])) if found else 0.0
    )
    return Compute(ranks=ranks, wrapper=wrapper, alone=_points(alone), sharing=_points(sharing))


def _points(ways: Sequence[Way]) -> list[Point]:
    return [
        Point(
            samples=way.samples,
            seconds=way.seconds,
            # Phases are means over all steps; the step is the median of the rounds.
            backward=way.seconds * _share(way, "backward"),
            optimizer=way.seconds * _share(way, "optimizer"),
        )
        for way in sorted(ways, key=lambda way: way.samples)
    ]


def _share(way: Way, phase: str) -> float:
    return sum(rank[phase] for rank in way.phases) / sum(rank["total"] for rank in way.phases)


def _together(ways: dict[str, Way]) -> list[Measured]:
    """Training steps of all ranks, at batches whose steps without exchange were measured too."""
    alone = {way.samples: way for name, way in ways.items() if name.startswith("apart")}
    found = []
    for name, way in ways.items():
        if (name == "double" or name.startswith("together")) and way.ranks > 1 and way.samples in alone:
            beyond, spread = _difference(way, alone[way.samples])
            found.append(Measured(samples=way.samples, seconds=way.seconds, beyond=beyond, spread=spread))
    return found


def _difference(one: Way, other: Way) -> tuple[float, float]:
    """How much longer the first takes: the median over rounds, and its standard error from the median absolute deviation (assuming normal noise)."""
    found = np.array(one.beyond(other))
    median = float(np.median(found))
    deviation = 1.48 * float(np.median(np.abs(found - median)))
    return median, max(SHORTEST_S, 1.25 * deviation / len(found) ** 0.5)


def _noise(run: Run, way: Way) -> Noise:
    """Deviations of single steps from the mean of their round, as shares."""
    found = []
    taken = way.steps * len(way.rounds)
    for rank in range(way.ranks):
        steps = read_steps(run.rank_folder(rank) / f"way-{way.name}.bin")["total_ns"][-taken:]
        rounds = steps.reshape(len(way.rounds), way.steps).astype(float)
        found.append((rounds / rounds.mean(axis=1, keepdims=True) - 1).ravel())
    return noise_of(np.array(found), MOST_NOISE)


def exchange(placement: Placement, sent: Sequence[Message], folder: Path, tell: Tell, anew: bool) -> list[Software]:
    """The collectives of a step on the placement's backend, with 2 ranks and with a full host: from the store, else measured now.

    The all-reduce is always one of them: local SGD would use it.
    """
    found = []
    sizes: dict[str, list[float]] = {}
    for message in sent:
        sizes.setdefault(message.collective, []).append(message.bytes)
    sizes.setdefault("all_reduce", [sum(message.bytes for message in sent)])
    for ranks, (collective, wanted) in itertools.product(sorted({2, placement.ranks} - {1}), sizes.items()):
        if ranks > max(2, cores()):
            continue  # ranks that take turns on a core say nothing about hosts with enough cores
        known = [] if anew else _known(placement, ranks, collective)
        if not known or known[-1].message_bytes < min(max(wanted), LARGEST):
            tell(f"predict: measuring {collective} on {placement.backend} with {ranks} ranks …")
            known = _measure(placement, ranks, collective, wanted, folder / collective, tell)
        points = [(float(cell.message_bytes), float(cell.median_us or 0.0) / 1e6) for cell in known]
        found.append(Software(backend=placement.backend, collective=collective, ranks=ranks, points=points))
    return found


def _known(placement: Placement, ranks: int, collective: str) -> list[Cell]:
    cells = [
        cell
        for cell in store.load()
        if (cell.backend, cell.device, cell.ranks) == (placement.backend, placement.device, ranks)
    ]
    return _good(cells, collective)


def _good(cells: Sequence[Cell], collective: str) -> list[Cell]:
    """Correct results of a collective, by size; empty if there are too few sizes to interpolate."""
    good = [cell for cell in cells if cell.collective == collective and cell.state == "ok" and cell.median_us]
    good.sort(key=lambda cell: cell.message_bytes)
    return good if len(good) > 2 else []


def _measure(
    placement: Placement, ranks: int, collective: str, wanted: Sequence[float], folder: Path, tell: Tell
) -> list[Cell]:
    largest = min(LARGEST, max(1 << 20, 4 * int(max(wanted))))
    exact = {4 * -(-int(size) // 4) for size in sorted(wanted)[-3:]}
    settings = Settings(
        backends=[placement.backend],
        device=placement.device,
        ranks=[ranks],
        collectives=[collective],
        sizes=sorted({*sizes(largest), *(size for size in exact if size <= LARGEST)}),
        rounds=CELL_ROUNDS,
        cell_s=CELL_S,
        limit_s=CELL_LIMIT_S,
    )
    cells = measure(settings, folder, lambda text: None)
    good = _good(cells, collective)
    if not good:
        worst = next(cell for cell in cells if cell.state != "ok" or not cell.median_us)
        raise RunFailed(f"predict: {collective} on {placement.backend} could not be measured: {worst.reason}")
    try:
        store.save(cells)
    except OSError as error:
        tell(f"warning: not kept for backend=auto: {error.strerror}")
    return good
