"""Is it overfitting, since which epoch, what would help? From the curves: test loss against its own noise, and the gap to train."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.recipe import Recipe
from lockstep.units import points

FEWEST_EPOCHS = 5
# A rise counts if it is this many times the curve's own jitter, which few epochs tell less well: tests/test_explain_overfitting.py has
# how often that is wrong.
SURE, SURE_SHORT = 2.0, 20.0
# The curve's level at its low and at its end are means over this share of its epochs, and over at least three.
WINDOW = 1 / 5


def answer(evidence: Evidence) -> Iterator[Finding]:
    whole = ("test_loss", "train_loss")
    epochs = [epoch for epoch in evidence.epochs if all(epoch.get(key) is not None for key in whole)]
    if not epochs:
        return
    if len(epochs) < FEWEST_EPOCHS:
        yield Finding(
            verdict="too few epochs to say whether it overfits",
            why=f"{len(epochs)} of at least {FEWEST_EPOCHS}: a curve's noise cannot be told from its direction",
            next=f"epochs={2 * FEWEST_EPOCHS}",
        )
        return
    test = [float(epoch["test_loss"]) for epoch in epochs]
    train = [float(epoch["train_loss"]) for epoch in epochs]
    best, (rise, noise, sure) = turning_point(test), rose(test)
    numbers = [int(epoch["epoch"]) for epoch in epochs]
    learned, tested = (epochs[-1].get(key) for key in ("train_accuracy", "test_accuracy"))
    gap = None if learned is None or tested is None else float(learned) - float(tested)
    figures = {
        "best_epoch": numbers[best],
        "rise": rise,
        "noise": noise,
        "gap": gap,
        "test_loss": test,
        "train_loss": train,
    }
    losses = f"train loss is {train[-1]:.4f} at the end"
    gap_text = losses if gap is None else f"train accuracy is {points(gap)} above test at the end"
    if sure and train[-1] < train[best]:
        yield Finding(
            verdict=f"overfitting since epoch {numbers[best]}: test loss rose by {rise:.4f} after it while train loss fell",
            why=f"test loss {test[best]:.4f} in epoch {numbers[best]}, {test[-1]:.4f} at the end; its own jitter is {noise:.4f}; {gap_text}",
            next=f"early_stopping.patience={max(2, len(test) // 10)} ends it there; not yet on: {', '.join(not_on(evidence.spec.recipe)) or 'nothing'}",
            figures=figures,
        )
        return
    falling = test[-1] <= min(test) + noise and best >= len(test) - 2
    yield Finding(
        verdict="not overfitting, and still learning" if falling else "not overfitting: test loss has levelled off",
        why=f"least test loss {test[best]:.4f} in epoch {numbers[best]} of {numbers[-1]}, {test[-1]:.4f} at the end; its own jitter is {noise:.4f}; {gap_text}",
        next=f"train longer: epochs={2 * numbers[-1]}" if falling else "",
        figures=figures,
    )


class Rise(NamedTuple):
    """The rise of a curve after its minimum, its jitter, and whether the rise is more than jitter explains."""

    rise: float
    noise: float
    sure: bool


def rose(curve: Sequence[float]) -> Rise:
    """The mean of the last epochs against the lowest mean of as many. A single minimum is partly chance, and every curve rises after it."""
    width = max(3, round(WINDOW * len(curve)))
    means = [statistics.fmean(curve[i : i + width]) for i in range(len(curve) - width + 1)]
    low = means.index(min(means))
    rise, noise = means[-1] - means[low], jitter(curve[min(low + width // 2, len(curve) - 4) :])
    return Rise(rise, noise, rise > (SURE + SURE_SHORT / len(curve)) * noise)


def jitter(curve: Sequence[float]) -> float:
    """The standard deviation of a curve's noise: around a straight line, or as it jumps from epoch to epoch, whichever is larger.

    Noise that lasts for some epochs looks like a trend and hardly jumps; noise around a bend is little, and the line does not follow.
    """
    jumps = math.sqrt(statistics.fmean((b - a) ** 2 for a, b in pairwise(curve)) / 2)
    line = statistics.linear_regression(range(len(curve)), curve)
    left = sum((value - line.intercept - line.slope * i) ** 2 for i, value in enumerate(curve))
    return max(jumps, math.sqrt(left / (len(curve) - 2)))


def smoothed(curve: Sequence[float]) -> list[float]:
    """The mean of each epoch with its neighbours, so that one lucky epoch does not decide."""
    return [statistics.fmean(curve[max(0, i - 1) : i + 2]) for i in range(len(curve))]


def turning_point(curve: Sequence[float]) -> int:
    """The epoch of the minimum."""
    smooth = smoothed(curve)
    near = smooth.index(min(smooth))
    around = range(max(0, near - 1), min(len(curve), near + 2))
    return min(around, key=lambda i: curve[i])


def not_on(recipe: Recipe) -> list[str]:
    """Techniques against overfitting that the recipe does not use yet."""
    augment, regularize, optimizer = recipe.augment, recipe.regularize, recipe.optimizer
    classes = recipe.loss == "cross-entropy"
    have = {
        "augment.crop=4": augment.crop > 0 or not classes,
        "augment.flip=true": augment.flip
        or not classes
        or recipe.data.startswith("mnist"),  # a mirrored digit is not the same digit
        "regularize.dropout=0.25": regularize.dropout > 0,
        "optimizer.weight_decay=5e-4": optimizer.weight_decay > 0 or regularize.l2 > 0,
        "regularize.label_smoothing=0.1": regularize.label_smoothing > 0 or not classes,
        "regularize.mixup=0.2": regularize.mixup > 0 or not classes,
    }
    return [name for name, on in have.items() if not on]
