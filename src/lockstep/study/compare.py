"""The comparison of cells as one document: medians with intervals, each cell against the baseline (versus.py), claims, and remarks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lockstep.errors import InputError
from lockstep.machine import starving
from lockstep.metrics import USUAL, Kind, common_target, fitting, metric_of
from lockstep.run import Run
from lockstep.statistics import ALPHA, WORDS, Comparison, Interval, median_interval
from lockstep.study import effects, fairness, gather, stability
from lockstep.study.check import check
from lockstep.study.definition import Published, nearest
from lockstep.study.folder import StudyFolder, overheads
from lockstep.study.gather import Group
from lockstep.study.observed import observed
from lockstep.study.reasons import known
from lockstep.study.versus import LOOK_ALPHA, verdict_text, versus, versus_all
from lockstep.units import clock

Document = dict[str, Any]
TOO_GOOD = 1.2


def study_document(folder: StudyFolder) -> Document:
    """A study as far as it has come."""
    planned = folder.read()
    study, groups = planned.study, gather.of_study(folder, planned)
    document = table(groups, study.baseline, study.metrics, study.target_accuracy, LOOK_ALPHA)
    document |= {
        "study": folder.name,
        "about": study.about,
        "race": _race(groups),
        "check": check(groups, folder.records()),
    }
    document["runs_planned"] = len(planned.expected(folder.started()))
    document["effects"] = effects.effects(study, groups, document["target_accuracy"])
    document["published"] = [_published(found, groups, document["target_accuracy"]) for found in study.published]
    document["overhead"] = overheads(folder.records())
    if any(cell.job for cell in planned.cells):
        document["fairness"].append(
            "runs were Slurm jobs, on nodes and at times that the scheduler chose: a difference in time may be one of nodes or of hours"
        )
    return document


def runs_document(runs: Sequence[Run], baseline: str | None = None) -> Document:
    """Compare any runs. They did not take turns, so the machine may have changed between them; a note says so."""
    groups = gather.of_runs(runs)
    if baseline is not None and baseline not in [group.name for group in groups]:
        raise InputError(f"--baseline {baseline}: no such cell; {nearest(baseline, [group.name for group in groups])}")
    document = table(groups, baseline, fitting(USUAL, [group.spec.recipe for group in groups if group.samples]), None)
    if len(groups) > 1:
        times = [run.spec().created for run in runs]
        document["fairness"].append(
            f"these runs were made over {clock(max(times) - min(times))} and not interleaved by a study, so a change of the machine between "
            "them looks like a difference: 'lockstep study run' takes turns"
        )
    return document


def _race(groups: Sequence[Group]) -> Document | None:
    """How the times were measured."""
    raced = next((group.time.race for group in groups if group.time), None)
    if raced is None:
        return None
    state = raced.state
    rounds = len({(window.start, window.round) for window in raced.windows})
    return {
        "over": state.over,
        "seconds": state.seconds,
        "starts": state.starts,
        "rounds": rounds,
        "disturbed": state.disturbed,
        "failures": state.failures,
    }


def table(
    groups: Sequence[Group],
    baseline: str | None,
    metrics: Sequence[str],
    target: float | None,
    alpha: float = ALPHA,
) -> Document:
    """All figures of the comparison as one document. `alpha`: the error of what trainings decide; turns have their own."""
    base, remark = _baseline(groups, baseline)
    target = target if target is not None else common_target([each.run for group in groups for each in group.done])
    against = {metric: _against(groups, base, metric, target, alpha) for metric in metrics}
    cells = [_cell(group, groups, base, metrics, target, against) for group in groups]
    notes = fairness.notes(groups)
    if remark:
        notes.insert(0, remark)
    notes += _too_good(cells)
    return {
        "baseline": base.name if base else None,
        "target_accuracy": target,
        "level": 1 - ALPHA,
        "family": _family(list(against.values())),
        "metrics": list(metrics),
        "cells": cells,
        "fairness": notes,
        "stability": asdict(stability.judge(*_timed(groups), _starved(groups))),
    }


def _timed(groups: Sequence[Group]) -> tuple[list[stability.Timed], str]:
    """What was timed of each cell, in the order of time: starts of a race, else runs."""
    starts = [stability.Timed(g.name, start, cost) for g in groups if g.time for start, cost in g.time.wall.items()]
    if starts:
        return starts, "start"
    runs = [
        stability.Timed(group.name, each.spec.created, each.summary["train_seconds"])
        for group in groups
        for each in group.done
        if each.summary.get("train_seconds") is not None
    ]
    return runs, "run"


def _starved(groups: Sequence[Group]) -> str:
    """That what was timed had too little of its cores: the race as a whole, else the run that had least."""
    raced = next((group.time.race for group in groups if group.time), None)
    if raced is not None:
        had = starving.had(starving.total(window.spent for window in raced.windows if window.spent))
        return starving.sentence(had) if had is not None and starving.starved(had) else ""
    least = min(
        (each.run for group in groups for each in group.done if each.run.cores_had is not None),
        key=lambda run: run.cores_had or 0.0,
        default=None,
    )
    if least is None or least.cores_had is None or not starving.starved(least.cores_had):
        return ""
    return starving.sentence(least.cores_had, f"{least.id} had", "its")


def _baseline(groups: Sequence[Group], wanted: str | None) -> tuple[Group | None, str]:
    """The cell that the others are compared with; if it is not the requested one, a note says so."""
    able = [group for group in groups if group.measured]
    if not able:
        return None, ""
    asked = wanted or groups[0].name
    raced = next((group.time.race.state.baseline for group in able if group.time), "")
    if raced and raced != asked and not any(group.time for group in able if group.name == asked):
        now = next(group for group in able if group.name == raced)
        return now, f"baseline '{asked}' fell out of the race: cells are compared with '{raced}' instead"
    found = next((group for group in able if group.name == asked), None)
    if found:
        return found, ""
    return able[0], f"baseline '{asked}' was not measured: cells are compared with '{able[0].name}' instead"


def _against(
    groups: Sequence[Group], base: Group | None, metric: str, target: float | None, alpha: float
) -> dict[str, Comparison]:
    """Every other cell against the baseline: the comparisons of one metric are a family."""
    others = [group for group in groups if base is not None and group is not base and group.measured]
    found = versus_all([(group, base) for group in others if base], metric, target, alpha)
    return {group.name: comparison for group, comparison in zip(others, found, strict=True)}


def _cell(
    group: Group,
    groups: Sequence[Group],
    base: Group | None,
    metrics: Sequence[str],
    target: float | None,
    against: dict[str, dict[str, Comparison]],
) -> Document:
    done = group.done
    result: Document = {
        "cell": group.name,
        "planned": group.planned,
        "done": len(done),
        "failed": group.failures,
        "left_out": group.left_out,
        "runs": [each.run.id for each in done],
        "metrics": {},
    }
    if not group.measured or base is None:
        return result
    ours, spec = group is base, group.spec
    result |= {
        "ranks": spec.placement.ranks,
        "threads": spec.placement.threads,
        "cores": group.cores,
        "global_batch": spec.plan.global_batch or None,
        "recipe_differs_in": [] if ours else fairness.what_differs(group, base),
        "evaluation_seconds": group.time.evaluation if group.time else None,
    }
    for metric in metrics:
        result["metrics"][metric] = _column(metric, group, target, against[metric].get(group.name))
    # Ratios of seconds for the same work; where the work differs, of images per second.
    speed = 1.0 if ours else versus(group, base, "images_per_second", target).effect
    result["speed_up"] = speed
    # Without more cores there is nothing that could be used badly.
    several = len({each.cores for each in groups if each.measured}) > 1
    result["efficiency"] = None if speed is None or not several else speed * base.cores / group.cores
    return result


def _column(metric: str, group: Group, target: float | None, against: Comparison | None) -> Document:
    counted = list(observed(group, metric, target).values())
    values = [v for v in counted if math.isfinite(v)]
    missed = len(counted) - len(values)
    # Runs that never reached the target took longer than all others: the median counts them, an interval cannot.
    interval = None if missed else _interval(metric, group, values)
    median = statistics.median(counted) if counted else math.inf
    column: Document = {
        "n": len(counted),
        "missed": missed,
        "median": median if math.isfinite(median) else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "how": interval.how if interval else None,
        "values": values,
    }
    if against is not None:
        column["against_baseline"] = {**asdict(against), "text": verdict_text(against)}
    return column


def _interval(metric: str, group: Group, values: Sequence[float]) -> Interval | None:
    """Of a time to an accuracy, what the seeds and what the starts of the race leave open add up."""
    figure = metric_of(metric)
    found = median_interval(values, log=figure.by_ratio)
    if found is None or figure.of_placement or figure.learned or group.time is None:
        return found
    costs = median_interval(list(group.time.wall.values()), log=True)
    if costs is None:
        return None
    half = math.hypot(math.log(found.high / found.low) / 2, math.log(costs.high / costs.low) / 2)
    middle = statistics.median(values)
    return Interval(middle * math.exp(-half), middle * math.exp(half), found.level, found.how)


def _too_good(cells: Sequence[Document]) -> list[str]:
    """More work per core than the baseline: caches can do that, but usually something slowed the baseline."""
    # On the same cores another recipe may well be faster: a larger batch is.
    others = [cell for cell in cells if cell.get("efficiency") and cell["efficiency"] != cell["speed_up"]]
    found = [cell for cell in others if cell["efficiency"] > TOO_GOOD]
    return [
        f"'{cell['cell']}' has an efficiency of {cell['efficiency']:.0%}, more than the cores explain: look for what held up the "
        "baseline (its first epoch, other load) before believing it"
        for cell in found
    ]


def _family(metrics: Sequence[dict[str, Comparison]]) -> str:
    """The error rate of all verdicts of one metric together. Only comparisons with a p-value were in Holm's procedure."""
    sizes = {sum(found.p is not None for found in comparisons.values()) for comparisons in metrics} - {0}
    count = str(max(sizes, default=0)) if len(sizes) < 2 else f"{min(sizes)} to {max(sizes)}"
    several = f" (Holm over {count} comparisons of each)" if max(sizes, default=0) > 1 else ""
    return f"if nothing differed, a metric would have any verdict in at most {ALPHA:.0%} of such tables{several}"


def _published(found: Published, groups: Sequence[Group], target: float | None) -> Document:
    """A report's claims beside our measurements: the shape is compared, never seconds."""
    by_name = {group.name: group for group in groups}
    able = [claim for claim in found.claims if by_name[claim.more].measured and by_name[claim.less].measured]
    compared: dict[int, Comparison] = {}
    starved = bool(_starved(groups))
    for metric in {claim.metric for claim in able}:
        family = [claim for claim in able if claim.metric == metric]
        sides = [(by_name[claim.more], by_name[claim.less]) for claim in family]
        compared |= {id(c): one for c, one in zip(family, versus_all(sides, metric, target, LOOK_ALPHA), strict=True)}
    claims = []
    for claim in found.claims:
        against = compared.get(id(claim))
        claims.append(
            {
                "text": claim.text,
                "published_ratio": claim.ratio,
                "n": against.n if against else None,
                "ours": against.effect if against else None,
                "low": against.low if against else None,
                "high": against.high if against else None,
                "verdict": _claim_verdict(claim.same, metric_of(claim.metric).kind, against),
                "why": claim.why,
                "known": known(by_name[claim.more], by_name[claim.less], claim.metric, starved) if against else "",
            }
        )
    return {"source": found.source, "figures": found.figures, "claims": claims}


def _claim_verdict(same: bool, kind: Kind, against: Comparison | None) -> str:
    if against is None or not against.n:
        return "not measured here"
    if same:
        return "agrees" if against.verdict == "the same" else "not settled" if not against.settled else "differs"
    if not against.settled:
        return "not settled"
    larger = WORDS[kind][0]
    return "agrees" if against.verdict == larger else "differs"
