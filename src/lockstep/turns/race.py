"""A race: starts of all contenders, rounds of windows in a drawn order, until it is settled or the budget is spent."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from lockstep.errors import InputError
from lockstep.machine.cpu import Ticks, ticks
from lockstep.turns import estimate
from lockstep.turns.contender import Contender, ContenderFailed, Taken
from lockstep.turns.estimate import Ratio, Window

# The least length of a window in seconds and in steps; where these steps take longer than LONGEST_S, it has fewer.
# Short ones are best: the noise of a ratio hardly depends on their length, and many fit into the same time (docs/race.md).
SHORTEST_S, FEWEST_STEPS, LONGEST_S = 0.03, 10, 1.0
LEAD_SHARE, LEAST_LEAD = 0.1, 2
WARM_STEPS = 10
FIRST_ROUNDS, LEAST_ROUNDS, MOST_ROUNDS = 24, 4, 200
# What of the machine's time others may take in a window before its round is taken again: other work here, and by the hypervisor.
FOREIGN, STOLEN = 0.1, 0.03
# The system counts in clock ticks: a difference of two is nothing.
FEWEST_TICKS = 3
TICKS_S = os.sysconf("SC_CLK_TCK")


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How long a race may take, and what it is to find out."""

    seconds: float = 60.0
    margin: float = estimate.MARGIN
    """A difference that nobody would act on."""


class Length(msgspec.Struct, frozen=True):
    """Of a contender's windows, in steps."""

    lead: int
    steps: int


Listener = Callable[["Race"], None]


class Race:
    """Contenders against the first of them. `windows` is all that was measured; `changed` is called after each round."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        budget: Budget,
        keep: Callable[[Sequence[Window]], None] = lambda windows: None,
        changed: Listener = lambda race: None,
        seed: int = 0,
        fewest_steps: int = FEWEST_STEPS,
    ) -> None:
        if len(contenders) < 2:
            raise InputError("race: name two or more contenders")
        self.contenders, self.budget = list(contenders), budget
        self.windows: list[Window] = []
        self.failures: dict[str, str] = {}
        self.settled: dict[str, Ratio] = {}
        """As of the look that settled it."""
        self.starts = 0
        self.disturbed = 0
        """Rounds that were taken again."""
        self._keep, self._changed = keep, changed
        self._random, self._fewest_steps = random.Random(seed), fewest_steps
        self._lengths: dict[str, Length] = {}
        self._began = time.monotonic()
        self._rounds = FIRST_ROUNDS
        self._start_s: list[float] = []
        self._round_s: list[float] = []

    @property
    def baseline(self) -> Contender:
        return self.contenders[0]

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> list[Ratio]:
        """Until it is settled, or the budget is spent."""
        while not self._over():
            racing = self._racing()
            begun = time.monotonic()
            try:
                self._start(racing)
                self._start_s.append(time.monotonic() - begun)
                if not self.windows and self.elapsed > self.budget.seconds:
                    raise InputError(
                        f"race: the budget of {self.budget.seconds:g} s was spent before the first round, since starting took {self.elapsed:.0f} s: "
                        f"give it at least {10 * self.elapsed:.0f}s"
                    )
                self._go_round()
            finally:
                for contender in racing:
                    contender.end()
            self.starts += 1
            self._look()
            self._plan_rounds()
            self._changed(self)
        return self.ratios()

    def ratios(self, clock: estimate.Clock = "wall") -> list[Ratio]:
        """Every contender that did not fail, against the baseline: as it was when it was settled, else as it is now."""
        names = [contender.name for contender in self.contenders[1:] if contender.name not in self.failures]
        now = estimate.ratios(self.windows, names, self.baseline.name, self.budget.margin, clock)
        if clock != "wall":
            return now
        return [
            self.settled.get(ratio.contender, msgspec.structs.replace(ratio, verdict="not settled")) for ratio in now
        ]

    def _racing(self) -> list[Contender]:
        """The baseline, and whoever is neither out nor settled."""
        return [
            contender
            for contender in self.contenders
            if contender.name not in self.failures and contender.name not in self.settled
        ]

    def _over(self) -> bool:
        if len(self._racing()) < 2 or self.baseline.name in self.failures or self.starts >= estimate.LOOKS[-1]:
            return True
        if not self.starts:
            return False
        # A start that could not have its rounds before the time is over is not begun.
        least = statistics.median(self._start_s) + LEAST_ROUNDS * statistics.median(self._round_s or [0.0])
        return self.elapsed + least > self.budget.seconds

    def _start(self, racing: Sequence[Contender]) -> None:
        """All at once: most of a start is reading code, and cores would be idle otherwise."""
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

    def _calibrate(self, contender: Contender) -> None:
        """Warm up, and see how many steps make a window: by its earlier windows, where there are any."""
        taken = contender.take(WARM_STEPS, WARM_STEPS)
        seen = [window.wall / window.steps for window in self.windows if window.contender == contender.name]
        step = statistics.median(seen or [taken.wall / WARM_STEPS])
        steps = max(self._fewest_steps, round(SHORTEST_S / step))
        if steps * step > LONGEST_S:
            steps = max(1, round(LONGEST_S / step))
        self._lengths[contender.name] = Length(max(LEAST_LEAD, round(LEAD_SHARE * steps)), steps)

    def _go_round(self) -> None:
        """As many rounds as are planned, and another one for each that was disturbed, up to half as many again."""
        clean = number = 0
        while clean < self._rounds and number < 1.5 * self._rounds and len(racing := self._racing()) > 1:
            if number >= LEAST_ROUNDS and self.elapsed > self.budget.seconds:
                break
            begun = time.monotonic()
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
            phases=taken.phases,
        )

    @contextmanager
    def _losing(self, contender: Contender) -> Iterator[None]:
        """A contender that fails is out, and the others go on."""
        try:
            yield
        except ContenderFailed as error:
            self.failures[contender.name] = str(error)

    def _look(self) -> None:
        """Whether anything is settled. Only after certain starts: each look may err."""
        if self.starts not in estimate.LOOKS:
            return
        names = [contender.name for contender in self._racing()[1:]]
        # Those that are settled stay in the family.
        everyone = [*names, *self.settled]
        for ratio in estimate.ratios(self.windows, everyone, self.baseline.name, self.budget.margin):
            if ratio.contender in names and ratio.verdict != "not settled":
                self.settled[ratio.contender] = ratio

    def _plan_rounds(self) -> None:
        if not self._round_s:
            return
        names = [self.baseline.name, *(contender.name for contender in self._racing()[1:])]
        best = estimate.best_rounds(
            self.windows, names, statistics.median(self._start_s), statistics.median(self._round_s)
        )
        if best is not None:
            self._rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, best))
