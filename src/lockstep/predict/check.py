"""How good the predictions are: fit some placements of this machine, predict others, and measure those, in the same rounds.

No held-out placement is used in a fit. The probe that a fit comes from and the placements that it is to predict are alive at the same time
and take windows in turns, so a machine that changes its speed changes it for both.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lockstep.backends.costs import store
from lockstep.errors import InputError, RunFailed
from lockstep.launch import specify
from lockstep.launch.emulated import network as emulate
from lockstep.launch.emulated.link import parse_link
from lockstep.machine.cores import cores
from lockstep.measure.environment import version_of
from lockstep.placement import Placement, ranks_per_host
from lockstep.plan import Plan
from lockstep.predict import measure
from lockstep.predict.exchange import NO_DETOUR, Detour
from lockstep.predict.fit import Fit, folder, save
from lockstep.predict.held import COMMON, CROWDED_SAMPLES, GROUPS, NEXT_TO_NO_LINK, QUICK, Group
from lockstep.predict.here import here
from lockstep.predict.interval import kind_of
from lockstep.predict.model import Case, path, predict
from lockstep.predict.score import Tried, by_kind, summary
from lockstep.run import Options, Run, read_json, write_atomic
from lockstep.settings import load
from lockstep.turns import Ranks
from lockstep.turns.estimate import Window
from lockstep.turns.survey import Survey
from lockstep.ways import MOST_ROUNDS, read

Tell = Callable[[str], None]

FORMAT = 5
"""4: another model (delays of gloo, ranks that are late together, the tail). 3: repeats of a placement were counted as others. 2: what was held
out ran after the fit, on a machine that may have changed its speed. 1: errors were averaged with their signs."""
FILE = "check.json"
SURVEY_S, ROUNDS, STARTS = 40.0, 8, 3
FIT, CROWDED = "fit", "crowded"
DETOURS = {hosts: f"next to no link between {hosts} hosts" for hosts in NEXT_TO_NO_LINK}


def run(quick: bool, tell: Tell, where: Path | None = None, repeats: int = 2) -> dict[str, Any]:
    """Fit, predict, measure, compare; the result is kept for later predictions. `where`: the folder of fits."""
    if cores() < 2:
        raise InputError("predict --check: two ranks need two cores, and this process may use one")
    groups, left_out = possible(QUICK if quick else GROUPS)
    tried: list[Tried] = []
    failed: list[str] = []
    fits: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-predict-") as scratch:
        for repeat, (number, group) in itertools.product(range(repeats), enumerate(groups)):
            at = f"{repeat * len(groups) + number + 1}/{repeats * len(groups)}"
            tell(f"predict: {at}: {group.name}: starting {1 + len(group.held)} placements …")
            try:
                fit, found, lost = _survey(group, Path(scratch) / f"{repeat}-{number}", tell)
            except RunFailed as error:  # the others are still worth having
                failed.append(str(error))
                continue
            save(fit, where)
            tried += [each._replace(repeat=repeat) for each in found]
            failed += lost
            fits.append(_about(group.name, fit))
    if not tried:
        raise RunFailed(f"predict --check: nothing could be measured: {'; '.join(failed)}")
    document: dict[str, Any] = {
        "format": FORMAT,
        "time": time.time(),
        "machine": store.machine(),
        "lockstep": version_of("lockstep") or "unknown",
        "quick": quick,
        "fits": fits,
        "cases": [_result(each) for each in tried],
        "kinds": by_kind(tried),
        "left_out": left_out,
        "failed": failed,
        "most_ranks": max(each.held.ranks for each in tried),
        **summary(tried),
    }
    file, before = (where or folder()) / FILE, known(where)
    file.parent.mkdir(parents=True, exist_ok=True)
    if not (quick and before and not before["quick"]):  # a glance does not replace a whole check
        write_atomic(file, document)
    return document


def _survey(group: Group, scratch: Path, tell: Tell) -> tuple[Fit, list[Tried], list[str]]:
    """One start of the fit's ranks and of everything that it is to predict, and their rounds."""
    began = time.time()
    recipe, placement = load([], [*COMMON, *group.fit])
    recipe, placement, _ = here(recipe, placement)
    wanted = measure.want(recipe, placement, recipe.global_batch)
    seen: list[measure.Seen] = []

    def ended(run: Run) -> None:
        seen.append(measure.look(run, read(run.folder)))

    held = {" ".join(each.words): each for each in group.held}
    options = Options(probe=wanted.probe)
    racing = [Ranks(FIT, wanted.trial, placement, scratch / FIT, options, ended)]
    others = {name: each.words for name, each in held.items()}
    most = max((each.ranks for each in group.held if each.emulated), default=0)
    others |= {DETOURS[hosts]: words for hosts, words in NEXT_TO_NO_LINK.items() if hosts <= max(2, most) and most}
    if any(each.ranks > cores() for each in group.held if not each.emulated):
        many = 2 * cores()
        others[CROWDED] = (f"ranks={many}", f"global_batch={many * CROWDED_SAMPLES}")
    for number, (name, words) in enumerate(others.items()):
        racing.append(Ranks(name, *load([], [*COMMON, *group.fit, *words]), scratch / str(number)))
    survey = Survey(racing, SURVEY_S, min(ROUNDS, MOST_ROUNDS), STARTS, [FIT])
    survey.run()
    if not seen:
        raise RunFailed(f"predict: the fit of {group.name} failed: {survey.failures.get(FIT, 'it measured nothing')}")
    software = measure.exchange(placement, wanted.sent, scratch / "comms", tell, anew=True)
    fit = measure.fit_of(wanted, measure.together(seen), software, began)
    if survey.of(CROWDED):
        case = _case(fit, group, others[CROWDED])
        beyond = seconds(survey.of(CROWDED)) - predict(fit, case).seconds
        fit = msgspec.structs.replace(fit, crowding_s=max(0.0, beyond / path(fit, case).hops))
    # What emulated hosts cost by themselves is measured with links of almost no delay, and added to the predictions for the other links. A
    # real network does not have this cost.
    anchors = []
    for name in DETOURS.values():
        if survey.of(name):
            case = _case(fit, group, others[name])
            way = path(fit, case)
            anchors.append((way.messages, way.trips, seconds(survey.of(name)) - predict(fit, case).seconds))
    detour = detour_of(anchors)
    found = []
    for name, each in held.items():
        if survey.of(name):
            case = _case(fit, group, each.words, detour)
            # On a host with more cores, ranks that crowd this one do not.
            kind = kind_of(fit, case)
            found.append(
                Tried(group.name, each._replace(kind=kind), predict(fit, case).seconds, seconds(survey.of(name)))
            )
    lost = [f"{group.name}: {name}: {reason}" for name, reason in survey.failures.items()]
    return fit, found, lost


def seconds(windows: Sequence[Window]) -> float:
    """Of a step: the median of a start's windows, and the mean of the starts."""
    starts = dict.fromkeys(window.start for window in windows)
    return statistics.fmean(
        statistics.median(window.wall / window.steps for window in windows if window.start == start) for start in starts
    )


def possible(groups: Iterable[Group]) -> tuple[list[Group], str | None]:
    """What this machine can run; emulated hosts need root."""
    reason = emulate.problem()
    if reason is None:
        return list(groups), None
    kept = [group._replace(held=tuple(each for each in group.held if not each.emulated)) for group in groups]
    return [group for group in kept if group.held], reason


def known(where: Path | None = None) -> dict[str, Any] | None:
    """The newest check of this machine; None if there is none."""
    content = read_json((where or folder()) / FILE)
    return content if content and content.get("format") == FORMAT else None


def _about(name: str, fit: Fit) -> dict[str, Any]:
    batches = [int(point.samples) for point in fit.compute.alone]
    return {"fit": name, "seconds": fit.seconds, "batches": batches, "ranks": fit.placement.ranks}


def detour_of(anchors: Sequence[tuple[float, float, float]]) -> Detour:
    """From messages, trips and the seconds that a step took longer: what each costs. One anchor cannot tell them apart: then it is the trips."""
    if not anchors:
        return NO_DETOUR
    messages, trips, beyond = np.array(anchors).T
    if len(anchors) > 1:
        found, *_ = np.linalg.lstsq(np.stack([messages, trips], axis=1), beyond, rcond=None)
        if (found >= 0).all():
            return Detour(*map(float, found))
    return Detour(0.0, max(0.0, float(trips @ beyond / (trips @ trips))))


def _case(fit: Fit, group: Group, words: Sequence[str], detour: Detour = NO_DETOUR) -> Case:
    _, spec = specify(*load([], [*COMMON, *group.fit, *words]), Options(save_model=False))
    return case_of(fit, spec.placement, spec.plan, detour)


def case_of(fit: Fit, placement: Placement, plan: Plan, detour: Detour = NO_DETOUR) -> Case:
    """A run's own placement as the model sees it. Emulated hosts share this machine."""
    local = placement.strategy in ("local-sgd", "diloco")
    return Case(
        micro=plan.micro_batch,
        accumulation=plan.accumulation,
        hosts=placement.hosts,
        per_host=ranks_per_host(placement),
        sharing=placement.ranks if placement.emulated else None,
        link=parse_link(placement.link),
        detour=detour if placement.emulated else NO_DETOUR,
        every=placement.local_sgd.every if local and placement.ranks > 1 else None,
    )


def _result(each: Tried) -> dict[str, Any]:
    return {
        "kind": each.held.kind,
        "fit": each.group,
        "placement": " ".join(each.held.words),
        "predicted_ms": each.predicted * 1e3,
        "measured_ms": each.measured * 1e3,
        "error": each.error,
    }
