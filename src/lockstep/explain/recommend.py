"""Which backend, how many ranks, which batch? The least time to the accuracy asked for, of all that was run on this task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.metrics import common_target
from lockstep.run import Spec
from lockstep.settings import dotted
from lockstep.statistics import MARGIN_DIFFERENCE, MARGIN_RATIO
from lockstep.study.gather import Group, of_runs
from lockstep.study.observed import observed
from lockstep.study.versus import versus_all
from lockstep.units import counted, percent

METRIC = "seconds_to_target"


def answer(evidence: Evidence) -> Iterator[Finding]:
    if evidence.spec.options.attached is not None:  # what it learns, and on what, is not known
        return
    groups = [group for group in _settings(evidence) if group.done and _task(group.spec) == _task(evidence.spec)]
    if len(groups) < 2:
        yield _alone(evidence)
        return
    mine = next((g for g in groups if any(s.own and s.run.id == evidence.run.id for s in g.samples)), None)
    target = evidence.target or (_reached(mine) if mine else None)
    timed = {group.name: _median_time(group, target) for group in groups}
    reached = [group for group in groups if timed[group.name] is not None]
    if target is None or not reached or mine is None:
        return
    if not [group for group in groups if group is not mine and _times(group, target)]:
        yield _alone(evidence)
        return
    best = min(reached, key=lambda group: timed[group.name] or 0.0)
    figures = {"target": target, "seconds": timed, "best": best.name, "mine": mine.name}
    missed = [group.name for group in groups if timed[group.name] is None and _times(group, target)]
    others = f"; never reached by {len(missed)} of them" if missed else ""
    # The best setting was chosen by looking at all of them, so all comparisons are one family.
    rivals = [group for group in groups if group is not mine]
    compared = dict(zip(map(id, rivals), versus_all([(group, mine) for group in rivals], METRIC, target), strict=True))
    found = compared.get(id(best))
    if found is None or found.verdict == "the same":
        margin = "" if found is None else f" by more than {percent(MARGIN_RATIO)}"
        yield Finding(
            verdict=f"nothing that was run here reaches {target:.1%} sooner than this{margin}",
            why=f"{timed[best.name]:.3g} s of training{'' if found is None else f' with {best.name}'}, the least of {counted(len(groups), 'setting')}{others}",
            figures=figures,
        )
        return
    time = timed[mine.name]
    saved = None if time is None else 1 - (timed[best.name] or 0.0) / time
    gain = "this run never reached it" if saved is None else f"{percent(saved)} less than this run's {time:.3g} s"
    pairs = counted(found.n, "start" if found.how == "turns" else "pair")
    sure = "" if time is None else f" ({found.verdict}, n = {pairs})"
    yield Finding(
        verdict=f"for {target:.1%}, choose {best.name}: {timed[best.name]:.3g} s, {gain}{sure}",
        why=f"the least time to that accuracy of {counted(len(groups), 'setting')} of this task that were run{others}",
        next=_how(best, mine) if found.settled or time is None else _repeated(evidence, best, mine, found.how),
        cost=max(0.0, saved or 0.0) if found.verdict == "faster" else 0.0,
        figures={**figures, "saved": saved, "verdict": found.verdict, "pairs": found.n},
    )


def _reached(mine: Group) -> float | None:
    """What its own trainings reached, less what counts as the same: a setting that learned less is no replacement, however fast."""
    found = common_target([each.run for each in mine.done])
    return None if found is None else max(0.0, round(found - MARGIN_DIFFERENCE, 4))


def _settings(evidence: Evidence) -> Sequence[Group]:
    """The cells of the run's study, where it has others: they may share its trainings, and have none of their own. Else the runs beside it."""
    return evidence.cells if _in_study(evidence) else of_runs([evidence.run, *evidence.peers])


def _in_study(evidence: Evidence) -> bool:
    return len(evidence.cells) > 1


def _task(spec: Spec) -> tuple[str, str, str, int | None, int | None]:
    recipe = spec.recipe
    return recipe.model, recipe.data, recipe.loss, recipe.train_limit, recipe.test_limit


def _how(best: Group, mine: Group) -> str:
    """What to type: the settings in which it differs."""
    ours, theirs = (dotted(group.spec.recipe, group.spec.placement) for group in (best, mine))
    changed = {key: value for key, value in ours.items() if value != theirs.get(key) and key != "seed"}
    typed = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changed.items()]
    return " ".join(typed) or best.name


def _repeated(evidence: Evidence, best: Group, mine: Group, how: str) -> str:
    """What to do for more pairs: a study adds seeds by itself, and starts of its race."""
    if _in_study(evidence) and "turns" in how:
        return "more race_minutes in the study's file, and its own command again"
    if _in_study(evidence):
        return f"the study's own command again, with --repeats {2 * max(len(best.done), len(mine.done), 1)}"
    taken = [each.spec.recipe.seed for group in (best, mine) for each in group.done]
    return f"repeat both with another seed: seed={1 + max(taken)}"


def _times(group: Group, target: float | None) -> list[float]:
    """Seconds to the target, by training. By the race where there was one; a cell that neither raced nor trained has none."""
    return list(observed(group, METRIC, target).values())


def _median_time(group: Group, target: float | None) -> float | None:
    """The median time to the target; None if a run of the group did not reach it."""
    values = _times(group, target)
    return statistics.median(values) if values and all(math.isfinite(each) for each in values) else None


def _alone(evidence: Evidence) -> Finding:
    cells = len(evidence.cells)
    return Finding(
        verdict="there is nothing to choose from: "
        + ("no other cell of this study was timed" if cells > 1 else "only this setting was run"),
        why=f"the other {counted(cells - 1, 'cell')} neither raced nor trained, or differ in model or data"
        if cells > 1
        else "no other run of this model and data is in this folder of runs",
        next="lockstep study run backends, scaling or batch-size (--quick takes minutes)",
    )
