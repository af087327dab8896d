"""Learning curves: by epoch over all ranks, each rank by itself, and the loss step by step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.explain import overfitting
from lockstep.explain.evidence import Evidence, Rows
from lockstep.measure.records import read_steps
from lockstep.report.subject import Subject
from lockstep.report.views import Axis, Lines, Mark, Numbers, Series, short, shorts
from lockstep.run import Run
from lockstep.study.gather import Group

SECTION = "learning"
# A plot is about so many dots wide: more points are not seen, and cost room.
MOST_POINTS = 300
MOST_SHOWN = 8
MOST_RANKS = 16
UNITS = {"accuracy": "percent", "loss": "number"}
Values = dict[int, float]


def charts(subject: Subject) -> list[Lines]:
    found = [chart for name in UNITS if (chart := _by_epoch(subject, name))]
    steps = _by_step(subject)
    return [*found, steps] if steps else found


def _by_epoch(subject: Subject, name: str) -> Lines | None:
    series: list[Series] = []
    several = len(subject.begun) > 1
    for group in subject.begun:
        test, train = (
            _over_runs(subject, group, f"test_{name}", "test"),
            _over_runs(subject, group, f"train_{name}", "train"),
        )
        series += [line for line in (test, train) if line] + _ranks(subject, group, f"train_{name}")
    if not series:
        return None
    spread = (
        "least and most of its runs"
        if any(len(group.samples) > 1 for group in subject.begun)
        else "least and most of its ranks"
    )
    has_band = any(line.low for line in series)
    says = f"{name.capitalize()} after each epoch; test is measured over the whole test set, train while training."
    if has_band:
        says += f" Bands: {spread}."
    says += _together(
        [line for line in series if line.role == "test"] or [line for line in series if line.role == "train"]
    )
    return Lines(
        id=name,
        section=SECTION,
        title=name.capitalize(),
        says=says,
        x=Axis(label="epoch", unit="count"),
        y=Axis(label=name, unit=UNITS[name]),
        series=series,
        marks=_overfitting(subject),
        hidden=["ranks", *(["train"] if several else [])],
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
    names = [[line.name.rpartition(",")[0] for line in same] for same in found if len(same) > 1]
    return "".join(f" {_names(same)} lie upon each other." for same in names)


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _near(one: Series, other: Series, most: float) -> bool:
    pairs = zip(one.y, other.y, strict=False)
    return one.x == other.x and all(a is not None and b is not None and abs(a - b) <= most for a, b in pairs)


def _over_runs(subject: Subject, group: Group, key: str, role: str) -> Series | None:
    """The mean over a cell's runs, with their spread; of a single run, the spread over its ranks, where they are known apart."""
    runs = [each.run for each in group.samples]
    curves = [curve for run in runs if (curve := values(run.epochs(), key))]
    if not curves:
        return None
    around = curves
    if len(runs) == 1 and role == "train":
        around = [curve for rank in range(_ranks_of(runs[0])) if (curve := values(runs[0].epochs(rank), key))]
    epochs = sorted({epoch for curve in curves for epoch in curve})
    mean = [statistics.fmean(curve[epoch] for curve in curves if epoch in curve) for epoch in epochs]
    low, high = _ends(around, epochs, min), _ends(around, epochs, max)
    keep = thin(mean)
    hue = subject.colour(group)
    several = len(subject.begun) > 1
    return Series(
        name=f"{group.name}, {role}" if several else role,
        colour=hue.name if several else {"test": "c0", "train": "c1"}[role],
        x=[epochs[i] for i in keep],
        y=shorts(mean[i] for i in keep),
        low=[low[i] for i in keep] if low else [],
        high=[high[i] for i in keep] if high else [],
        role=role,
        dash=role == "train" or hue.again,
        shown=subject.place(group) < MOST_SHOWN,
    )


def _ends(curves: Sequence[Values], epochs: Sequence[int], end: Callable[[list[float]], float]) -> Numbers:
    if len(curves) < 2:
        return []
    found = [[curve[epoch] for curve in curves if epoch in curve] for epoch in epochs]
    return [short(end(each)) if each else None for each in found]


def _ranks(subject: Subject, group: Group, key: str) -> list[Series]:
    """Each rank's own curve; of a cell, those of its first run."""
    run = group.samples[0].run
    ranks = _ranks_of(run)
    if ranks == 1:
        return []
    several = len(subject.begun) > 1
    found = []
    for rank in range(min(ranks, MOST_RANKS)):
        curve = values(run.epochs(rank), key)
        keep = thin(list(curve.values()))
        epochs = list(curve)
        if curve:
            found.append(
                Series(
                    name=f"{group.name}, rank {rank}" if several else f"rank {rank}",
                    colour=subject.colour(group).name if several else f"c{(rank + 2) % 8}",
                    x=[epochs[i] for i in keep],
                    y=shorts(curve[epochs[i]] for i in keep),
                    role="ranks",
                    dash=True,
                    shown=subject.place(group) < MOST_SHOWN,
                )
            )
    return found


def _ranks_of(run: Run) -> int:
    return run.spec().plan.ranks


def values(epochs: Sequence[dict[str, Any]], key: str) -> Values:
    """One figure by epoch; epochs that do not have it are left out."""
    return {int(each["epoch"]): float(each[key]) for each in epochs if each.get(key) is not None and "epoch" in each}


def thin(curve: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Which points to keep: all of them, or of every stretch its least and its greatest, so that no peak is lost."""
    if len(curve) <= most:
        return list(range(len(curve)))
    kept = {0, len(curve) - 1}
    for part in np.array_split(np.arange(len(curve)), max(1, (most - 2) // 2)):
        inside = np.asarray(curve, dtype=float)[part]
        kept |= {int(part[int(np.nanargmin(inside))]), int(part[int(np.nanargmax(inside))])}
    return sorted(kept)


def _overfitting(subject: Subject) -> list[Mark]:
    """Since when each cell overfits, by its first run; where several do in the same epoch, they share a mark."""
    since: dict[int, list[str]] = {}
    for group in subject.done[:MOST_SHOWN]:
        for finding in overfitting.answer(Evidence(group.done[0].run)):
            if finding.verdict.startswith("overfitting since"):
                since.setdefault(int(finding.figures["best_epoch"]), []).append(group.name)
    several = len(subject.begun) > 1

    def who(names: list[str]) -> str:
        return f" ({', '.join(names) if len(names) < 3 else f'{len(names)} cells'})" if several else ""

    return [
        Mark(x=epoch, text=f"overfitting since epoch {epoch}{who(names)}", colour="warn")
        for epoch, names in since.items()
    ]


def _by_step(subject: Subject) -> Lines | None:
    """The training loss of every step of a cell's first run, over all ranks: means of stretches, with their least and most."""
    series = []
    several = len(subject.begun) > 1
    for group in subject.begun[:MOST_SHOWN]:
        run = group.samples[0].run
        ranks = [read_steps(run.rank_folder(rank) / "steps.bin") for rank in range(_ranks_of(run))]
        hue = subject.colour(group)
        line = step_series(ranks, group.name if several else "loss", hue.name, hue.again)
        if line:
            series.append(line)
    if not series:
        return None
    return Lines(
        id="loss-by-step",
        section=SECTION,
        title="Training loss, step by step",
        says="Mean over all ranks' samples of each step"
        + (", of each cell's first run" if several else "")
        + f". Of long runs each point is the mean of a stretch ({MOST_POINTS} of them), and the band its least and most.",
        x=Axis(label="step", unit="count"),
        y=Axis(label="training loss"),
        series=series,
    )


def step_series(ranks: Sequence[Rows], name: str, colour: str, dash: bool = False) -> Series | None:
    """Loss over steps. Rows are cut to those that every rank has written by now."""
    length = min((len(rows) for rows in ranks), default=0)
    if not length:
        return None
    samples = np.sum([rows["samples"][:length] for rows in ranks], axis=0)
    loss = np.sum([rows["loss_sum"][:length] for rows in ranks], axis=0) / np.maximum(samples, 1)
    steps = np.asarray(ranks[0]["step"][:length])
    if not np.isfinite(loss).any() or not samples.any():
        return None
    parts = np.array_split(np.arange(length), min(length, MOST_POINTS))
    stretched = length > MOST_POINTS
    return Series(
        name=name,
        colour=colour,
        x=[int(steps[part[len(part) // 2]]) for part in parts],
        y=shorts(float(loss[part].mean()) for part in parts),
        low=shorts(float(loss[part].min()) for part in parts) if stretched else [],
        high=shorts(float(loss[part].max()) for part in parts) if stretched else [],
        dash=dash,
    )
