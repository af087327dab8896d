"""Cells beside each other: middles with intervals, paired comparisons with the baseline, and what is to be said about them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lockstep.errors import InputError
from lockstep.run import Run
from lockstep.study import fairness, gather, stability
from lockstep.study.definition import Published, nearest
from lockstep.study.folder import StudyFolder, overheads
from lockstep.study.gather import Group
from lockstep.study.measures import METRICS, USUAL, Sample, common_target, value
from lockstep.study.statistics import COMPARE_LEVEL, WORDS, Comparison, Kind, compare, median_interval

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
    return document


def runs_document(runs: Sequence[Run], baseline: str | None = None) -> Document:
    """Any runs. They did not take turns, so the machine may have changed between them, and that is said."""
    groups = gather.of_runs(runs)
    if baseline is not None and baseline not in [group.name for group in groups]:
        raise InputError(f"--baseline {baseline}: no such cell; {nearest(baseline, [group.name for group in groups])}")
    document = table(groups, baseline, USUAL, None)
    if len(groups) > 1:
        document["fairness"].append(
            "these runs were not interleaved by a study, so a change of the machine between them looks like a difference: "
            "'lockstep study run' takes turns"
        )
    return document


def table(groups: Sequence[Group], baseline: str | None, metrics: Sequence[str], target: float | None) -> Document:
    """All figures of the comparison as one document."""
    base, remark = _baseline(groups, baseline)
    target = target if target is not None else common_target([group.done for group in groups])
    cells = [_cell(group, base, metrics, target) for group in groups]
    timed = [
        stability.Timed(group.name, each.spec.created, each.summary["train_seconds"])
        for group in groups
        for each in group.done
    ]
    notes = fairness.notes({group.name: group.done for group in groups})
    if remark:
        notes.insert(0, remark)
    notes += [*_too_good(cells), *_by_chance(cells)]
    return {
        "baseline": base.name if base else None,
        "target_accuracy": target,
        "level": COMPARE_LEVEL,
        "metrics": list(metrics),
        "cells": cells,
        "fairness": notes,
        "stability": asdict(stability.judge(timed)),
    }


def _baseline(groups: Sequence[Group], wanted: str | None) -> tuple[Group | None, str]:
    """The cell that the others are compared with; another one than was asked for only with a word about it."""
    able = [group for group in groups if group.done]
    if not able:
        return None, ""
    asked = wanted or groups[0].name
    found = next((group for group in able if group.name == asked), None)
    if found:
        return found, ""
    return able[0], f"baseline '{asked}' has no finished run: cells are compared with '{able[0].name}' instead"


def _cell(group: Group, base: Group | None, metrics: Sequence[str], target: float | None) -> Document:
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
        "cores": first.cores,
        "global_batch": first.spec.plan.global_batch,
        "recipe_differs_in": [] if ours else fairness.what_differs(done, base.done),
    }
    for metric in metrics:
        result["metrics"][metric] = _column(metric, group, base, target)
    # Ratios of seconds for the same work; where the work differs, of images per second.
    against = None if ours else versus(group, base, "images_per_second", target)
    speed = 1.0 if ours else against.effect if against else None
    result["speed_up"] = speed
    result["efficiency"] = None if speed is None else speed * base.done[0].cores / first.cores
    return result


def _column(metric: str, group: Group, base: Group, target: float | None) -> Document:
    kind = METRICS[metric].kind
    values = [v for each in _counted(metric, group.done) if (v := _mean(metric, each, target)) is not None]
    interval = median_interval(values, log=kind in ("time", "rate", "size"))
    column: Document = {
        "n": len(values),
        "median": statistics.median(values) if values else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "spread": statistics.stdev(values) if len(values) > 1 else None,
        "how": interval.how if interval else None,
        "values": values,
    }
    if group is not base:
        against = versus(group, base, metric, target)
        column["against_baseline"] = {**asdict(against), "text": verdict_text(against)}
    return column


def _counted(metric: str, samples: Sequence[Sample]) -> list[list[Sample]]:
    """What counts as one observation. The same seed gives the same accuracy again: repeating it adds no evidence."""
    if METRICS[metric].kind not in ("accuracy", "loss"):
        return [[each] for each in samples]
    by_seed: dict[int, list[Sample]] = {}
    for each in samples:
        by_seed.setdefault(each.seed, []).append(each)
    return list(by_seed.values())


def _mean(metric: str, samples: Sequence[Sample], target: float | None) -> float | None:
    values = [v for each in samples if (v := value(each, metric, target)) is not None]
    return statistics.fmean(values) if values else None


def versus(group: Group, base: Group, metric: str, target: float | None) -> Comparison:
    """Pair by pair: runs of one block for times, runs of one seed for accuracies."""
    by_seed = METRICS[metric].kind in ("accuracy", "loss")

    def values(samples: Sequence[Sample]) -> dict[Any, float]:
        return {
            (each[0].seed if by_seed else each[0].pair): v
            for each in _counted(metric, samples)
            if (v := _mean(metric, each, target)) is not None
        }

    ours, theirs = values(group.done), values(base.done)
    both = [key for key in ours if key in theirs]
    return compare([ours[key] for key in both], [theirs[key] for key in both], METRICS[metric].kind)


def verdict_text(found: Comparison) -> str:
    """The verdict in words, with what would settle it."""
    if found.verdict == "too few":
        return "too few pairs" if found.n == 0 else "one pair: repeat it"
    if found.verdict == "not significant":
        more = f"{found.more} more repeats would settle it" if found.more else "1000 repeats would not settle it"
        return f"not significant ({more})"
    return found.verdict


def _too_good(cells: Sequence[Document]) -> list[str]:
    """More work per core than the baseline's: caches can do that, but mostly the baseline is held up by something."""
    # Another recipe on the same cores may well be faster: a larger batch is.
    same = [c for c in cells if c.get("speed_up") and (not c["recipe_differs_in"] or c["efficiency"] != c["speed_up"])]
    found = [cell for cell in same if cell["efficiency"] > TOO_GOOD]
    return [
        f"'{cell['cell']}' has an efficiency of {cell['efficiency']:.0%}, more than the cores explain: look for what held up the "
        "baseline (its first epoch, other load) before believing it"
        for cell in found
    ]


def _by_chance(cells: Sequence[Document]) -> list[str]:
    """How many of the verdicts would be there if nothing differed."""
    made = sum("against_baseline" in column for cell in cells for column in cell["metrics"].values())
    expected = made * (1 - COMPARE_LEVEL)
    if expected < 0.95:
        return []
    return [f"{made} comparisons at {COMPARE_LEVEL:.0%} each: about {expected:.0f} would differ by chance alone"]


def _published(found: Published, groups: Sequence[Group], target: float | None) -> Document:
    """What a report claims, beside what was measured here: the shape is compared, never seconds."""
    by_name = {group.name: group for group in groups}
    claims = []
    for claim in found.claims:
        more, less = by_name[claim.more], by_name[claim.less]
        against = versus(more, less, claim.metric, target) if more.done and less.done else None
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
