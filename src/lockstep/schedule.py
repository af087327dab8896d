"""The learning rate of every optimizer step, as a factor: a function of the step's number, the same whatever the world size.

No state: a run that goes on from a checkpoint has the right rate by itself, and a report knows it without a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lockstep.recipe import Schedule


def factor(schedule: Schedule, step: int, total: int, per_epoch: int) -> float:
    """What `optimizer.lr` is multiplied with in step 0, 1, 2, … of `total`.

    Warm-up does not look at `total`: a run that is stopped within it has risen as far as a longer one has at that step.
    """
    warm = schedule.warmup_steps
    if step < warm:
        return (step + 1) / warm
    return _FACTORS[schedule.name](schedule, step - warm, total - warm, per_epoch)


def _step(schedule: Schedule, step: int, total: int, per_epoch: int) -> float:
    return float(schedule.factor ** (step // per_epoch // schedule.every_epochs))


def _cosine(schedule: Schedule, step: int, total: int, per_epoch: int) -> float:
    return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * step / total)) / 2


def _onecycle(schedule: Schedule, step: int, total: int, per_epoch: int) -> float:
    start = 1 / schedule.start_div
    return two_phases(schedule, step, total, start, 1.0, start / schedule.final_div)


def two_phases(schedule: Schedule, step: int, total: int, start: float, peak: float, end: float) -> float:
    """From start to peak and on to end along half cosines, as PyTorch's OneCycleLR divides the run."""
    turn = max(schedule.peak_at * total - 1, 1e-9)
    last = max(total - 1, turn + 1e-9)
    if step <= turn:
        return _anneal(start, peak, step / turn)
    return _anneal(peak, end, (step - turn) / (last - turn))


def _anneal(start: float, end: float, part: float) -> float:
    return end + (start - end) / 2 * (math.cos(math.pi * part) + 1)


_FACTORS: dict[str, Callable[[Schedule, int, int, int], float]] = {
    "constant": lambda schedule, step, total, per_epoch: 1.0,
    "step": _step,
    "cosine": _cosine,
    "onecycle": _onecycle,
}
