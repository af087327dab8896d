"""The search: every choice is changed by itself around the best way so far, what helps is put together, and again, until nothing helps.

So what it would have cost to choose otherwise is measured too, around the way that was chosen in the end.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from lockstep import models
from lockstep.errors import InputError, RunFailed
from lockstep.launch import specify
from lockstep.launch.emulated.link import parse_link
from lockstep.machine.cores import cores
from lockstep.placement import Ddp, Placement, changes_mathematics
from lockstep.predict.exchange import least_seconds
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.run import Options
from lockstep.tune.choices import Change, Way, changes, written
from lockstep.tune.found import Found, Otherwise
from lockstep.turns import Budget, Ranks
from lockstep.turns.folder import Entry, RaceFolder, opening, state_of
from lockstep.turns.knockout import Knockout, Standing
from lockstep.turns.ranks import memory_problem
from lockstep.units import counted, duration

Cost = Literal["seconds", "core-seconds"]
MARGIN = 0.02
MOST_STAGES = 4
# Of a change that cost this much around an earlier way, nobody needs to know what it costs around the next one.
HOPELESS = 1.15
# Ways within this of the best are as good.
AS_GOOD = 1 + MARGIN
# A stage with less time than this would start its contenders and not race them.
LEAST_STAGE_S = 15.0


@dataclass
class Search:
    """`stated`: keys that the user has chosen, and that stay as they are; `allow`: what may change numbers."""

    recipe: Recipe
    placement: Placement
    stated: Collection[str]
    budget_s: float
    cost: Cost = "seconds"
    allow: Sequence[str] = ()
    runs: Path | None = None
    data_root: str | None = None
    tell: Callable[[str], None] = lambda text: None
    changed: Callable[[Knockout], None] = lambda race: None

    def __post_init__(self) -> None:
        self._begin = time.monotonic()
        # Of several hosts the question is whether they pay: so what was said about them may change.
        about_hosts = {"hosts", "emulated", "ranks", "link", "rendezvous"} if self.placement.hosts > 1 else set()
        self._kept = set(self.stated) - about_hosts
        # Whoever pays by the core may want fewer of them.
        most = cores()
        fewer = [2**power for power in range(most.bit_length()) if 2**power < most]
        self._cores = [most] if self.cost == "seconds" else [*fewer, most]
        self._first = self._center = _first_way(self.recipe, self.placement)
        self._winner = self._first
        self._winner_s = math.inf
        """Seconds of its step."""
        self._default: Standing | None = Standing("", 1.0, 1.0, 1.0, 0)
        """What would have run without tuning, beside the winner; None if it does not run."""
        self._tried: dict[str, Otherwise] = {}
        """By their words: changes of one factor, as they were measured last."""
        self._unfit: dict[str, Otherwise] = {}
        self._races: list[str] = []

    @property
    def _left(self) -> float:
        return self.budget_s - (time.monotonic() - self._begin)

    def run(self) -> Found:
        self._specify(self._first)  # what is wrong with the words is wrong with every way
        for stage in range(1, MOST_STAGES + 1):
            contenders = self._contenders()
            if len(contenders) < 2 or (stage > 1 and self._left < LEAST_STAGE_S):
                break
            if not self._race(stage, contenders):
                break
        taken = time.monotonic() - self._begin
        return Found(
            words=self._winner.words(),
            recipe=self._winner.recipe,
            placement=self._winner.placement,
            step_seconds=self._winner_s,
            images_per_second=self._winner.recipe.global_batch / self._winner_s,
            default=" ".join(self._first.words()),
            default_ratio=self._default.ratio if self._default else None,
            default_low=self._default.low if self._default else None,
            default_high=self._default.high if self._default else None,
            one_host=self._winner.placement.hosts == 1 < self._first.placement.hosts,
            otherwise=[*sorted(self._tried.values(), key=lambda one: -(one.ratio or 0)), *self._unfit.values()],
            races=self._races,
            seconds=taken,
        )

    def _contenders(self) -> dict[str, tuple[Change, Way]]:
        """By their words: the center of this stage, the winner so far, and every change of one factor around the center."""
        found = {_name(self._center): (_NOTHING, self._center)}
        for other in (
            self._winner,
            self._first,
        ):  # what came before stays in the race, so that a gain is measured and not multiplied
            found.setdefault(_name(other), (_NOTHING, other))
        for factor, keys in changes(self._center, self._cores, self._kept, self.allow, self._left):
            way, words = self._center.with_(keys), _written(keys)
            known = self._tried.get(words)
            hopeless = known is not None and known.low is not None and known.low > HOPELESS
            if hopeless or words in self._unfit or _name(way) in found:
                continue
            if reason := self._problem(way):
                self._unfit[words] = Otherwise(factor=factor, words=words, reason=reason)
            else:
                found[_name(way)] = ((factor, keys), way)
        while len(found) > 2 and memory_problem(way.placement for _, way in found.values()):
            (factor, keys), _ = found.pop(list(found)[-1])
            words = _written(keys)
            self._unfit[words] = Otherwise(factor=factor, words=words, reason="no room in memory beside the others")
        return found

    def _problem(self, way: Way) -> str:
        """Why a way need not be started: it cannot be, or it cannot win."""
        try:
            self._specify(way)
        except InputError as error:
            return str(error)
        other = changes_mathematics(way.placement, way.recipe)
        if other and other != changes_mathematics(self._first.placement, self._first.recipe):
            return f"it changes the mathematics: {other}"
        link = parse_link(way.placement.link)
        size = models.trained_size(way.recipe) if way.placement.hosts > 1 else None
        least = least_seconds(float(size[1]), way.placement.hosts, link) if size else 0.0
        if least > HOPELESS * self._winner_s:
            return f"the link alone takes {duration(least)} for the gradients of a step, and a whole step can take {duration(self._winner_s)}"
        return ""

    def _specify(self, way: Way) -> None:
        specify(way.recipe, way.placement, Options(save_model=False, data_root=self.data_root), self.runs)

    def _race(self, stage: int, contenders: dict[str, tuple[Change, Way]]) -> bool:
        """One stage; returns whether another one may find something better."""
        seconds = self._left / (2 if stage < MOST_STAGES else 1)
        folder = RaceFolder.create(self.runs, None)
        self._races.append(str(folder.path))
        entries = [
            Entry(name=name, recipe=way.recipe, placement=way.placement) for name, (_, way) in contenders.items()
        ]
        record = opening(entries, "", Budget(seconds=max(1.0, seconds), margin=MARGIN))
        folder.write(record)
        self.tell(f"stage {stage}: {counted(len(contenders), 'way')}, around {_name(self._center)}")
        options = Options(data_root=self.data_root)
        racing = [
            Ranks(entry.name, entry.recipe, entry.placement, folder.starts / str(number), options)
            for number, entry in enumerate(entries, 1)
        ]
        weights = {name: float(way.cores) for name, (_, way) in contenders.items()}
        race = Knockout(racing, record.budget, folder.keep, self.changed, weights if self.cost != "seconds" else None)
        over = False
        try:
            race.run()
            over = True
        finally:
            folder.write(state_of(race, record, over))
        return self._judge(race, contenders)

    def _judge(self, race: Knockout, contenders: dict[str, tuple[Change, Way]]) -> bool:
        for name, reason in race.failures.items():
            (factor, keys), _ = contenders[name]
            words = _written(keys) or name
            self._unfit[words] = Otherwise(factor=factor, words=words, reason=reason)
        standings = race.standings()
        if not standings:
            raise RunFailed(f"tune: nothing could be started: {next(iter(race.failures.values()), 'no time for it')}")
        center, default = _name(self._center), _name(self._first)
        own = {each.name: each for each in standings}
        # Of ways that are as good, the one is taken that changes less.
        best = next(name for name in (default, center, standings[0].name) if name in own and own[name].ratio < AS_GOOD)
        if default in own:
            self._default = race.compare(default, best)
        elif default in race.failures:
            self._default = None
        walls = [w.wall / w.steps for w in race.windows if w.contender == best]
        self._winner, self._winner_s = contenders[best][1], statistics.median(walls)
        if center not in own:
            self._center = self._winner
            return True
        helpful: dict[str, tuple[float, Change]] = {}
        for each in standings:
            change, _ = contenders[each.name]
            if change is _NOTHING:
                continue
            beside = race.compare(each.name, center)
            self._note(change, beside, "" if best == center else center)
            # What is put together must surely help: of several changes that do nothing, one always looks as if it did.
            if beside.high < 1 and beside.ratio < helpful.get(change[0], (1.0, change))[0]:
                helpful[change[0]] = (beside.ratio, change)
        # What takes ranks or hosts away comes first: it says what a backend or a bucket can still do.
        together = self._center
        for _, (_, keys) in sorted(helpful.values(), key=lambda one: one[1][0] not in ("hosts", "ranks")):
            together = together.with_(keys)
        self._center = self._winner if not helpful or self._problem(together) else together
        return _name(self._center) != center

    def _note(self, change: Change, found: Standing, around: str) -> None:
        factor, keys = change
        words = _written(keys)
        self._tried[words] = Otherwise(
            factor=factor, words=words, ratio=found.ratio, low=found.low, high=found.high, around=around
        )


_NOTHING: Change = ("", {})


def _first_way(recipe: Recipe, placement: Placement) -> Way:
    """What a run of these words would be. Only what is chosen here is decided already: a launcher follows from ranks and backend."""
    decided = resolve(recipe, placement)
    return Way(
        msgspec.structs.replace(recipe, global_batch=decided.recipe.global_batch, batch_per_rank=None),
        msgspec.structs.replace(
            placement,
            threads=decided.placement.threads,
            memory_format=decided.placement.memory_format,
            backend=decided.placement.backend if placement.ranks > 1 else placement.backend,
            strategy=decided.placement.strategy if placement.ranks > 1 else placement.strategy,
        ),
    )


def _name(way: Way) -> str:
    return " ".join(way.words())


def _written(keys: Mapping[str, Any]) -> str:
    """What a change is called: without what merely follows from it."""
    told = [(key, value) for key, value in keys.items() if value not in (None, False, "auto", Ddp().bucket_mb)]
    return " ".join(f"{key}={'none' if value is None else written(value)}" for key, value in told or keys.items())
