"""Learning curves: by epoch over all ranks, each rank by itself, and the loss step by step."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.explain import overfitting
from lockstep.explain.evidence import Evidence
from lockstep.measure.phases import Rows, common
from lockstep.measure.records import mean_losses
from lockstep.metrics import learned_keys, recorded
from lockstep.report import along
from lockstep.report.along import BESIDE_EPOCHS, BESIDE_STEPS, EPOCH, STEP, Along, Places
from lockstep.report.subject import Subject
from lockstep.report.views import Axis, Lines, Mark, Numbers, Series, short, shorts
from lockstep.study.definition import Published
from lockstep.study.gather import Group

SECTION = "learning"
# A plot is about this many pixels wide: more points cannot be seen, and make the page larger.
MOST_POINTS = 300
MOST_SHOWN = 8
MOST_RANKS = 16
MOST_LOGGED = 12
LOGGED = "logged-"
"""The plots of what a script has logged have ids that begin so."""
Values = dict[int, float]


def charts(subject: Subject) -> list[Lines]:
    found = [chart for name in curves_of(subject) if (chart := by_epoch(subject, name))]
    steps = _by_step(subject)
    return [*found, *([steps] if steps else []), *logged(subject)]


def logged(subject: Subject) -> list[Lines]:
    """What attached scripts have logged: a plot for each kind of value, so that train_loss and val_loss are in one."""
    several = len(subject.trained) > 1
    plots: dict[str, list[Series]] = {}
    for group in subject.trained[:MOST_SHOWN]:
        hue, before, run = subject.colour(group), f"{group.name}, " if several else "", group.samples[0].run
        found = run.logged()
        way = along.of_run(run) if found else None
        for each in found:
            lines = plots.setdefault(_kind(each.name), [])
            keep = thin(each.values)
            lines.append(
                Series(
                    name=before + each.name,
                    colour=hue.name if several else f"c{len(lines) % 8}",
                    x=[each.steps[i] for i in keep],
                    y=shorts(each.values[i] for i in keep),
                    dash=several and hue.again,
                    over=way.at_steps([each.steps[i] for i in keep]) if way else [],
                )
            )
    return [_logged_chart(kind, series) for kind, series in list(plots.items())[:MOST_LOGGED]]


def _logged_chart(kind: str, series: list[Series]) -> Lines:
    chart = Lines(
        id=f"{LOGGED}{kind}",
        section=SECTION,
        title=f"{kind.capitalize()}, as the script logged it",
        says="Values that the script logged itself, at the optimizer's steps.",
        x=STEP,
        y=Axis(label=kind),
        series=series,
        smooth=True,
    )
    return along.choices(chart, BESIDE_STEPS)


def _kind(name: str) -> str:
    """train_loss, val/loss_epoch and eval-loss are losses."""
    words = [word for word in re.split(r"[^0-9A-Za-z]+", name.lower()) if word]
    while len(words) > 1 and words[-1] in ("step", "epoch"):
        words.pop()
    return words[-1] if words else "value"


def curves_of(subject: Subject) -> list[str]:
    """What there is a curve of: what the models are judged by, then the loss."""
    found = [
        key.removeprefix("test_")
        for group in subject.trained
        for key in learned_keys(group.spec.recipe)
        if key.startswith("test_")
    ]
    return [*dict.fromkeys(name for name in found if name != "loss"), "loss"]


def by_epoch(subject: Subject, name: str) -> Lines | None:
    """The plot of one figure after each epoch."""
    several = len(subject.trained) > 1
    sources = subject.study.read().study.published if subject.study else []
    series = [
        line
        for group in subject.trained
        for line in (*_of_cell(subject, group, name, several), *_published(sources, subject, group, name, several))
    ]
    if not series:
        return None
    compared = [line for line in series if line.role == "test"] or [line for line in series if line.role == "train"]
    spread = "runs" if any(len(group.samples) > 1 for group in subject.trained) else "ranks"
    bands = f" Bands: least and most of its {spread}." if any(line.low for line in series) else ""
    chart = Lines(
        id=name,
        section=SECTION,
        title=name.capitalize(),
        says=f"{name.capitalize()} after each epoch; test is measured over the whole test set, train while training."
        f"{bands}{_together(compared)}",
        x=EPOCH,
        y=Axis(label=name, unit=recorded(f"test_{name}").unit),
        series=series,
        marks=_overfitting(subject),
        hidden=["ranks", *(["train"] if several else [])],
        smooth=True,
    )
    return along.choices(chart, BESIDE_EPOCHS)


def _of_cell(subject: Subject, group: Group, name: str, several: bool) -> list[Series]:
    """Test and train, the mean over a cell's runs with their spread; of a single run, the spread of train over its ranks; and the ranks of its
    first run."""
    runs = [each.run for each in group.samples]
    ranks = [_values(runs[0].epochs(rank), f"train_{name}") for rank in range(runs[0].ranks)]
    hue, shown, before = subject.colour(group), subject.place(group) < MOST_SHOWN, f"{group.name}, " if several else ""
    found, places = [], along.of_epochs(runs)
    for role, colour in (("test", "c0"), ("train", "c1")):
        curves = [_values(run.epochs(), f"{role}_{name}") for run in runs]
        around = ranks if len(runs) == 1 and role == "train" else curves
        dash = role == "train" or hue.again
        found.append(_line(before + role, hue.name if several else colour, curves, around, role, dash, shown, places))
    for rank, curve in enumerate(ranks[:MOST_RANKS] if len(ranks) > 1 else []):
        colour = hue.name if several else f"c{(rank + 2) % 8}"
        found.append(_line(f"{before}rank {rank}", colour, [curve], [], "ranks", True, shown, places))
    return [line for line in found if line]


def _published(sources: Sequence[Published], subject: Subject, group: Group, name: str, several: bool) -> list[Series]:
    """What a report's own curve was, beside ours: of this cell, or of one that shares its trainings."""
    hue, cells = subject.colour(group), subject.sharing(group)
    found = []
    for source in sources:
        cell = next((cell for cell in cells if cell in source.curves), group.name)
        before = f"{cell}, " if several else ""
        for role, shown_as in (("test", "published"), ("train", "train")):
            points = {each.epoch: getattr(each, f"{role}_{name}", None) for each in source.curves.get(cell, [])}
            known = {epoch: value for epoch, value in points.items() if value is not None}
            label = f"{before}{role} published, {source.source.partition(':')[0]}"
            colour = hue.name if several else "c2" if role == "test" else "c3"
            found.append(_line(label, colour, [known], [], shown_as, True, True))
    return [line for line in found if line]


def _line(
    name: str,
    colour: str,
    curves: Sequence[Values],
    around: Sequence[Values],
    role: str,
    dash: bool,
    shown: bool,
    places: Places | None = None,
) -> Series | None:
    """The mean of curves over epochs, with the least and the most of those around it; None where nothing is known. `places`: where epochs ended."""
    known, around = [curve for curve in curves if curve], [curve for curve in around if curve]
    if not known:
        return None
    epochs = sorted({epoch for curve in known for epoch in curve})
    mean = [statistics.fmean(curve[epoch] for curve in known if epoch in curve) for epoch in epochs]
    low, high = _ends(around, epochs, min), _ends(around, epochs, max)
    keep = thin(mean)
    return Series(
        name=name,
        colour=colour,
        x=[epochs[i] for i in keep],
        y=shorts(mean[i] for i in keep),
        low=[low[i] for i in keep] if low else [],
        high=[high[i] for i in keep] if high else [],
        role=role,
        dash=dash,
        shown=shown,
        over=[[places[epochs[i]][k] if epochs[i] in places else None for i in keep] for k in range(3)]
        if places
        else [],
    )


def _together(lines: Sequence[Series]) -> str:
    """Curves that cannot be told apart by eye are named: runs that compute the same shall lie upon each other."""
    known = [value for line in lines for value in line.y if value is not None]
    near = 0.005 * (max(known) - min(known)) if known else 0.0
    found: list[list[Series]] = []
    for line in lines:
        same = next((others for others in found if _near(others[0], line, near)), None)
        if same:
            same.append(line)
        else:
            found.append([line])
    named = [", ".join(f"'{line.name.rpartition(',')[0]}'" for line in same) for same in found if len(same) > 1]
    return "".join(f" {names} lie upon each other." for names in named)


def _near(one: Series, other: Series, most: float) -> bool:
    pairs = zip(one.y, other.y, strict=False)
    return one.x == other.x and all(a is not None and b is not None and abs(a - b) <= most for a, b in pairs)


def _ends(curves: Sequence[Values], epochs: Sequence[int], end: Callable[[list[float]], float]) -> Numbers:
    if len(curves) < 2:
        return []
    found = [[curve[epoch] for curve in curves if epoch in curve] for epoch in epochs]
    return [short(end(each)) if each else None for each in found]


def _values(epochs: Sequence[dict[str, Any]], key: str) -> Values:
    """One figure by epoch; epochs that do not have it are left out."""
    return {int(each["epoch"]): float(each[key]) for each in epochs if each.get(key) is not None and "epoch" in each}


def thin(curve: Sequence[float]) -> list[int]:
    """Which points to keep: all of them, or of every stretch its least and its greatest, so that no peak is lost."""
    if len(curve) <= MOST_POINTS:
        return list(range(len(curve)))
    kept = {0, len(curve) - 1}
    for part in np.array_split(np.arange(len(curve)), (MOST_POINTS - 2) // 2):
        inside = np.asarray(curve, dtype=float)[part]
        kept |= {int(part[int(np.nanargmin(inside))]), int(part[int(np.nanargmax(inside))])}
    return sorted(kept)


def _overfitting(subject: Subject) -> list[Mark]:
    """Since when each cell overfits, by its first run; where several do in the same epoch, they share a mark."""
    since: dict[int, list[str]] = {}
    for group in [group for group in subject.trained if group.done][:MOST_SHOWN]:
        for finding in overfitting.answer(Evidence(group.done[0].run)):
            if finding.verdict.startswith("overfitting since"):
                since.setdefault(int(finding.figures["best_epoch"]), []).append(group.name)
    several = len(subject.trained) > 1
    # Cells that share an epoch have ended it at different times: their mark has a place along epochs alone.
    places = {} if several else along.of_epochs([subject.trained[0].samples[0].run])

    def who(names: list[str]) -> str:
        return f" ({', '.join(names) if len(names) < 3 else f'{len(names)} cells'})" if several else ""

    return [
        Mark(
            x=epoch,
            text=f"overfitting since epoch {epoch}{who(names)}",
            colour="warn",
            over=places.get(epoch, []),
        )
        for epoch, names in since.items()
    ]


def _by_step(subject: Subject) -> Lines | None:
    """The training loss of every step of a cell's first run, over all ranks."""
    series = []
    several = len(subject.trained) > 1
    for group in subject.trained[:MOST_SHOWN]:
        run, hue = group.samples[0].run, subject.colour(group)
        losses = mean_losses(common(run.all_steps()))
        line = step_series(along.of_run(run), losses, group.name if several else "loss", hue.name, hue.again)
        if line:
            series.append(line)
    return step_chart(series, ", of each cell's first run" if several else "") if series else None


def step_chart(series: Sequence[Series], which: str = "") -> Lines:
    chart = Lines(
        id="loss-by-step",
        section=SECTION,
        title="Training loss, step by step",
        says=f"Mean over all ranks' samples of each step{which}. Of long runs each point is the mean of a stretch ({MOST_POINTS} of them), and the "
        "band its least and most.",
        x=STEP,
        y=Axis(label="training loss"),
        series=list(series),
        smooth=True,
    )
    return along.choices(chart, BESIDE_STEPS)


def step_series(way: Along, losses: Rows, name: str, colour: str, dash: bool = False) -> Series | None:
    """Loss over steps: of long runs the means of stretches, with their least and most."""
    if not np.isfinite(losses).any():
        return None
    ends = np.linspace(0, len(losses), min(len(losses), MOST_POINTS) + 1).astype(int)
    begins, lengths = ends[:-1], np.diff(ends)
    low, high = (shorts(each.reduceat(losses, begins).tolist()) for each in (np.minimum, np.maximum))
    stretched, middles = len(losses) > MOST_POINTS, begins + lengths // 2
    return Series(
        name=name,
        colour=colour,
        x=way.steps[middles].tolist(),
        y=shorts((np.add.reduceat(losses, begins) / lengths).tolist()),
        low=low if stretched else [],
        high=high if stretched else [],
        dash=dash,
        over=way.at(middles),
    )
