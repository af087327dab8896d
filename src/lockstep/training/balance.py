"""`shares=auto`: ranks of unequal speed divide each global batch so that all are done with their share at the same time.

How fast a rank is shows in the steps that it takes: all their time but what it waits for the others and exchanges. A trial of each rank by
itself would not show what the ranks take from each other, and would hold training up each time it is made again.
"""

from __future__ import annotations

import math

from lockstep.backends import group
from lockstep.measure.recorder import Recorder
from lockstep.measure.records import WARMUP_STEPS
from lockstep.placement import Placement
from lockstep.plan import Plan, divided
from lockstep.training.context import Context

# Looks are this far apart: a processor that is throttled runs and stands still in turns of a tenth of a second.
LOOK_S = 1.0
FEWEST_STEPS, MOST_STEPS = 10, 1000
# Another division has to promise this much, or every look would follow the noise of the last second.
GAIN = 1.03


class Balance:
    """Looks now and then at what the ranks needed, and divides batches anew. All ranks call it alike."""

    def __init__(self, plan: Plan, placement: Placement, recorder: Recorder, rank: int) -> None:
        self.plan = plan
        """With the shares as of now."""
        self.recorder = recorder
        self._placement, self._rank = placement, rank
        # The first steps of a process fill caches: also those of one that goes on with a run.
        self._row, self._left = recorder.log.count + WARMUP_STEPS, WARMUP_STEPS + FEWEST_STEPS

    def after_step(self, count: int) -> bool:
        """A step on `count` samples of all ranks is over; returns whether batches are divided in another way from now on."""
        self._left -= 1
        # What was seen of an epoch's last, partial batch says little about whole ones: the look waits for the next.
        if self._left > 0 or count < self.plan.global_batch:
            return False
        self.recorder.clock.flush()
        parts = self.plan.parts(count)
        seconds = self.recorder.log.busy(self._row, parts[self._rank])
        self._row = self.recorder.log.count
        busy = [each for (each,) in group.gather([seconds])]
        self._left = min(MOST_STEPS, max(FEWEST_STEPS, round(LOOK_S / max(busy))))
        shares = balanced(parts, busy)
        if shares is None:
            return False
        self.plan = divided(self.plan, self._placement, shares)
        return True


def balance_of(context: Context, plan: Plan, recorder: Recorder) -> Balance | None:
    """Who divides batches anew; None where their division stays as it is."""
    wanted = context.placement.shares == "auto" and context.rank.world > 1
    return Balance(plan, context.placement, recorder, context.rank.rank) if wanted else None


def balanced(samples: list[int], seconds: list[float]) -> list[int] | None:
    """The shares with which ranks would end together, if each took `seconds` for its `samples`; None where that gains next to nothing.

    A rank's time has a part that does not shrink with its share, so one division is too cautious and the next goes on from it.
    """
    speed = [count / max(each, 1e-9) for count, each in zip(samples, seconds, strict=True)]
    total, whole = sum(samples), sum(speed)
    ideal = [total * each / whole for each in speed]
    shares = [max(1, math.floor(each)) for each in ideal]
    # What rounding left over goes to whoever is done soonest with one sample more; where ranks were raised to one, the slowest gives.
    for _ in range(total - sum(shares)):
        shares[min(range(len(shares)), key=lambda rank: (shares[rank] + 1) / speed[rank])] += 1
    for _ in range(sum(shares) - total):
        shares[max((r for r in range(len(shares)) if shares[r] > 1), key=lambda rank: shares[rank] / speed[rank])] -= 1
    slowest = max(count / each for count, each in zip(shares, speed, strict=True))
    return shares if max(seconds) > GAIN * slowest else None
