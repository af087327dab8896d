"""Is it overfitting, since which epoch, what would help? From the curves: test loss against its own noise, and the gap to train."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.recipe import Recipe
from lockstep.units import points

FEWEST_EPOCHS = 5
# A rise counts if it is this many times the curve's own jitter. On simulated plateaus of 5 to 100 epochs, whose noise is normal, has
# outliers, or is autocorrelated (0.3), at most 2 % exceed it (tests/test_explain.py).
SURE = 4.2


def answer(evidence: Evidence) -> Iterator[Finding]:
    whole = ("test_loss", "train_loss")
    epochs = [epoch for epoch in evidence.epochs if all(epoch.get(key) is not None for key in whole)]
    if not epochs:
        return
    if len(epochs) < FEWEST_EPOCHS:
        yield Finding(
            verdict="too few epochs to say",
            why=f"{len(epochs)} of at least {FEWEST_EPOCHS}: a curve's noise cannot be told from its direction",
            next=f"epochs={2 * FEWEST_EPOCHS}",
        )
        return
    test = [float(epoch["test_loss"]) for epoch in epochs]
    train = [float(epoch["train_loss"]) for epoch in epochs]
    best, (rise, noise, sure) = turning_point(test), rose(test)
    numbers = [int(epoch["epoch"]) for epoch in epochs]
    gap = float(epochs[-1].get("train_accuracy") or 0.0) - float(epochs[-1].get("test_accuracy") or 0.0)
    figures = {
        "best_epoch": numbers[best],
        "rise": rise,
        "noise": noise,
        "gap": gap,
        "test_loss": test,
        "train_loss": train,
    }
    gap_text = f"train accuracy is {points(gap)} above test at the end"
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
    """Means of three epochs at both ends: a single minimum is partly chance, and every curve rises after a lucky epoch."""
    smooth = smoothed(curve)
    low = smooth.index(min(smooth))
    rise, noise = statistics.fmean(curve[-3:]) - smooth[low], jitter(curve, low)
    return Rise(rise, noise, low < len(curve) - 2 and rise > SURE * noise)


def jitter(curve: Sequence[float], since: int) -> float:
    """The standard deviation of a curve's noise from epoch to epoch, from its second differences, which a smooth bend does not affect.

    The larger of their median over the whole curve, whose first epochs fall steeply, and their root mean square after its minimum.
    """
    second = [abs(a - 2 * b + c) for a, b, c in zip(curve, curve[1:], curve[2:], strict=False)]
    after = second[max(0, since - 1) :]
    # A second difference of independent noise has sqrt(6) of its deviation; 0.6745 turns a median into a deviation.
    robust = statistics.median(second) / 0.6745
    return max(robust, math.sqrt(statistics.fmean(value**2 for value in after)) if after else 0.0) / math.sqrt(6)


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
    have = {
        "augment.crop=4": augment.crop > 0,
        "augment.flip=true": augment.flip or recipe.data.startswith("mnist"),  # a mirrored digit is not the same digit
        "regularize.dropout=0.25": regularize.dropout > 0,
        "optimizer.weight_decay=5e-4": optimizer.weight_decay > 0 or regularize.l2 > 0,
        "regularize.label_smoothing=0.1": regularize.label_smoothing > 0,
        "regularize.mixup=0.2": regularize.mixup > 0,
    }
    return [name for name, on in have.items() if not on]
