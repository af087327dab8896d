"""Turns: what is compared, when it is settled, and how often that is wrong; contenders that are made up, so that the truth is known."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from lockstep.errors import InputError
from lockstep.lines import Desk
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.run import DESK, Options, Run
from lockstep.turns import Before, Budget, ContenderFailed, Race, Ranks, Taken, estimate
from lockstep.turns.entries import contender, entries
from lockstep.turns.estimate import LEVEL, LOOKS, Window, middle_mean, ratios

Floats = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def window(contender: str, wall: float, start: int = 1, round: int = 1, **more: object) -> Window:
    return Window(contender=contender, start=start, round=round, steps=10, samples=80, wall=wall, cpu=wall, **more)  # type: ignore[arg-type]


# --- what is compared ---------------------------------------------------------------------------------------------------


def test_the_middle_half_does_not_see_what_a_quarter_of_the_rounds_did() -> None:
    assert middle_mean([1.0, 1.1, 0.9, 1.0, 1.0, 50.0, 60.0, -70.0]) == pytest.approx(1.025)
    assert middle_mean([3.0]) == 3.0


def test_only_windows_of_one_round_are_compared() -> None:
    """The machine was three times slower in the second round, for both; the third has no partner."""
    windows = [
        window("a", 1.0),
        window("b", 1.1),
        window("b", 3.3, round=2),
        window("a", 3.0, round=2),
        window("a", 9.0, round=3),
    ]
    assert estimate.by_start(windows, "b", "a") == [[pytest.approx(math.log(1.1))] * 2]


def test_a_disturbed_round_counts_only_where_there_are_too_few_others() -> None:
    clean = [window(name, wall, round=r) for r in range(1, 4) for name, wall in (("a", 1.0), ("b", 1.1))]
    spoilt = [window("a", 1.0, round=9), window("b", 7.0, round=9, disturbed=True)]
    assert [len(rounds) for rounds in estimate.by_start(clean + spoilt, "b", "a")] == [3]
    assert [len(rounds) for rounds in estimate.by_start(clean[:4] + spoilt, "b", "a")] == [3]


def test_samples_are_compared_not_steps() -> None:
    """A step over twice the samples that takes twice as long is as fast."""
    small = [
        Window(contender="a", start=s, round=1, steps=10, samples=80, wall=1.0 + s / 1e4, cpu=1.0) for s in range(4)
    ]
    large = [Window(contender="b", start=s, round=1, steps=5, samples=160, wall=2.0, cpu=1.0) for s in range(4)]
    (found,) = ratios(small + large, [("b", "a")])
    assert found.verdict == "the same"
    assert found.effect == pytest.approx(1.0, abs=1e-3)


# --- how often it is wrong ----------------------------------------------------------------------------------------------


class Noise:
    """Starts that differ for their whole life, and rounds with heavy tails."""

    def __init__(self, seed: int, start: float = 0.01, round: float = 0.02) -> None:
        self._random, self._start, self._round = random.Random(seed), start, round

    def starts(self, shifts: list[float], rounds: int = 8) -> Iterator[list[Window]]:
        """The windows of one start after the other; contender 0 is the baseline."""
        for start in range(1, LOOKS[-1] + 1):
            lives = [shift + self._random.gauss(0, self._start) for shift in (0.0, *shifts)]
            yield [
                window(str(name), math.exp(life + self._heavy()), start, number)
                for number in range(rounds)
                for name, life in enumerate(lives)
            ]

    def _heavy(self) -> float:
        return self._round * self._random.gauss(0, 1) / math.sqrt(self._random.gammavariate(1.5, 1 / 1.5))


def settled(noise: Noise, shifts: list[float], margin: float = estimate.MARGIN) -> dict[str, tuple[str, int]]:
    """By contender: what a race would have said, and after how many starts."""
    windows: list[Window] = []
    found: dict[str, tuple[str, int]] = {}
    names = [str(number) for number in range(1, len(shifts) + 1)]
    for count, more in enumerate(noise.starts(shifts), 1):
        windows += more
        if count not in LOOKS:
            continue
        for ratio in ratios(windows, [(name, "0") for name in names], margin):
            if ratio.verdict != "not settled":
                found.setdefault(ratio.contender, (ratio.verdict, count))
        if len(found) == len(names):
            break
    return found


def test_what_is_the_same_is_called_the_same_and_three_percent_are_found() -> None:
    same = [settled(Noise(seed), [0.0])["1"] for seed in range(100)]
    other = [settled(Noise(seed), [0.03])["1"] for seed in range(100)]
    assert sum(verdict in ("faster", "slower") for verdict, _ in same) <= 5
    assert sum(verdict == "the same" for verdict, _ in same) >= 90
    assert sum(verdict == "slower" for verdict, _ in other) >= 95
    assert fmean(count for _, count in other) < 10


@pytest.mark.slow
def test_looking_again_and_again_keeps_the_error_of_a_race_and_of_a_family() -> None:
    """Without a margin nothing is ever the same, so a race looks to its very end: the most chances to be wrong."""
    alone = [settled(Noise(seed), [0.0], margin=1e-9) for seed in range(400)]
    assert sum(bool(found) for found in alone) <= most_wrong(400)
    draw = np.random.default_rng(1)
    lives = draw.normal(0, 0.01, (FAMILIES, LOOKS[-1], 21, 1))
    # Student's t of three degrees of freedom, as above.
    rounds = lives + 0.02 * draw.standard_t(3, (FAMILIES, LOOKS[-1], 21, 8))
    assert wrong_families(middle_means(rounds[:, :, 1:] - rounds[:, :, :1])) <= most_wrong(FAMILIES)


FAMILIES, FAMILIES_OF_MACHINES = 400, 4000


def most_wrong(trials: int) -> float:
    """Five in a hundred, and what chance adds to that in one of a hundred tests."""
    return 0.05 * trials + 2.33 * math.sqrt(0.05 * 0.95 * trials)


def middle_means(rounds: Floats) -> Floats:
    """`middle_mean` along the last axis."""
    cut = rounds.shape[-1] // 4
    found: Floats = np.sort(rounds, axis=-1)[..., cut : rounds.shape[-1] - cut].mean(axis=-1)
    return found


def looked_at(shifts: Floats) -> tuple[BoolArray, BoolArray]:
    """`ratios` for whole families at once: who is the same, and who differs, by family and pair, from the shifts of each start."""
    count, pairs = shifts.shape[1:]
    means = np.abs(shifts.mean(axis=1))
    errors = shifts.std(axis=1, ddof=1) / math.sqrt(count)
    with np.errstate(divide="ignore"):  # one start may be drawn each time
        p = 2 * stdtr(count - 1, -means / errors)
    order = np.argsort(p, axis=1, kind="stable")
    levels = np.empty_like(p)
    level, failed = np.full(len(p), LEVEL), np.zeros(len(p), bool)
    family = np.arange(len(p))
    for position in range(pairs):
        level = np.where(failed, level, LEVEL / (pairs - position))
        failed |= p[family, order[:, position]] > level
        levels[family, order[:, position]] = level
    same = means - stdtrit(count - 1, levels) * errors <= math.log1p(estimate.MARGIN)
    return same, ~same & (means > -stdtrit(count - 1, levels / 2) * errors)


def wrong_families(shifts: Floats) -> int:
    """Families in which a look said of any pair that it differs, before one said that it is the same."""
    wrong, decided = np.zeros(len(shifts), bool), np.zeros((len(shifts), shifts.shape[2]), bool)
    for count in LOOKS:
        same, differs = looked_at(shifts[:, :count])
        wrong |= (differs & ~decided).any(axis=1)
        decided |= same | differs
    return int(wrong.sum())


def test_whole_families_are_judged_as_ratios_judges_them() -> None:
    draw = np.random.default_rng(2)
    shifts = draw.normal(np.linspace(-0.02, 0.03, 6), 0.004, (5, 6, 6))
    same, differs = looked_at(shifts)
    for family in range(5):
        windows = [window("base", 1.0, start, number) for start in range(6) for number in range(4)]
        windows += [
            window(str(pair), math.exp(shifts[family, start, pair]), start, number)
            for pair, start, number in itertools.product(range(6), range(6), range(4))
        ]
        found = [ratio.verdict for ratio in ratios(windows, [(str(pair), "base") for pair in range(6)])]
        assert [verdict == "the same" for verdict in found] == same[family].tolist()
        assert [verdict in ("faster", "slower") for verdict in found] == differs[family].tolist()
    assert same.any()
    assert differs.any()
    assert not (same | differs).all()


def recorded() -> list[list[list[float]]]:
    """What is in tests/noise, with starts as far apart as they were: in the file they are less their own mean, of which three of them lie nearer
    than they lie to the truth."""
    found = []
    for file in sorted((Path(__file__).parent / "noise").glob("*.json")):
        content = json.loads(file.read_text())
        for pair in content["pairs"]:
            wider = 0.0 if content.get("starts_as_far_apart") else math.sqrt(len(pair) / (len(pair) - 1)) - 1
            found.append([[value + wider * middle_mean(rounds) for value in rounds] for rounds in pair])
    return found


class Recorded(Noise):
    """What real machines did to real races (benchmarks/noise.py): each start of each contender is one that was measured somewhere."""

    PAIRS: ClassVar = recorded()

    def starts(self, shifts: list[float], rounds: int = 20) -> Iterator[list[Window]]:
        for start in range(1, LOOKS[-1] + 1):
            found = [window("0", 1.0, start, number) for number in range(rounds)]
            for name, shift in enumerate(shifts, 1):
                measured = self._random.choice(self._random.choice(self.PAIRS))
                first = self._random.randrange(len(measured) - rounds + 1)
                found += [
                    window(str(name), math.exp(shift + measured[first + number]), start, number)
                    for number in range(rounds)
                ]
            yield found


def test_on_the_noise_of_real_machines_the_same_is_the_same_and_three_percent_are_found() -> None:
    assert len(Recorded.PAIRS) >= 10
    same = [settled(Recorded(seed), [0.0]).get("1", ("open", 0)) for seed in range(100)]
    other = [settled(Recorded(seed), [0.03]).get("1", ("open", 0)) for seed in range(100)]
    assert sum(verdict in ("faster", "slower") for verdict, _ in same) <= 8
    assert sum(verdict == "the same" for verdict, _ in same) >= 90
    assert sum(verdict == "slower" for verdict, _ in other) >= 95


def test_on_the_noise_of_real_machines_families_keep_their_error() -> None:
    """Twenty comparisons in which nothing differs: a false verdict among them in at most 5 % of families."""
    draw, rounds = np.random.default_rng(1), 20
    # The middle of every part of a start that is long enough, one start after the other.
    parts = [middle_means(sliding_window_view(np.array(start), rounds)) for pair in Recorded.PAIRS for start in pair]
    many = np.array([len(each) for each in parts])
    starts = np.array([len(pair) for pair in Recorded.PAIRS])
    # As Recorded draws: a pair, one of its starts, a part of that.
    drawn = draw.random((3, FAMILIES_OF_MACHINES, LOOKS[-1], 20))
    pair = (drawn[0] * len(starts)).astype(int)
    start = (np.cumsum(starts) - starts)[pair] + (drawn[1] * starts[pair]).astype(int)
    part = (np.cumsum(many) - many)[start] + (drawn[2] * many[start]).astype(int)
    shifts = np.concatenate(parts)[part]
    wrong = wrong_families(shifts)
    assert wrong <= most_wrong(FAMILIES_OF_MACHINES), wrong


# --- the race itself ----------------------------------------------------------------------------------------------------


class MadeUp:
    """A contender that does nothing, and says how long that took."""

    whole_steps = 1

    def __init__(self, name: str, step: float, fails: Callable[[int, int], bool] = lambda start, window: False) -> None:
        self.name, self._step, self._fails = name, step, fails
        self.begun = self.ended = self.taken = 0
        self.alive = False

    def start(self, number: int) -> None:
        self.begun, self.alive, self.taken = number, True, 0

    def ready(self) -> None:
        assert self.alive

    def take(self, lead: int, steps: int) -> Taken:
        assert self.alive
        assert lead > 0
        self.taken += 1
        if self._fails(self.begun, self.taken):
            raise ContenderFailed("rank 0 was killed by SIGKILL")
        jitter = 1 + 0.001 * ((7 * self.begun + 3 * self.taken) % 5 - 2)
        return Taken(samples=8 * steps, wall=self._step * steps * jitter, cpu=self._step * steps)

    def end(self) -> None:
        self.ended, self.alive = self.ended + 1, False


def test_a_race_ends_when_all_is_settled_and_starts_nobody_who_is() -> None:
    first, slower, close = MadeUp("first", 1e-3), MadeUp("slower", 2e-3), MadeUp("close", 1.012e-3)
    race = Race([first, slower, close], Budget(seconds=60))
    found = {ratio.contender: ratio for ratio in race.run()}
    assert found["slower"].verdict == "slower"
    assert found["slower"].effect == pytest.approx(2, rel=0.01)
    assert found["close"].verdict in ("the same", "slower")
    assert slower.begun == LOOKS[0]
    assert first.begun == race.starts == max(close.begun, slower.begun)
    assert not any(each.alive for each in (first, slower, close))
    assert {window.steps for window in race.windows if window.contender == "first"} == {30}, "0.03 s"


class Averaging(MadeUp):
    """Every N steps it exchanges, which takes as long as some steps do."""

    def __init__(self, name: str, step: float, every: int, exchange: float) -> None:
        super().__init__(name, step)
        self.whole_steps, self._exchange = every, exchange
        self._steps = 0

    def take(self, lead: int, steps: int) -> Taken:
        first, self._steps = self._steps + lead, self._steps + lead + steps
        exchanges = self._steps // self.whole_steps - first // self.whole_steps
        taken = super().take(lead, steps)
        return dataclasses.replace(taken, wall=taken.wall + exchanges * self._exchange)


@pytest.mark.parametrize("step", [0.5e-3, 3e-3, 0.2, 2.0])
@pytest.mark.parametrize("every", [3, 8, 32])
def test_an_exchange_every_n_steps_counts_for_all_of_them(every: int, step: float) -> None:
    """What is trimmed are whole groups of steps. Of windows that are shorter, most had no exchange, and the others were cut off."""
    flat = MadeUp("flat", 1.5 * step)
    averaging = Averaging("averaging", step, every, exchange=10 * step)
    race = Race([flat, averaging], Budget(seconds=60))
    (found,) = race.run()
    truth = (every * step + 10 * step) / (every * 1.5 * step)
    assert found.effect == pytest.approx(truth, rel=0.005)
    mine = [window for window in race.windows if window.contender == "averaging"]
    assert all(window.steps % every == 0 for window in mine)


def test_when_the_time_is_spent_there_is_a_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five starts are no time for a look; the race has no more time, and the numbers are clear."""
    monkeypatch.setattr(estimate, "LOOKS", (3, 64))
    race = Race([MadeUp("a", 1e-3), Unsteady("b", 1.03e-3)], Budget(seconds=60))
    monkeypatch.setattr(race, "_over", lambda: race.starts == 9)
    assert [ratio.verdict for ratio in race.run()] == ["slower"]
    assert race.settled["b", "a"].n == 9


def test_windows_of_long_steps_are_short_in_steps() -> None:
    race = Race([MadeUp("a", 0.2), MadeUp("b", 0.3)], Budget(seconds=60))
    race.run()
    assert {(window.contender, window.steps) for window in race.windows} == {("a", 5), ("b", 3)}


def test_a_contender_that_fails_is_a_result_and_the_others_go_on() -> None:
    fails = MadeUp("fails", 1e-3, lambda start, taken: start == 2 and taken == 4)
    race = Race([MadeUp("first", 1e-3), fails, MadeUp("slower", 2e-3)], Budget(seconds=60))
    found = {ratio.contender: ratio.verdict for ratio in race.run()}
    assert found == {"slower": "slower"}
    assert race.failures == {"fails": "rank 0 was killed by SIGKILL"}
    assert fails.ended >= 2


def test_what_was_settled_stays_so_if_one_of_the_two_fails_later() -> None:
    slower = MadeUp("slower", 2e-3)
    first = MadeUp("first", 1e-3, lambda start, taken: start == 5)
    race = Race([first, slower, Unsteady("close", 1.03e-3)], Budget(seconds=60))
    found = {ratio.contender: ratio.verdict for ratio in race.run()}
    assert list(race.failures) == ["first"]
    assert found == {"slower": "slower"}


def test_a_lenient_race_takes_wrong_input_for_a_failure_and_the_time_that_it_needs() -> None:
    class Wrong(MadeUp):
        def start(self, number: int) -> None:
            raise InputError("no network namespaces here")

    contenders = [MadeUp("a", 1e-3), Wrong("wrong", 1e-3), MadeUp("b", 2e-3)]
    with pytest.raises(InputError, match="no network"):
        Race(contenders, Budget(seconds=60)).run()
    race = Race(contenders, Budget(seconds=1e-6), lenient=True)
    assert [ratio.verdict for ratio in race.run()] == ["slower"]
    assert race.failures == {"wrong": "no network namespaces here"}
    assert race.starts == LOOKS[0]


def test_steps_of_seconds_have_few_rounds_and_a_short_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of six seconds: nine windows say what there is to say, and no step is spent twice on warming up."""
    now, asked = 0.0, []

    class Slow(MadeUp):
        def take(self, lead: int, steps: int) -> Taken:
            nonlocal now
            taken = super().take(lead, steps)
            now += self._step * (lead + steps)
            asked.append((self.name, lead, steps))
            return taken

    monkeypatch.setattr("lockstep.turns.race.time.monotonic", lambda: now)
    race = Race([Slow("fp32", 0.3), Slow("fp16", 6.0)], Budget(seconds=120), lenient=True)
    assert [ratio.verdict for ratio in race.run()] == ["slower"]
    assert set(asked) == {("fp32", 1, 1), ("fp32", 7, 7), ("fp32", 2, 3), ("fp16", 1, 1)}
    assert race.starts == LOOKS[0]
    assert now < 180


def test_without_a_baseline_there_is_no_race() -> None:
    race = Race([MadeUp("first", 1e-3, lambda start, taken: True), MadeUp("other", 1e-3)], Budget(seconds=60))
    assert race.run() == []
    assert list(race.failures) == ["first"]
    assert race.starts == 1


class Unsteady(MadeUp):
    """Every start is a little faster or slower than the others."""

    def start(self, number: int) -> None:
        super().start(number)
        self._step = 1.03e-3 * (1 + 0.01 * ((5 * number) % 7 - 3))


def test_a_race_that_was_stopped_goes_on_and_decides_as_if_it_had_not_been() -> None:
    def contenders() -> list[MadeUp]:
        return [MadeUp("first", 1e-3), MadeUp("slower", 2e-3), Unsteady("close", 1.03e-3)]

    whole = Race(contenders(), Budget(seconds=60))
    whole.run()
    assert whole.starts > 3
    before = [window for window in whole.windows if window.start <= 3]
    early = [ratio for ratio in whole.settled.values() if ratio.n == 3]
    resumed = Race(contenders(), Budget(seconds=60), before=Before(windows=before, ratios=early, seconds=5))
    assert resumed.starts == 3
    assert list(resumed.settled.values()) == early != []
    assert resumed.elapsed > 5
    resumed.run()
    assert [ratio.verdict for ratio in resumed.ratios()] == [ratio.verdict for ratio in whole.ratios()]


def test_any_pairs_can_be_asked_for_and_who_is_in_none_does_not_race() -> None:
    names = {"a": 1e-3, "b": 1.5e-3, "c": 2e-3, "d": 3e-3}
    contenders = [MadeUp(name, step) for name, step in names.items()]
    race = Race(contenders, Budget(seconds=60), pairs=[("b", "a"), ("c", "b")])
    found = {(ratio.contender, ratio.baseline): ratio for ratio in race.run()}
    assert {pair: ratio.verdict for pair, ratio in found.items()} == {("b", "a"): "slower", ("c", "b"): "slower"}
    assert found["c", "b"].effect == pytest.approx(2 / 1.5, rel=0.01)
    assert contenders[3].begun == 0


def test_a_start_of_long_windows_leaves_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a second each: 24 rounds in the first start would spend the whole budget, and one start says nothing."""
    now = 0.0

    class Slow(MadeUp):
        def take(self, lead: int, steps: int) -> Taken:
            nonlocal now
            taken = super().take(lead, steps)
            now += 1.0
            return taken

    monkeypatch.setattr("lockstep.turns.race.time.monotonic", lambda: now)
    race = Race([Slow("a", 0.2), Slow("b", 0.3)], Budget(seconds=60))
    assert [ratio.verdict for ratio in race.run()] == ["slower"]
    assert race.starts >= 3


def test_whatever_happens_all_are_ended() -> None:
    def interrupted(start: int, taken: int) -> bool:
        raise KeyboardInterrupt

    contenders = [MadeUp("a", 1e-3), MadeUp("b", 1e-3, interrupted)]
    with pytest.raises(KeyboardInterrupt):
        Race(contenders, Budget(seconds=60)).run()
    assert not any(each.alive for each in contenders)


def test_a_contender_that_hangs_while_starting_is_a_result_and_no_wrong_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the budget went by while it was waited for. Why it is out is not lost, and the others have their rounds."""
    now = 0.0

    class Hanging(MadeUp):
        def ready(self) -> None:
            nonlocal now
            now += 180.0
            raise ContenderFailed("no answer within 180 s")

    monkeypatch.setattr("lockstep.turns.race.time.monotonic", lambda: now)
    race = Race([MadeUp("a", 1e-3), MadeUp("b", 2e-3), Hanging("hangs", 1e-3)], Budget(seconds=60))
    assert [(ratio.contender, ratio.verdict) for ratio in race.run()] == [("b", "not settled")]
    assert race.failures == {"hangs": "no answer within 180 s"}
    alone = Race([MadeUp("a", 1e-3), Hanging("hangs", 1e-3)], Budget(seconds=60))
    assert alone.run() == []
    assert alone.failures == {"hangs": "no answer within 180 s"}


def test_how_long_is_waited_follows_from_the_steps_that_were_seen(tmp_path: Path) -> None:
    """A hang in mid-race was waited for 60 s a step. Of a step that nobody has seen, that is still so."""
    contender = Ranks("one", Recipe(), Placement(), tmp_path)
    assert contender._limit(2) == 60 + 2 * 60
    contender._step_s = 2e-3
    assert contender._limit(64) == pytest.approx(60 + 10 * 60 + 20 * 64 * 2e-3), (
        "ten exchanges may come that were not seen"
    )
    contender._has_seen_all = True
    assert contender._limit(33) == pytest.approx(60 + 20 * 33 * 2e-3)
    contender._step_s = 30.0
    assert contender._limit(2) == 60 + 20 * 2 * 30, "a slow machine keeps its time"
    script = Ranks("own", Recipe(), Placement(), tmp_path, Options(script="train.py"))
    script._step_s, script._has_seen_all = 2e-3, True
    assert script._limit(33) > 600, "its own evaluation may come between two steps"


def test_a_start_may_take_no_longer_than_the_race(tmp_path: Path) -> None:
    """But a minute in any case: that is a slow machine."""
    entry, program = entries(["ranks=1", "images=3 $ true"], "", None)
    assert [contender(entry, tmp_path, None, budget)._start_s for budget in (10, 120, 900)] == [60, 120, 180]  # type: ignore[attr-defined]
    assert [contender(program, tmp_path, None, budget)._start_s for budget in (10, 120, 900)] == [60, 120, 300]  # type: ignore[attr-defined]


def test_a_budget_that_is_spent_before_the_first_round_is_named() -> None:
    with pytest.raises(InputError, match=r"spent before the first round.*give it at least"):
        Race([MadeUp("a", 1e-3), MadeUp("b", 1e-3)], Budget(seconds=1e-9)).run()
    with pytest.raises(InputError, match="two or more"):
        Race([MadeUp("a", 1e-3)], Budget())


# --- the desk that ranks on other hosts call ------------------------------------------------------------------------------


def call(run: Run, rank: object, password: str | None = None, more: bytes = b"") -> socket.socket:
    desk = json.loads((run.folder / DESK).read_text())
    line = socket.create_connection((desk["hosts"][0], desk["port"]), timeout=5)
    line.sendall(json.dumps({"rank": rank, "password": password or desk["password"]}).encode() + b"\n" + more)
    return line


def test_the_desk_takes_ranks_with_the_password_and_nobody_else(tmp_path: Path) -> None:
    run = Run(tmp_path)
    desk = Desk(run, 2, beyond_this_host=False)
    assert (tmp_path / DESK).stat().st_mode & 0o777 == 0o600
    strangers = [call(run, 0, "x"), call(run, 7), call(run, "0"), call(run, None, more=b"{}")]
    garbage = socket.create_connection(("127.0.0.1", json.loads((tmp_path / DESK).read_text())["port"]))
    garbage.sendall(b"\xff" * 2000)
    second, first, again = call(run, 1, more=b"{}\n"), call(run, 0), call(run, 0)
    desk.join(lambda: pytest.fail("both have called"))
    try:
        assert len(desk.orders) == 2
        assert os.read(desk.answers[1], 10) == b"{}\n", "what it said after its greeting is an answer"
        os.write(desk.orders[0], b"go\n")
        assert first.recv(10) == b"go\n"
        for stranger in (*strangers, garbage, again):
            with suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
        with pytest.raises(OSError, match="refused"):
            call(run, 1)
    finally:
        desk.close()
        for line in (*strangers, garbage, first, second, again):
            line.close()
