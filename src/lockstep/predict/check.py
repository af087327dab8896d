"""How good the predictions are: fit some placements of this machine, predict others, and run those for real.

No held-out run is used in a fit. Its step is measured as the fits measure theirs: means over windows of steps and over ranks, and the
median of the windows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lockstep.backends.costs import store
from lockstep.errors import InputError
from lockstep.launch import execute, prepare, specify
from lockstep.launch.emulated import network as emulate
from lockstep.launch.emulated.link import parse_link
from lockstep.machine.cores import cores
from lockstep.measure.records import read_steps
from lockstep.placement import Placement, Plan, ranks_per_host
from lockstep.predict import measure
from lockstep.predict.fit import Fit, folder, save
from lockstep.predict.here import here
from lockstep.predict.model import Case, predict
from lockstep.run import Options, Run, Spec, read_json, write_atomic
from lockstep.settings import load

Tell = Callable[[str], None]

FORMAT = 2
"""1: errors of several rounds were averaged with their signs, which makes them smaller than those of single predictions."""
FILE = "check.json"
RUN_S = 6.0
"""Steps in a held-out run."""
FEWEST_STEPS, MOST_STEPS = 60, 4000
WINDOWS = 20
GOAL_MEDIAN, GOAL_WORST = 0.05, 0.15


@dataclass(frozen=True)
class Held:
    """A placement that no fit has seen, and which fit predicts it."""

    what: str
    """How it differs from the fitted placements."""
    fit: str
    words: tuple[str, ...]


COMMON = ("threads=1", "test_limit=100", "seed=5")
# What is fitted: the arguments of a recipe, with its global batch.
FITS: dict[str, tuple[str, ...]] = {
    "mnist-convnet, gloo": ("model=mnist-convnet", "data=embedded", "ranks=2", "backend=gloo", "global_batch=256"),
    "mnist-convnet, shm": ("model=mnist-convnet", "data=embedded", "ranks=2", "backend=shm", "global_batch=256"),
    "cifar-vgg, gloo": ("model=cifar-vgg", "data=embedded-color", "ranks=2", "backend=gloo", "global_batch=32"),
}
NET, SHARED, VGG = FITS
SLOW = ("hosts=emulated:2", "link=100mbit,5ms")
QUICKER = ("hosts=emulated:2", "link=1gbit,0.5ms")
HELD = (
    Held("batch", NET, ("ranks=1", "global_batch=48")),
    Held("batch", NET, ("ranks=1", "global_batch=200")),
    Held("batch and ranks", NET, ("ranks=2", "global_batch=96")),
    Held("batch and ranks", NET, ("ranks=2", "global_batch=20")),
    Held("accumulation", NET, ("ranks=2", "global_batch=192", "accumulation=4")),
    Held("strategy", NET, ("ranks=2", "global_batch=96", "strategy=local-sgd", "local_sgd.every=4")),
    Held("link", NET, ("ranks=2", "global_batch=96", *SLOW)),
    Held("link", NET, ("ranks=2", "global_batch=96", *QUICKER)),
    Held("link and strategy", NET, ("ranks=2", "global_batch=96", *SLOW, "strategy=local-sgd", "local_sgd.every=8")),
    Held("backend", SHARED, ("ranks=2", "global_batch=96")),
    Held("backend", SHARED, ("ranks=2", "global_batch=20")),
    Held("model", VGG, ("ranks=1", "global_batch=12")),
    Held("model", VGG, ("ranks=2", "global_batch=24")),
    Held("model and link", VGG, ("ranks=2", "global_batch=24", *QUICKER)),
)
# A batch that was fitted, so that only the path between the hosts is unknown; a small one, so that it is visible.
NEXT_TO_NO_LINK = Held("", NET, ("ranks=2", "global_batch=8", "hosts=emulated:2", "link=0.1ms"))
QUICK = (HELD[0], HELD[2], HELD[4])


def run(quick: bool, tell: Tell, where: Path | None = None, repeats: int = 2) -> dict[str, Any]:
    """Fit, predict, run, compare; the result is kept for later predictions. `where`: the folder of fits."""
    if cores() < 2:
        raise InputError("predict --check: two ranks need two cores, and this process may use one")
    cases, left_out = possible(QUICK if quick else HELD)
    fits: dict[str, list[Fit]] = {case.fit: [] for case in cases}
    tried: dict[Held, list[tuple[float, float]]] = {case: [] for case in cases}
    emulated, detours, done = any(_is_emulated(case) for case in cases), list[float](), 0
    with tempfile.TemporaryDirectory(prefix="lockstep-predict-") as scratch:
        for _ in range(repeats):
            for name, made in fits.items():
                # Fitted again just before the runs: a machine that changes its speed within minutes must not look like a wrong model.
                fit = _fit(name, where, tell)
                made.append(fit)
                if emulated and name == NET:
                    tell("predict: what emulated hosts cost by themselves …")
                    detours.append(_detour(fit, Path(scratch) / f"detour-{done}"))
                for case in (one for one in cases if one.fit == name):
                    done += 1
                    tell(
                        f"predict: held-out run {done}/{repeats * len(cases)}: {case.what}, {name}, {' '.join(case.words)}"
                    )
                    where_to = Path(scratch) / f"run-{done}"
                    tried[case].append(_try(fit, case, where_to, detours[-1] if detours else 0.0))
    document: dict[str, Any] = {
        "format": FORMAT,
        "time": time.time(),
        "machine": store.machine(),
        "quick": quick,
        "fits": [_about(name, made[-1]) for name, made in fits.items()],
        "cases": [_result(case, tried[case]) for case in cases],
        "left_out": left_out,
        "most_ranks": max(_ranks(case) for case in cases),
        "drift": _drift(fits),
        "detours_ms": [seconds * 1e3 for seconds in detours],
    }
    document |= summary([error for case in document["cases"] for error in case["errors"]])
    path = (where or folder()) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, document)
    return document


def possible(cases: Sequence[Held]) -> tuple[list[Held], str | None]:
    """The cases that this machine can run; emulated hosts need root."""
    reason = emulate.problem()
    if reason is None:
        return list(cases), None
    return [case for case in cases if not _is_emulated(case)], reason


def _is_emulated(case: Held) -> bool:
    return any(word.startswith("hosts=emulated") for word in case.words)


def summary(errors: Sequence[float]) -> dict[str, Any]:
    """Summarise relative errors, (measured - predicted) / predicted, each of a single prediction: that is what a user gets."""
    sizes = [abs(error) for error in errors]
    return {
        "n": len(errors),
        "median_error": statistics.median(sizes),
        "worst_error": max(sizes),
        "lowest": min(errors),
        "highest": max(errors),
        "goal_met": statistics.median(sizes) <= GOAL_MEDIAN and max(sizes) <= GOAL_WORST,
    }


def known(where: Path | None = None) -> dict[str, Any] | None:
    """The newest check of this machine; None if there is none."""
    content = read_json((where or folder()) / FILE)
    return content if content and content.get("format") == FORMAT else None


def _ranks(case: Held) -> int:
    return max(int(word.partition("=")[2]) for word in case.words if word.startswith("ranks="))


def _fit(name: str, where: Path | None, tell: Tell) -> Fit:
    recipe, placement = load([], [*COMMON, *FITS[name]])
    recipe, placement, _ = here(recipe, placement)
    tell(f"predict: fitting {name} …")
    fit = measure.make(recipe, placement, recipe.global_batch, lambda text: None, anew=True)
    save(fit, where)
    return fit


def _about(name: str, fit: Fit) -> dict[str, Any]:
    batches = [int(point.samples) for point in fit.compute.alone]
    return {"fit": name, "seconds": fit.seconds, "batches": batches, "ranks": fit.placement.ranks}


def _detour(fit: Fit, folder: Path) -> float:
    """Seconds that a hop between emulated hosts takes by itself: packets go through processes that compete with the ranks for cores.

    A real network does not have this cost. It is measured with a link of almost no delay, and added to the other predictions.
    """
    predicted, taken = _try(fit, NEXT_TO_NO_LINK, folder, 0.0)
    return max(0.0, taken - predicted) / 2  # two ranks: two hops


def _try(fit: Fit, case: Held, folder: Path, detour: float) -> tuple[float, float]:
    """Predict, then run."""
    recipe, placement = load([], [*COMMON, *FITS[case.fit], *case.words])
    _, spec = specify(recipe, placement, Options(save_model=False), folder.parent, folder.name)
    predicted = predict(fit, case_of(fit, spec.placement, spec.plan, detour)).seconds
    steps = max(FEWEST_STEPS, min(MOST_STEPS, round(RUN_S / predicted)))
    epochs = -(-steps // spec.plan.steps_per_epoch)
    recipe = msgspec.structs.replace(recipe, max_steps=steps, epochs=epochs)
    run, spec = prepare(recipe, placement, Options(save_model=False), folder.parent, folder.name)
    return predicted, measured_step(execute(run, spec), spec)


def case_of(fit: Fit, placement: Placement, plan: Plan, detour: float = 0.0) -> Case:
    """A run's own placement as the model sees it. Emulated hosts share this machine."""
    local = placement.strategy in ("local-sgd", "diloco")
    return Case(
        micro=plan.micro_batch,
        accumulation=plan.accumulation,
        hosts=placement.hosts,
        per_host=ranks_per_host(placement),
        sharing=placement.ranks if placement.emulated else None,
        link=parse_link(placement.link),
        detour_s=detour if placement.emulated else 0.0,
        every=placement.local_sgd.every if local and placement.ranks > 1 else None,
    )


def measured_step(run: Run, spec: Spec) -> float:
    """Seconds of a step: the mean over ranks and over the steps of a window, and the median of the windows. Partial batches are left out."""
    rows = [read_steps(run.rank_folder(rank) / "steps.bin") for rank in range(spec.plan.ranks)]
    full = spec.plan.micro_batch * spec.plan.accumulation
    whole = np.all([(one["samples"] == full) & (one["warmup"] == 0) for one in rows], axis=0)
    steps = np.mean([one["total_ns"][whole] for one in rows], axis=0) / 1e9
    # Rounds of local SGD have one long step each: a window holds whole rounds.
    every = spec.placement.local_sgd.every
    length = max(1, len(steps) // WINDOWS // every) * every
    windows = steps[: len(steps) // length * length].reshape(-1, length).mean(axis=1)
    return float(np.median(windows))


def _result(case: Held, tried: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """`tried`: prediction and run of each round."""
    return {
        "what": case.what,
        "fit": case.fit,
        "placement": " ".join(case.words),
        "predictions_ms": [predicted * 1e3 for predicted, _ in tried],
        "runs_ms": [taken * 1e3 for _, taken in tried],
        "errors": [taken / predicted - 1 for predicted, taken in tried],
    }


def _drift(fits: dict[str, list[Fit]]) -> float:
    """The largest change of the machine's own speed between two fits of the same placement."""
    changes = [
        statistics.median(
            two.seconds / one.seconds - 1
            for one, two in zip(before.compute.sharing, after.compute.sharing, strict=True)
        )
        for made in fits.values()
        for before, after in pairwise(made)
    ]
    return max(changes, key=abs, default=0.0)
