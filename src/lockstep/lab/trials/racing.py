"""The race of a student's code against the reference solution."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.lab.own_code import Speed
from lockstep.turns import Budget, Contender, Race

REFERENCE, YOURS = "reference", "yours"


def raced(contenders: Sequence[Contender], seconds: float) -> Speed:
    """The speed of the second contender as a multiple of the first one's."""
    race = Race(contenders, Budget(seconds=seconds), lenient=True)
    ratios = race.run()
    if REFERENCE in race.failures:  # no fault of the student's, unless their code is what ended it
        return Speed(unmeasured=f"the reference failed: {race.failures[REFERENCE]}")
    if YOURS in race.failures:
        return Speed(failed=race.failures[YOURS])
    ratio = ratios[0]
    if ratio.effect is None:
        return Speed(n=ratio.n)
    # The speed ratio is the inverse of the time ratio.
    return Speed(
        times=1 / ratio.effect,
        low=None if ratio.high is None else 1 / ratio.high,
        high=None if ratio.low is None else 1 / ratio.low,
        n=ratio.n,
    )
