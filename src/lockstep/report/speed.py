"""What more workers bring, and what speed costs: scaling curve, trade-off between time and accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lockstep.metrics import metric_of
from lockstep.report.prediction import predicted
from lockstep.report.subject import Subject
from lockstep.report.views import Axis, Dot, Lines, Scatter, Series, short, shorts, sure
from lockstep.settings import dotted
from lockstep.statistics import median_interval
from lockstep.study.gather import Group
from lockstep.study.observed import observed
from lockstep.study.versus import versus

SECTION = "speed"
# What may differ between two points of one scaling curve: how many workers there are, and what follows from it.
_FREE = {"seed", "ranks", "hosts", "threads", "launcher", "strategy", "backend"}
_FREE |= {"global_batch", "batch_per_rank", "micro_batch"}
STRONG, WEAK = "strong scaling (same global batch)", "weak scaling (same batch per rank)"
Triple = tuple[float, float | None, float | None]


def charts(subject: Subject) -> list[Lines | Scatter]:
    found = [scaling(subject), trade_off(subject)]
    return [chart for chart in found if chart]


def scaling(subject: Subject) -> Lines | None:
    """Speed-up over the cells' cores. Cells that differ in nothing else are joined by a line."""
    base = next((group for group in subject.done if group.name == subject.comparison["baseline"]), None)
    if base is None or len({_cores(group) for group in subject.done}) < 2:
        return None
    families = _families(subject, base)
    lines = [_line(subject, base, name, members) for name, members in families.items()]
    kinds = {_key(group, base)[0] for group in subject.done}
    most = max(_cores(group) for group in subject.done)
    weak = [kind == WEAK for kind in (STRONG, WEAK) if kind in kinds]
    forecast, says = predicted(base.spec, most, weak)
    ends = [_cores(group) for group in subject.done] + [int(x or 0) for line in forecast for x in line.x]
    least, most, own = min(ends), max(ends), _cores(base)
    ideal = Series(name="ideal", colour="faint", dash=True, x=[least, most], y=shorts([least / own, most / own]))
    return Lines(
        id="scaling",
        section=SECTION,
        title="Speed-up over cores",
        says=f"Images per second beside '{base.name}', pair by pair; bars: {subject.comparison['level']:.0%} intervals. The dashed line is "
        f"what as many times the cores would give if nothing were lost.{says}",
        x=Axis(label="cores (ranks x threads)", unit="count"),
        y=Axis(label="speed-up", unit="times"),
        series=[ideal, *lines, *forecast],
    )


def _line(subject: Subject, base: Group, name: str, members: Sequence[Group]) -> Series:
    points = sorted(((_cores(group), _speed(group, base), group) for group in members), key=lambda point: point[0])
    known = [(cores, speed, group) for cores, speed, group in points if speed]
    return Series(
        name=name,
        colour=subject.colour(next((group for group in members if group is not base), base)).name,
        x=[cores for cores, _, _ in known],
        y=[short(speed[0]) for _, speed, _ in known],
        low=[short(speed[1]) for _, speed, _ in known],
        high=[short(speed[2]) for _, speed, _ in known],
        texts=[group.name for _, _, group in known],
    )


def _cores(group: Group) -> int:
    return group.cores


def _speed(group: Group, base: Group) -> Triple | None:
    if group is base:
        return 1.0, None, None
    found = versus(group, base, "images_per_second", None)
    return None if found.effect is None else (found.effect, found.low, found.high)


def _families(subject: Subject, base: Group) -> dict[str, list[Group]]:
    """Lines of the scaling curve by name; the baseline begins each of them."""
    others = [group for group in subject.done if _cores(group) != _cores(base)]
    keys = {group.name: _key(group, base) for group in others}
    kinds = list(dict.fromkeys(keys.values()))
    found: dict[str, list[Group]] = {}
    for group in others:
        kind = keys[group.name][0]
        alike = [other for other in others if keys[other.name] == keys[group.name]]
        alone = len({_cores(other) for other in alike}) < len(alike) or sum(other[0] == kind for other in kinds) > 1
        found.setdefault(group.name if alone else kind, [base]).append(group)
    return found


def _key(group: Group, base: Group) -> tuple[str, str]:
    spec, other = group.spec, base.spec
    if spec.plan.ranks == other.plan.ranks:
        kind = "more threads"
    elif not spec.plan.global_batch or not other.plan.global_batch:
        kind = "batch not known"
    elif spec.plan.global_batch == other.plan.global_batch:
        kind = STRONG
    elif spec.plan.global_batch * other.plan.ranks == other.plan.global_batch * spec.plan.ranks:
        kind = WEAK
    else:
        kind = "other batch"
    rest = [(key, one) for key, one in dotted(*spec.known()).items() if key not in _FREE]
    return kind, str(sorted(rest))


def trade_off(subject: Subject) -> Scatter | None:
    """Time against accuracy, a circle for each cell; its area is the memory of all ranks."""
    dots = [dot for group in subject.done if (dot := _dot(subject, group))]
    if len(dots) < 2:
        return None
    return Scatter(
        id="trade-off",
        section=SECTION,
        title="Time, accuracy, memory",
        says="Median of each cell with its 95 % interval; left and high is good. A circle's area is the memory of all ranks together.",
        x=_axis("seconds"),
        y=_axis("accuracy"),
        size=_axis("memory"),
        dots=dots,
    )


def _axis(metric: str) -> Axis:
    return Axis(label=metric_of(metric).label, unit=metric_of(metric).unit)


def _dot(subject: Subject, group: Group) -> Dot | None:
    time, accuracy, memory = (_median(group, metric) for metric in ("seconds", "accuracy", "memory"))
    if time is None or accuracy is None:
        return None
    return Dot(
        name=group.name,
        colour=subject.colour(group).name,
        x=sure(time[0]),
        x_low=short(time[1]),
        x_high=short(time[2]),
        y=sure(accuracy[0]),
        y_low=short(accuracy[1]),
        y_high=short(accuracy[2]),
        size=None if memory is None else short(memory[0]),
    )


def _median(group: Group, metric: str) -> Triple | None:
    known = list(observed(group, metric, None).values())
    if not known:
        return None
    between = median_interval(known, log=metric_of(metric).by_ratio)
    return statistics.median(known), between.low if between else None, between.high if between else None
