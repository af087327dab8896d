"""What the windows of a race say: a ratio with an interval for each contender, and whether it is settled.

Within a round all contenders had the same machine, so what is compared is the ratio within a round. Rounds of one start share where its
memory happens to lie, which makes a start 1 to 2 % faster or slower for its whole life: no number of rounds averages that out. So each start
gives one number, the mean of the middle half of its rounds' log ratios, and starts are the unit of the interval: Student's t over them.

A race looks at its numbers again and again and stops when they are settled, which finds more differences than there are. At most LOOKS times, each
at LEVEL, it is wrong in less than 5 % of races (docs/race.md has the simulation). Holm's procedure does the same for several contenders.
"Different" is an interval without 1; "the same" is the two one-sided tests of equivalence (TOST) within the margin.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import msgspec

from lockstep.machine import starving
from lockstep.recipe import Positive, PositiveFloat
from lockstep.shapes import Number, Spent
from lockstep.statistics import t_p, t_quantile

T = TypeVar("T")

LEVEL = 0.007
LOOKS = (3, 4, 6, 8, 11, 15, 20, 28, 40, 64)
"""After how many starts a race looks at its numbers."""
MARGIN = 0.02
LEAST_ROUNDS = 3
# A window in which the system counted no processor time at all.
LEAST_S = 1e-9

Clock = Literal["wall", "cpu", "forward", "backward"]
"""All of a step, or what one of its phases took of the wall."""
Pair = tuple[str, str]
"""A contender, and the one that it is compared with."""
Verdict = Literal["faster", "slower", "the same", "not settled"]


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One window of one contender, as it is kept."""

    contender: str
    start: int
    round: int
    steps: Positive
    samples: PositiveFloat
    """In all steps, over all ranks."""
    wall: PositiveFloat
    cpu: Number
    foreign: Number = 0.0
    """Share of the machine's time that other work here took."""
    stolen: Number = 0.0
    """Share that went to other machines."""
    disturbed: bool = False
    spent: Spent | None = None
    """The processors that it used, and could not have, its first steps included; None where that is not known."""
    phases: dict[str, Number] = {}

    def cost(self, clock: Clock) -> float:
        """Seconds for each sample."""
        seconds = self.wall if clock == "wall" else self.cpu if clock == "cpu" else self.phases[clock]
        return max(seconds, LEAST_S) / self.samples

    def knows(self, clock: Clock) -> bool:
        return clock in ("wall", "cpu") or clock in self.phases


def cores_had(windows: Sequence[Window]) -> float | None:
    """The share of their cores that the contenders had in their windows; None where that is not known."""
    return starving.had(starving.total(window.spent for window in windows if window.spent))


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How long a contender takes for a sample, as a multiple of what the baseline takes."""

    contender: str
    baseline: str
    verdict: Verdict
    n: int
    """Starts of each."""
    rounds: int
    effect: PositiveFloat | None = None
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None
    level: Number | None = None
    p: Number | None = None


def middle_mean(values: Sequence[float]) -> float:
    """The mean of the middle half: nearly as sharp as the mean, and a quarter of the rounds may be anything."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def undisturbed(values: Sequence[T], disturbed: Callable[[T], bool]) -> Sequence[T]:
    """Those that were not disturbed; all, where these are too few."""
    clean = [value for value in values if not disturbed(value)]
    return clean if len(clean) >= LEAST_ROUNDS else values


def by_start(windows: Iterable[Window], contender: str, baseline: str, clock: Clock = "wall") -> list[list[float]]:
    """The log ratio of each round, by start. Disturbed rounds count only where a start has too few others."""
    pairs: dict[int, dict[int, dict[str, Window]]] = defaultdict(lambda: defaultdict(dict))
    for window in windows:
        if window.contender in (contender, baseline):
            pairs[window.start][window.round][window.contender] = window
    found = []
    for rounds in pairs.values():
        whole = [
            both for both in rounds.values() if len(both) == 2 and all(window.knows(clock) for window in both.values())
        ]
        used = undisturbed(whole, lambda both: any(window.disturbed for window in both.values()))
        if used:
            found.append([math.log(both[contender].cost(clock) / both[baseline].cost(clock)) for both in used])
    return found


def ratios(
    windows: Sequence[Window],
    pairs: Sequence[Pair],
    margin: float = MARGIN,
    clock: Clock = "wall",
    level: float = LEVEL,
) -> list[Ratio]:
    """Every pair, as one family."""
    starts = {pair: by_start(windows, *pair, clock) for pair in pairs}
    shifts = {pair: [middle_mean(rounds) for rounds in found] for pair, found in starts.items()}
    order = sorted(pairs, key=lambda pair: _p(shifts[pair]))
    share, results = level, {}
    failed = False
    for position, pair in enumerate(order):
        share = share if failed else level / (len(order) - position)
        failed = failed or _p(shifts[pair]) > share
        results[pair] = _ratio(pair, shifts[pair], sum(map(len, starts[pair])), share, margin)
    return [results[pair] for pair in pairs]


def _p(shifts: Sequence[float]) -> float:
    if len(shifts) < 2:
        return 1.0
    deviation = statistics.stdev(shifts)
    if deviation == 0:
        return 1.0 if shifts[0] == 0 else 0.0
    return t_p(statistics.fmean(shifts) / deviation * math.sqrt(len(shifts)), len(shifts) - 1)


def _ratio(pair: Pair, shifts: Sequence[float], rounds: int, level: float, margin: float) -> Ratio:
    name, baseline = pair
    n = len(shifts)
    if not n:
        return Ratio(contender=name, baseline=baseline, verdict="not settled", n=0, rounds=0)
    middle = statistics.fmean(shifts)
    if n < LOOKS[0]:
        return Ratio(
            contender=name, baseline=baseline, verdict="not settled", n=n, rounds=rounds, effect=math.exp(middle)
        )
    error = statistics.stdev(shifts) / math.sqrt(n)
    half = t_quantile(level, n - 1) * error
    verdict: Verdict = "not settled"
    # TOST: each of its two tests is one-sided at the level, which is an interval of twice the level.
    reach = abs(middle) + t_quantile(2 * level, n - 1) * error
    if reach <= math.log1p(margin):
        verdict = "the same"
    elif abs(middle) > half:
        verdict = "slower" if middle > 0 else "faster"
    return Ratio(
        contender=name,
        baseline=baseline,
        verdict=verdict,
        n=n,
        rounds=rounds,
        effect=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        level=1 - level,
        p=_p(shifts),
    )


def best_rounds(windows: Sequence[Window], pairs: Sequence[Pair], start_s: float, round_s: float) -> int | None:
    """How many rounds a start should have, so that the interval shrinks fastest: from what both cost, and from how much they vary.

    The variance of a start's number is b + w / r for r rounds; at a cost of S + r R for each start, r = sqrt(S w / (R b)) is best.
    """
    between, within = [], []
    for pair in pairs:
        starts = [rounds for rounds in by_start(windows, *pair) if len(rounds) > 2]
        if len(starts) < 3:
            continue
        noise = statistics.fmean(statistics.variance(rounds) for rounds in starts)
        spread = statistics.variance([statistics.fmean(rounds) for rounds in starts])
        within.append(noise)
        between.append(max(spread - noise / statistics.fmean(map(len, starts)), 0.05 * spread))
    if not within or not (b := statistics.fmean(between)):
        return None
    return round(math.sqrt(start_s / round_s * statistics.fmean(within) / b))
