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
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from lockstep.statistics import t_p, t_quantile

LEVEL = 0.007
LOOKS = (3, 4, 6, 8, 11, 15, 20, 28, 40, 64)
"""After how many starts a race looks at its numbers."""
MARGIN = 0.02
LEAST_ROUNDS = 3

Clock = Literal["wall", "cpu"]
Verdict = Literal["faster", "slower", "the same", "not settled"]


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One window of one contender, as it is kept."""

    contender: str
    start: int
    round: int
    steps: int
    samples: float
    """In all steps, over all ranks."""
    wall: float
    cpu: float
    foreign: float = 0.0
    """Share of the machine's time that other work here took."""
    stolen: float = 0.0
    """Share that went to other machines."""
    disturbed: bool = False
    phases: dict[str, float] = {}

    def cost(self, clock: Clock) -> float:
        """Seconds for each sample."""
        return (self.wall if clock == "wall" else self.cpu) / self.samples


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How long a contender takes for a sample, as a multiple of what the baseline takes."""

    contender: str
    baseline: str
    verdict: Verdict
    n: int
    """Starts of each."""
    rounds: int
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    p: float | None = None


def middle_mean(values: Sequence[float]) -> float:
    """The mean of the middle half: nearly as sharp as the mean, and a quarter of the rounds may be anything."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def by_start(windows: Iterable[Window], contender: str, baseline: str, clock: Clock = "wall") -> list[list[float]]:
    """The log ratio of each round, by start. Disturbed rounds count only where a start has too few others."""
    pairs: dict[int, dict[int, dict[str, Window]]] = defaultdict(lambda: defaultdict(dict))
    for window in windows:
        if window.contender in (contender, baseline):
            pairs[window.start][window.round][window.contender] = window
    found = []
    for rounds in pairs.values():
        whole = [both for both in rounds.values() if len(both) == 2]
        clean = [both for both in whole if not any(window.disturbed for window in both.values())]
        used = clean if len(clean) >= LEAST_ROUNDS else whole
        if used:
            found.append([math.log(both[contender].cost(clock) / both[baseline].cost(clock)) for both in used])
    return found


def ratios(
    windows: Sequence[Window],
    contenders: Sequence[str],
    baseline: str,
    margin: float = MARGIN,
    clock: Clock = "wall",
    level: float = LEVEL,
) -> list[Ratio]:
    """Every contender against the baseline, as one family."""
    starts = {name: by_start(windows, name, baseline, clock) for name in contenders}
    shifts = {name: [middle_mean(rounds) for rounds in found] for name, found in starts.items()}
    order = sorted(contenders, key=lambda name: _p(shifts[name]))
    share, results = level, {}
    failed = False
    for position, name in enumerate(order):
        share = share if failed else level / (len(order) - position)
        failed = failed or _p(shifts[name]) > share
        results[name] = _ratio(name, baseline, shifts[name], sum(map(len, starts[name])), share, margin)
    return [results[name] for name in contenders]


def _p(shifts: Sequence[float]) -> float:
    if len(shifts) < 2:
        return 1.0
    deviation = statistics.stdev(shifts)
    if deviation == 0:
        return 1.0 if shifts[0] == 0 else 0.0
    return t_p(statistics.fmean(shifts) / deviation * math.sqrt(len(shifts)), len(shifts) - 1)


def _ratio(name: str, baseline: str, shifts: Sequence[float], rounds: int, level: float, margin: float) -> Ratio:
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


def best_rounds(windows: Sequence[Window], names: Sequence[str], start_s: float, round_s: float) -> int | None:
    """How many rounds a start should have, so that the interval shrinks fastest: from what both cost, and from how much they vary.

    The variance of a start's number is b + w / r for r rounds; at a cost of S + r R for each start, r = sqrt(S w / (R b)) is best.
    """
    between, within = [], []
    for name in names[1:]:
        starts = [rounds for rounds in by_start(windows, name, names[0]) if len(rounds) > 2]
        if len(starts) < 3:
            continue
        noise = statistics.fmean(statistics.variance(rounds) for rounds in starts)
        spread = statistics.variance([statistics.fmean(rounds) for rounds in starts])
        within.append(noise)
        between.append(max(spread - noise / statistics.fmean(map(len, starts)), 0.05 * spread))
    if not within or not (b := statistics.fmean(between)):
        return None
    return round(math.sqrt(start_s / round_s * statistics.fmean(within) / b))
