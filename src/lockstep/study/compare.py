"""Compare cells: medians with intervals, paired comparisons with the baseline, and remarks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lockstep.errors import InputError
from lockstep.metrics import METRICS, USUAL, Kind, common_target, value
from lockstep.run import Run
from lockstep.statistics import ALPHA, WORDS, Comparison, compare_family, median_interval
from lockstep.study import fairness, gather, stability
from lockstep.study.definition import Published, nearest
from lockstep.study.folder import StudyFolder, overheads
from lockstep.study.gather import Group, Sample
from lockstep.units import clock

Document = dict[str, Any]
TOO_GOOD = 1.2


def study_document(folder: StudyFolder) -> Document:
    """A study as far as it has come."""
    planned = folder.read()
    study, groups = planned.study, gather.of_study(folder, planned)
    document = table(groups, study.baseline, study.metrics, study.target_accuracy)
    document |= {"study": folder.name, "about": study.about, "runs_planned": len(planned.items)}
    document["published"] = [_published(found, groups, document["target_accuracy"]) for found in study.published]
    document["overhead"] = overheads(folder.records())
    if any(cell.placement.launcher == "slurm" for cell in planned.cells):
        document["fairness"].append(
            "runs were Slurm jobs, on nodes and at times that the scheduler chose: a difference in time may be one of nodes or of hours"
        )
    return document


def runs_document(runs: Sequence[Run], baseline: str | None = None) -> Document:
    """Compare any runs. They did not take turns, so the machine may have changed between them; a note says so."""
    groups = gather.of_runs(runs)
    if baseline is not None and baseline not in [group.name for group in groups]:
        raise InputError(f"--baseline {baseline}: no such cell; {nearest(baseline, [group.name for group in groups])}")
    document = table(groups, baseline, USUAL, None)
    if len(groups) > 1:
        times = [run.spec().created for run in runs]
        document["fairness"].append(
            f"these runs were made over {clock(max(times) - min(times))} and not interleaved by a study, so a change of the machine between "
            "them looks like a difference: 'lockstep study run' takes turns"
        )
    return document


def table(groups: Sequence[Group], baseline: str | None, metrics: Sequence[str], target: float | None) -> Document:
    """All figures of the comparison as one document."""
    base, remark = _baseline(groups, baseline)
    target = target if target is not None else common_target([each.run for group in groups for each in group.done])
    against = {metric: _against(groups, base, metric, target) for metric in metrics}
    cells = [_cell(group, base, metrics, target, against) for group in groups]
    timed = [
        stability.Timed(group.name, each.spec.created, each.summary["train_seconds"])
        for group in groups
        for each in group.done
        if each.summary.get("train_seconds") is not None
    ]
    notes = fairness.notes({group.name: group.done for group in groups})
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
        "stability": asdict(stability.judge(timed)),
    }


def _baseline(groups: Sequence[Group], wanted: str | None) -> tuple[Group | None, str]:
    """The cell that the others are compared with; if it is not the requested one, a note says so."""
    able = [group for group in groups if group.done]
    if not able:
        return None, ""
    asked = wanted or groups[0].name
    found = next((group for group in able if group.name == asked), None)
    if found:
        return found, ""
    return able[0], f"baseline '{asked}' has no finished run: cells are compared with '{able[0].name}' instead"


def _against(groups: Sequence[Group], base: Group | None, metric: str, target: float | None) -> dict[str, Comparison]:
    """Every other cell against the baseline: the comparisons of one metric are a family."""
    others = [group for group in groups if base is not None and group is not base and group.done]
    found = versus_all([(group, base) for group in others if base], metric, target)
    return {group.name: comparison for group, comparison in zip(others, found, strict=True)}


def _cell(
    group: Group,
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
    if not done or base is None:
        return result
    first = done[0]
    ours = group is base
    result |= {
        "ranks": first.spec.placement.ranks,
        "threads": first.spec.placement.threads,
        "cores": first.run.cores,
        "global_batch": first.spec.plan.global_batch,
        "recipe_differs_in": [] if ours else fairness.what_differs(done, base.done),
    }
    for metric in metrics:
        result["metrics"][metric] = _column(metric, group, target, against[metric].get(group.name))
    # Ratios of seconds for the same work; where the work differs, of images per second.
    speed = 1.0 if ours else versus(group, base, "images_per_second", target).effect
    result["speed_up"] = speed
    result["efficiency"] = None if speed is None else speed * base.done[0].run.cores / first.run.cores
    return result


def _column(metric: str, group: Group, target: float | None, against: Comparison | None) -> Document:
    counted = [v for each in _counted(metric, group.done) if (v := _mean(metric, each, target)) is not None]
    values = [v for v in counted if math.isfinite(v)]
    missed = len(counted) - len(values)
    # Runs that never reached the target took longer than all others: the median counts them, an interval cannot.
    interval = None if missed else median_interval(values, log=METRICS[metric].by_ratio)
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


def _counted(metric: str, samples: Sequence[Sample]) -> list[list[Sample]]:
    """The unit of observation. The same seed gives the same accuracy again, so repeating it adds no evidence."""
    if METRICS[metric].by_ratio:
        return [[each] for each in samples]
    by_seed: dict[int, list[Sample]] = {}
    for each in samples:
        by_seed.setdefault(each.seed, []).append(each)
    return list(by_seed.values())


def _mean(metric: str, samples: Sequence[Sample], target: float | None) -> float | None:
    values = [v for each in samples if (v := value(each.run, metric, target)) is not None]
    return statistics.fmean(values) if values else None


def versus(group: Group, base: Group, metric: str, target: float | None) -> Comparison:
    """One comparison by itself."""
    return versus_all([(group, base)], metric, target)[0]


def versus_all(sides: Sequence[tuple[Group, Group]], metric: str, target: float | None) -> list[Comparison]:
    """A family of comparisons, pair by pair: runs of one block for times, runs of one seed for accuracies."""
    return compare_family([_pairs(group, base, metric, target) for group, base in sides], METRICS[metric].kind)


def _pairs(group: Group, base: Group, metric: str, target: float | None) -> tuple[list[float], list[float]]:
    by_seed = not METRICS[metric].by_ratio

    def values(samples: Sequence[Sample]) -> dict[Any, float]:
        return {
            (each[0].seed if by_seed else each[0].pair): v
            for each in _counted(metric, samples)
            if (v := _mean(metric, each, target)) is not None
        }

    ours, theirs = values(group.done), values(base.done)
    both = [key for key in ours if key in theirs]
    return [ours[key] for key in both], [theirs[key] for key in both]


def verdict_text(found: Comparison) -> str:
    """The verdict in words, with what would settle it."""
    if found.verdict == "too few":
        return "too few pairs" if found.n == 0 else "one pair: repeat it"
    if found.verdict != "not significant":
        return found.verdict
    if found.more is None:
        return f"not significant ({found.n} pairs do not say how many more would settle it)"
    few, most = found.more
    if few == most:
        return f"not significant (at most {most} more repeats would settle it)"
    return f"not significant ({few} more repeats would settle it if it is as large as it looks, {most} whatever it is)"


def _too_good(cells: Sequence[Document]) -> list[str]:
    """More work per core than the baseline: caches can do that, but usually something slowed the baseline."""
    # Another recipe on the same cores may well be faster: a larger batch is.
    same = [c for c in cells if c.get("speed_up") and (not c["recipe_differs_in"] or c["efficiency"] != c["speed_up"])]
    found = [cell for cell in same if cell["efficiency"] > TOO_GOOD]
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
    return f"if nothing differed, a metric would have a verdict in {ALPHA:.0%} of such studies at most{several}"


def _published(found: Published, groups: Sequence[Group], target: float | None) -> Document:
    """A report's claims beside our measurements: the shape is compared, never seconds."""
    by_name = {group.name: group for group in groups}
    able = [claim for claim in found.claims if by_name[claim.more].done and by_name[claim.less].done]
    compared: dict[int, Comparison] = {}
    for metric in {claim.metric for claim in able}:
        family = [claim for claim in able if claim.metric == metric]
        sides = [(by_name[claim.more], by_name[claim.less]) for claim in family]
        compared |= {id(c): one for c, one in zip(family, versus_all(sides, metric, target), strict=True)}
    claims = []
    for claim in found.claims:
        against = compared.get(id(claim))
        claims.append(
            {
                "text": claim.text,
                "published_ratio": claim.ratio,
                "ours": against.effect if against else None,
                "low": against.low if against else None,
                "high": against.high if against else None,
                "verdict": _claim_verdict(claim.same, METRICS[claim.metric].kind, against),
                "why": claim.why,
            }
        )
    return {"source": found.source, "figures": found.figures, "claims": claims}


def _claim_verdict(same: bool, kind: Kind, against: Comparison | None) -> str:
    if against is None or against.verdict == "too few":
        return "not measured here"
    if same:
        return "agrees" if against.verdict == "the same" else "no difference seen" if not against.settled else "differs"
    if not against.settled:
        return "not settled"
    larger = WORDS[kind][0]
    return "agrees" if against.verdict == larger else "differs"
