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
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lockstep.backends.costs import store
from lockstep.errors import InputError, RunFailed
from lockstep.launch import specify
from lockstep.launch.emulated import network as emulate
from lockstep.launch.emulated.link import parse_link
from lockstep.machine.cores import cores
from lockstep.placement import Placement, ranks_per_host
from lockstep.plan import Plan
from lockstep.predict import measure
from lockstep.predict.fit import Fit, folder, save
from lockstep.predict.held import COMMON, CROWDED_SAMPLES, GROUPS, NEXT_TO_NO_LINK, QUICK, Group, Held
from lockstep.predict.here import here
from lockstep.predict.interval import LIKELY, NEARLY_SURE, interval, kind_of, spread
from lockstep.predict.model import Case, predict, sent
from lockstep.run import Options, Run, read_json, write_atomic
from lockstep.settings import load
from lockstep.turns import Ranks
from lockstep.turns.estimate import Window
from lockstep.turns.survey import Survey
from lockstep.ways import MOST_ROUNDS, read

Tell = Callable[[str], None]

FORMAT = 4
"""3: repeats of a placement were counted as others; 2: what was held out ran after the fit, on a machine that may have changed its speed; 1: errors were averaged with their signs."""
FILE = "check.json"
SURVEY_S, ROUNDS, STARTS = 40.0, 8, 3
FIT, DETOUR, CROWDED = "fit", "next to no link", "crowded"
GOAL_HELD = (0.85, 0.95)
GOAL_MEDIAN, GOAL_NINE_OF_TEN, GOAL_RANKED, APART = 0.05, 0.12, 0.95, 0.05


class Tried(NamedTuple):
    """A held-out placement: what was predicted, and what was measured in the same rounds."""

    group: str
    held: Held
    predicted: float
    measured: float
    repeat: int = 0

    @property
    def error(self) -> float:
        return self.measured / self.predicted - 1


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
        "quick": quick,
        "fits": fits,
        "cases": [_result(each) for each in tried],
        "kinds": by_kind(tried),
        "left_out": left_out,
        "failed": failed,
        "most_ranks": max(_ranks(each.held) for each in tried),
        **summary(tried),
    }
    path, before = (where or folder()) / FILE, known(where)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (quick and before and not before["quick"]):  # a glance does not replace a whole check
        write_atomic(path, document)
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
    if any(each.emulated for each in group.held):
        others[DETOUR] = NEXT_TO_NO_LINK
    if any(each.kind == "crowded" for each in group.held):
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
        hops = 2 * (case.ranks - 1) * len(sent(fit, case))
        fit = msgspec.structs.replace(fit, crowding_s=max(0.0, beyond / hops))
    detour = 0.0
    if survey.of(DETOUR):
        # What emulated hosts cost by themselves: packets go through processes that compete with the ranks for cores. A real network does not
        # have this cost. It is measured with a link of almost no delay, and added to the predictions for the other links.
        predicted = predict(fit, _case(fit, group, NEXT_TO_NO_LINK)).seconds
        hops = 2 * len(sent(fit, _case(fit, group, NEXT_TO_NO_LINK)))  # two of each message
        detour = max(0.0, seconds(survey.of(DETOUR)) - predicted) / hops
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


def summary(tried: Sequence[Tried]) -> dict[str, Any]:
    """Of relative errors, (measured - predicted) / predicted, each of a single prediction: that is what a user gets."""
    errors = [each.error for each in tried]
    sizes = [abs(error) for error in errors]
    median, nine = statistics.median(sizes), float(np.quantile(sizes, 0.9))
    ranked, held = ranking(tried), coverage(tried, NEARLY_SURE)
    half = 0.5 / len(tried)  # a share of so many is no finer
    return {
        "n": len(errors),
        "median_error": median,
        "ninth_decile": nine,
        "worst_error": max(sizes),
        "lowest": min(errors),
        "highest": max(errors),
        "ranked": ranked,
        "half_held": coverage(tried, LIKELY),
        "nine_of_ten_held": held,
        "goal_met": median <= GOAL_MEDIAN
        and nine <= GOAL_NINE_OF_TEN
        and (ranked is None or ranked >= GOAL_RANKED)
        and (held is None or GOAL_HELD[0] - half <= held <= GOAL_HELD[1] + half),
    }


def coverage(tried: Sequence[Tried], level: float) -> float | None:
    """How often an interval holds that comes from the errors of all other fits: errors of one fit are alike."""
    inside = []
    for each in tried:
        others = by_kind([other for other in tried if other.group != each.group])
        found = interval(each.predicted, each.held.kind, _ranks(each.held), others, level)
        if found:
            inside.append(found.low <= each.measured <= found.high)
    return statistics.fmean(inside) if inside else None


def ranking(tried: Sequence[Tried]) -> float | None:
    """Of two placements of one recipe that differ by more than 5 % in time a sample: how often the faster one was predicted to be."""
    right = total = 0
    for one, other in itertools.combinations(tried, 2):
        if (one.group, one.repeat) != (other.group, other.repeat):
            continue
        measured = (one.measured / _batch(one.held)) / (other.measured / _batch(other.held))
        predicted = (one.predicted / _batch(one.held)) / (other.predicted / _batch(other.held))
        if abs(measured - 1) > APART:
            total += 1
            right += (measured > 1) == (predicted > 1)
    return right / total if total else None


def by_kind(tried: Sequence[Tried]) -> dict[str, dict[str, Any]]:
    kinds = dict.fromkeys(each.held.kind for each in tried)
    return {
        kind: {
            "n": len(errors),
            "placements": placements,
            "median_error": statistics.median(map(abs, errors)),
            "worst_error": max(map(abs, errors)),
            "mean_signed": statistics.fmean(errors),
            "spread": spread(errors, [each.error for each in tried], placements),
            "most_ranks": max(_ranks(each.held) for each in tried if each.held.kind == kind),
        }
        for kind in kinds
        if (errors := [each.error for each in tried if each.held.kind == kind])
        and (placements := len({(each.group, each.held) for each in tried if each.held.kind == kind}))
    }


def sentence(found: dict[str, Any]) -> str:
    """What a check came to."""
    ranked = (
        f"; of pairs that differ by more than {APART:.0%}, {found['ranked']:.0%} are in the right order"
        if found["ranked"] is not None
        else ""
    )
    if found["nine_of_ten_held"] is not None:
        ranked += f"; 90 % intervals from the other fits' errors hold in {found['nine_of_ten_held']:.0%}"
    return (
        f"{found['n']} single predictions were off by {found['median_error']:.1%} in the median, nine of ten by at most "
        f"{found['ninth_decile']:.1%}, the worst by {found['worst_error']:.1%}{ranked} (goal {GOAL_MEDIAN:.0%}, {GOAL_NINE_OF_TEN:.0%}, "
        f"{GOAL_RANKED:.0%} and 85 to 95 %: {'met' if found['goal_met'] else 'missed'})"
    )


def known(where: Path | None = None) -> dict[str, Any] | None:
    """The newest check of this machine; None if there is none."""
    content = read_json((where or folder()) / FILE)
    return content if content and content.get("format") == FORMAT else None


def _ranks(held: Held) -> int:
    return _number(held, "ranks")


def _batch(held: Held) -> int:
    return _number(held, "global_batch")


def _number(held: Held, key: str) -> int:
    return next(int(word.partition("=")[2]) for word in held.words if word.startswith(f"{key}="))


def _about(name: str, fit: Fit) -> dict[str, Any]:
    batches = [int(point.samples) for point in fit.compute.alone]
    return {"fit": name, "seconds": fit.seconds, "batches": batches, "ranks": fit.placement.ranks}


def _case(fit: Fit, group: Group, words: Sequence[str], detour: float = 0.0) -> Case:
    _, spec = specify(*load([], [*COMMON, *group.fit, *words]), Options(save_model=False))
    return case_of(fit, spec.placement, spec.plan, detour)


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


def _result(each: Tried) -> dict[str, Any]:
    return {
        "kind": each.held.kind,
        "fit": each.group,
        "placement": " ".join(each.held.words),
        "predicted_ms": each.predicted * 1e3,
        "measured_ms": each.measured * 1e3,
        "error": each.error,
    }
