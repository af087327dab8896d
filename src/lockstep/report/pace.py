"""What changes while a training goes on: samples per second, learning rate, memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.measure.view import RunView
from lockstep.metrics import recorded
from lockstep.report import along
from lockstep.report.along import BESIDE_EPOCHS, BESIDE_STEPS, EPOCH, STEP, Along
from lockstep.report.curves import MOST_SHOWN, thin
from lockstep.report.subject import Colour, Subject
from lockstep.report.views import Axis, Lines, Series, short, shorts
from lockstep.run import Spec
from lockstep.schedule import factor
from lockstep.study.gather import Group

SECTION = "pace"
# Means of stretches, fewer than a loss has points: a rate over few steps says more about the clock than about the training.
MOST_POINTS = 100


def charts(subject: Subject) -> list[Lines]:
    found = [_rate(subject), _learning_rate(subject), _memory(subject)]
    return [chart for chart in found if chart]


def _groups(subject: Subject) -> list[Group]:
    """Those whose first training is their own: another cell's says nothing of this one's pace."""
    return [group for group in subject.trained[:MOST_SHOWN] if group.samples[0].own]


def _rate(subject: Subject) -> Lines | None:
    """By step, or by epoch where the records of steps are gone (a study that was unpacked)."""
    groups, several = _groups(subject), len(subject.trained) > 1
    ways = [(group, along.of_run(group.samples[0].run)) for group in groups]
    by_samples = all(len(way.samples) for _, way in ways if len(way.steps))
    by_step = [
        line
        for group, way in ways
        if (line := rate_series(way, group.name if several else "rate", subject.colour(group), by_samples))
    ]
    if by_step:
        return rate_chart(by_step, by_samples, several)
    by_epoch = [line for group in groups if (line := _epoch_rate(subject, group, several))]
    if not by_epoch:
        return None
    return along.choices(
        Lines(
            id="rate",
            section=SECTION,
            title="Samples per second",
            says=f"Samples of all ranks by the second of training, of each epoch{_which(several)}.",
            x=EPOCH,
            y=Axis("samples per second", recorded("images_per_second").unit),
            series=by_epoch,
        ),
        BESIDE_EPOCHS,
    )


def _which(several: bool) -> str:
    return ", of each cell's first run" if several else ""


def rate_chart(series: Sequence[Series], samples: bool, several: bool = False) -> Lines:
    what = "samples" if samples else "steps"
    chart = Lines(
        id="rate",
        section=SECTION,
        title=f"{what.capitalize()} per second",
        says=f"{what.capitalize()} of all ranks by the second of training{_which(several)}; each point is a stretch of the run, of which there are "
        f"at most {MOST_POINTS}. Tests and checkpoints between epochs do not count.",
        x=STEP,
        y=Axis(f"{what} per second", recorded("images_per_second").unit),
        series=list(series),
        smooth=True,
    )
    return along.choices(chart, BESIDE_STEPS)


def rate_series(way: Along, name: str, colour: Colour, by_samples: bool) -> Series | None:
    """Samples per second, stretch by stretch, or steps per second, which are always known."""
    count = len(way.steps)
    if count < 2:
        return None
    ends = np.linspace(0, count, min(count, MOST_POINTS) + 1).astype(int)[1:] - 1
    trained = way.samples if by_samples else way.steps
    before = trained[0] - (trained[1] - trained[0])
    amounts = np.diff(trained[ends], prepend=before)
    seconds = np.diff(way.seconds[ends], prepend=0.0)
    return Series(
        name=name,
        colour=colour.name,
        dash=colour.again,
        x=way.steps[ends].tolist(),
        y=shorts((amounts / np.maximum(seconds, 1e-9)).tolist()),
        over=way.at(ends),
    )


def _epoch_rate(subject: Subject, group: Group, several: bool) -> Series | None:
    run, hue = group.samples[0].run, subject.colour(group)
    known = [each for each in run.epochs() if each.get("images_per_second")]
    places = along.of_epochs([run])
    if len(known) < 2:
        return None
    return Series(
        name=group.name if several else "rate",
        colour=hue.name,
        dash=hue.again,
        x=[each["epoch"] for each in known],
        y=shorts(each["images_per_second"] for each in known),
        over=[[places[each["epoch"]][k] for each in known] for k in range(len(BESIDE_EPOCHS))],
    )


def _learning_rate(subject: Subject) -> Lines | None:
    """What the schedule says, for as many steps as were taken. A constant one is drawn beside others alone."""
    groups, several = (
        [group for group in subject.trained[:MOST_SHOWN] if _scheduled(group.spec)],
        len(subject.trained) > 1,
    )
    if all(_constant(group.spec) for group in groups):
        return None
    chart = Lines(
        id="learning-rate",
        section=SECTION,
        title="Learning rate",
        says="The learning rate of each step, as the schedule sets it.",
        x=STEP,
        y=Axis("learning rate"),
        series=[line for group in groups if (line := _schedule(subject, group, several))],
    )
    return along.choices(chart, BESIDE_STEPS) if chart.series else None


def _scheduled(spec: Spec) -> bool:
    """Whether the recipe decides it: a loop of the user's own, and a command that was attached to, do so themselves."""
    return not spec.options.script and not spec.options.attached and spec.plan.steps_per_epoch > 0


def _constant(spec: Spec) -> bool:
    return spec.recipe.schedule.name == "constant" and spec.recipe.schedule.warmup_steps == 0


def _schedule(subject: Subject, group: Group, several: bool) -> Series | None:
    spec, run, hue = group.spec, group.samples[0].run, subject.colour(group)
    plan, schedule = spec.plan, spec.recipe.schedule
    taken = _taken(run)
    rates = [plan.lr * factor(schedule, step, plan.total_steps, plan.steps_per_epoch) for step in range(taken)]
    if not rates:
        return None
    keep = thin(rates)
    steps = [i + 1 for i in keep]
    way = along.of_run(run)
    return Series(
        name=group.name if several else "learning rate",
        colour=hue.name,
        dash=hue.again,
        x=list(steps),
        y=shorts(rates[i] for i in keep),
        over=way.at_steps(steps),
    )


def _taken(run: RunView) -> int:
    """How many steps a run has taken so far."""
    taken = (run.summary() or {}).get("steps") or max((each.get("step") or 0 for each in run.epochs()), default=0)
    if taken:
        return int(taken)
    steps = run.steps(0)
    return int(steps["step"][-1]) if len(steps) else 0


def _memory(subject: Subject) -> Lines | None:
    """The peak of each epoch, of all ranks together. Older runs have no record of it."""
    several = len(subject.trained) > 1
    series = [line for group in _groups(subject) if (line := _peaks(subject, group, several))]
    if not series:
        return None
    chart = Lines(
        id="memory",
        section=SECTION,
        title="Memory",
        says=f"Peaks of all ranks in each epoch, its evaluation included, beyond what they had when training began{_which(several)}.",
        x=EPOCH,
        y=Axis("memory of all ranks", "bytes"),
        series=series,
    )
    return along.choices(chart, BESIDE_EPOCHS)


def _peaks(subject: Subject, group: Group, several: bool) -> Series | None:
    run, hue = group.samples[0].run, subject.colour(group)
    peaks: dict[int, list[float | None]] = {}
    for rank in range(run.ranks):
        for each in run.epochs(rank):
            peaks.setdefault(int(each["epoch"]), []).append(each.get("memory_growth_bytes"))
    known = {
        epoch: float(sum(value for value in values if value is not None))
        for epoch, values in peaks.items()
        if len(values) == run.ranks and None not in values
    }
    if len(known) < 2:
        return None
    places = along.of_epochs([run])
    return Series(
        name=group.name if several else "all ranks",
        colour=hue.name,
        dash=hue.again,
        x=list(known),
        y=[short(value) for value in known.values()],
        over=[[places[epoch][k] if epoch in places else None for epoch in known] for k in range(len(BESIDE_EPOCHS))],
    )
