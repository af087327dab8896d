"""A race: starts of all contenders, rounds of windows in a drawn order, until it is settled or the budget is spent."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from lockstep.errors import InputError
from lockstep.machine.cpu import TICKS_S, Ticks, ticks
from lockstep.rounds import multiple
from lockstep.shapes import Spent
from lockstep.turns import estimate
from lockstep.turns.contender import Contender, ContenderFailed, Taken
from lockstep.turns.estimate import Pair, Ratio, Window

# The least length of a window in seconds and in steps; where these steps take longer than LONGEST_S, it has fewer.
# Short ones are best: the noise of a ratio hardly depends on their length, and many fit into the same time (docs/race.md).
SHORTEST_S, FEWEST_STEPS, LONGEST_S = 0.03, 10, 1.0
# Steps before a window: a share of it, and at least two, but no more than a second of them; one of a step that takes longer.
LEAD_SHARE, LEAST_LEAD, LEAD_S = 0.1, 2, 1.0
WARM_STEPS, WARM_S = 10, 2.0
AS_MANY_STARTS = 10
FIRST_ROUNDS, LEAST_ROUNDS, MOST_ROUNDS = 24, 4, 200
# Rounds that take longer than this are of steps that take seconds: two of them say enough.
LONG_ROUND_S, LEAST_LONG_ROUNDS = 10.0, 2
FEWEST_STARTS = 4
# What of the machine's time others may take in a window before its round is taken again: other work here, and by the hypervisor.
FOREIGN, STOLEN = 0.1, 0.03
# The system counts in clock ticks: a difference of two is nothing.
FEWEST_TICKS = 3


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How long a race may take, and what it is to find out."""

    seconds: float = 60.0
    margin: float = estimate.MARGIN
    """A difference that nobody would act on."""


class Length(msgspec.Struct, frozen=True):
    """Of a contender's windows, in steps."""

    lead: int
    steps: int


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """What a race that was stopped had come to."""

    windows: Sequence[Window] = ()
    ratios: Sequence[Ratio] = ()
    failures: Mapping[str, str] = {}
    seconds: float = 0.0


Listener = Callable[["Race"], None]


class Race:
    """Contenders, and the pairs of them that are compared: each with the first one, unless `pairs` says otherwise.

    `windows` is all that was measured. `keep` is given the windows of each round, `started` each contender of a start before its first
    round, and `changed` is called after each round. A race that was stopped goes on from what `before` says that it had come to. One that is
    `lenient` takes wrong input of a contender for its failure, and makes as many starts as a first look needs, however long they take.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        budget: Budget,
        keep: Callable[[Sequence[Window]], None] = lambda windows: None,
        changed: Listener = lambda race: None,
        seed: int = 0,
        fewest_steps: int = FEWEST_STEPS,
        pairs: Iterable[Pair] | None = None,
        started: Callable[[Contender, int], None] = lambda contender, start: None,
        before: Before | None = None,
        lenient: bool = False,
    ) -> None:
        if len(contenders) < 2:
            raise InputError("race: name two or more contenders")
        self.contenders, self.budget = list(contenders), budget
        names = [contender.name for contender in contenders]
        self.pairs = list(pairs) if pairs is not None else [(name, names[0]) for name in names[1:]]
        before = before or Before()
        self.windows: list[Window] = list(before.windows)
        self.failures: dict[str, str] = dict(before.failures)
        self.settled: dict[Pair, Ratio] = {
            (ratio.contender, ratio.baseline): ratio for ratio in before.ratios if ratio.verdict != "not settled"
        }
        """As of the look that settled it."""
        self.starts = max((window.start for window in self.windows), default=0)
        self._lenient = lenient
        self.disturbed = len({(window.start, window.round) for window in self.windows if window.disturbed})
        """Rounds that were taken again."""
        self._keep, self._changed, self._started = keep, changed, started
        self._random, self._fewest_steps = random.Random(seed), fewest_steps
        self._lengths: dict[str, Length] = {}
        self._began = time.monotonic() - before.seconds
        self._rounds = FIRST_ROUNDS
        self._start_s: list[float] = []
        self._round_s: list[float] = []

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> list[Ratio]:
        """Until it is settled, or the budget is spent."""
        while not self._over():
            self._one_start()
            if self.starts in estimate.LOOKS:
                self._look(self.windows)
            self._plan_rounds()
            self._changed(self)
        if self.starts > estimate.LOOKS[0] and self.starts not in estimate.LOOKS:
            # The time is spent: one last look, in the place of all that would have come.
            self._look(self.windows)
        return self.ratios()

    def _one_start(self) -> None:
        """Start whoever is in the race, let them take their rounds, and end them."""
        racing = self._racing()
        begun = time.monotonic()
        try:
            self._start(racing)
            self._start_s.append(time.monotonic() - begun)
            self._check_budget()
            self._go_round()
        finally:
            for contender in racing:
                contender.end()
        self.starts += 1

    def _check_budget(self) -> None:
        """Somebody who failed is a result, and says more than how long it took."""
        if self._lenient or self.windows or self.failures:
            return
        if self.elapsed > self.budget.seconds:
            raise InputError(
                f"race: the budget of {self.budget.seconds:g} s was spent before the first round, since starting took {self.elapsed:.0f} s: "
                f"give it at least {AS_MANY_STARTS * self.elapsed:.0f}s"
            )

    def ratios(self, clock: estimate.Clock = "wall") -> list[Ratio]:
        """Every pair that is settled, or of which nobody failed: as it was when it was settled, else as it is now."""
        pairs = [pair for pair in self.pairs if pair in self.settled or not self.failures.keys() & set(pair)]
        now = estimate.ratios(self.windows, pairs, self.budget.margin, clock)
        if clock != "wall":
            return now
        return [
            self.settled.get(pair, msgspec.structs.replace(ratio, verdict="not settled"))
            for pair, ratio in zip(pairs, now, strict=True)
        ]

    def _open(self) -> list[Pair]:
        """What is not settled, and can still be."""
        return [pair for pair in self.pairs if pair not in self.settled and not self.failures.keys() & set(pair)]

    def _racing(self) -> list[Contender]:
        """Whoever is in a comparison that is not settled."""
        names = {name for pair in self._open() for name in pair}
        return [contender for contender in self.contenders if contender.name in names]

    def _over(self) -> bool:
        if not self._open() or self.starts >= estimate.LOOKS[-1]:
            return True
        if self._lenient and self.starts < estimate.LOOKS[0]:
            return False
        return not self._has_time_for(self._least_rounds)

    def _has_time_for(self, rounds: int) -> bool:
        """Whether one more start would have its rounds before the time is over; the first one always has."""
        if not self._start_s:
            return True
        least = statistics.median(self._start_s) + rounds * statistics.median(self._round_s or [0.0])
        return self.elapsed + least <= self.budget.seconds

    @property
    def _least_rounds(self) -> int:
        return LEAST_LONG_ROUNDS if self._round_s and min(self._round_s) > LONG_ROUND_S else LEAST_ROUNDS

    def _start(self, racing: Sequence[Contender]) -> None:
        """All at once: most of a start is reading code, and cores would be idle otherwise. In a drawn order: who comes first finds other memory."""
        racing = self._random.sample(racing, len(racing))
        for contender in racing:
            with self._losing(contender):
                contender.start(self.starts + 1)
        for contender in racing:
            if contender.name not in self.failures:
                with self._losing(contender):
                    contender.ready()
        for contender in self._racing():
            with self._losing(contender):
                self._calibrate(contender)
                self._started(contender, self.starts + 1)

    def _calibrate(self, contender: Contender) -> None:
        """Warm up, and see how many steps make a window: by its earlier windows, where there are any.

        Steps that belong together are taken together: every window has as many exchanges as steps, also where these come every N steps.
        """
        step = contender.take(1, 1).wall
        warm = min(WARM_STEPS, round(WARM_S / step))
        if warm > 1:
            together = contender.whole_steps
            warm = multiple(warm, together)
            # With the two steps before, the lead is whole, too.
            step = contender.take(warm + -2 % together, warm).wall / warm
        seen = [window.wall / window.steps for window in self.windows if window.contender == contender.name]
        step = statistics.median(seen or [step])
        steps = max(self._fewest_steps, round(SHORTEST_S / step))
        if steps * step > LONGEST_S:
            steps = max(1, round(LONGEST_S / step))
        lead = max(1, min(LEAST_LEAD, round(LEAD_S / step)), round(LEAD_SHARE * steps))
        together = contender.whole_steps
        self._lengths[contender.name] = Length(multiple(lead, together), multiple(steps, together))

    def _go_round(self) -> None:
        """As many rounds as are planned, and another one for each that was disturbed, up to half as many again."""
        clean = number = 0
        # A start may not take so long that no look comes of it.
        until = time.monotonic() + self.budget.seconds / FEWEST_STARTS
        while clean < self._rounds and number < 1.5 * self._rounds and len(racing := self._racing()) > 1:
            begun = time.monotonic()
            if number >= self._least_rounds and (begun > until or self.elapsed > self.budget.seconds):
                break
            number += 1
            windows = self._round(racing, number)
            self._round_s.append(time.monotonic() - begun)
            if any(window.disturbed for window in windows):
                self.disturbed += 1
            else:
                clean += 1
            self.windows += windows
            self._keep(windows)
            self._changed(self)

    def _round(self, racing: Sequence[Contender], number: int) -> list[Window]:
        """One window of each, in a drawn order."""
        found = []
        for contender in self._random.sample(racing, len(racing)):
            length = self._lengths[contender.name]
            before = ticks()
            with self._losing(contender):
                taken = contender.take(length.lead, length.steps)
                found.append(self._window(contender, number, length, taken, before, ticks()))
        return found

    def _window(
        self, contender: Contender, number: int, length: Length, taken: Taken, before: Ticks, after: Ticks
    ) -> Window:
        whole = max(1, after.total - before.total)
        foreign = after.busy - before.busy - taken.used * TICKS_S
        stolen = after.stolen - before.stolen
        return Window(
            contender=contender.name,
            start=self.starts + 1,
            round=number,
            steps=length.steps,
            samples=taken.samples,
            wall=taken.wall,
            cpu=taken.cpu,
            foreign=max(0.0, foreign / whole),
            stolen=stolen / whole,
            disturbed=(foreign >= FEWEST_TICKS and foreign > FOREIGN * whole) or stolen > STOLEN * whole,
            spent=None
            if taken.waited is None
            else Spent(used=taken.used, waited=taken.waited, others=foreign / TICKS_S, stolen=stolen / TICKS_S),
            phases=taken.phases,
        )

    @contextmanager
    def _losing(self, contender: Contender) -> Iterator[None]:
        """A contender that fails is out, and the others go on, undisturbed by what is left of it."""
        try:
            yield
        except (ContenderFailed, InputError) as error:
            if isinstance(error, InputError) and not self._lenient:
                raise
            self.failures[contender.name] = str(error)
            contender.end()

    def _look(self, windows: Sequence[Window]) -> None:
        """Whether anything is settled. Only after certain starts: each look may err."""
        open_ = self._open()
        # Those that are settled stay in the family.
        everyone = [*open_, *self.settled]
        for pair, ratio in zip(everyone, estimate.ratios(windows, everyone, self.budget.margin), strict=True):
            if pair in open_ and ratio.verdict != "not settled":
                self.settled[pair] = ratio

    def _plan_rounds(self) -> None:
        if not self._round_s:
            return
        best = estimate.best_rounds(
            self.windows, self._open(), statistics.median(self._start_s), statistics.median(self._round_s)
        )
        if best is not None:
            self._rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, best))
