"""`lockstep tune`: the ways that there are, who is knocked out and who wins, the search over made-up machines, and the command for real."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lockstep.launch.emulated.link import parse_link
from lockstep.placement import Placement
from lockstep.predict.exchange import least_seconds
from lockstep.recipe import Recipe, Regularize
from lockstep.report.tune import command_line, tune_part
from lockstep.run import Run
from lockstep.tune import stages
from lockstep.tune.choices import Way, changes, layouts
from lockstep.tune.stages import Search
from lockstep.turns import Budget, ContenderFailed, Taken
from lockstep.turns.knockout import Knockout
from support import SHORT, Cli, processes_of

ONE = Way(Recipe(global_batch=64), Placement(threads=2, memory_format="channels_last"))


# ---------------------------------------------------------------- what can be chosen


def test_layouts_fill_the_cores_and_divide_the_batch() -> None:
    assert layouts(4, 64, 1) == [(1, 4), (2, 2), (4, 1)]
    assert layouts(2, 63, 1) == [(1, 2)], "63 samples do not divide"
    assert layouts(2, 64, 2) == [(2, 2), (4, 1)], "on each of two hosts"


def test_what_is_stated_stays_as_it_is() -> None:
    free = {factor for factor, _ in changes(ONE, [2], [], [], 60)}
    assert free == {"ranks", "passes", "memory_format", "fused"}
    kept = {factor for factor, _ in changes(ONE, [2], ["ranks", "fused"], [], 60)}
    assert kept == {"passes", "memory_format"}


def test_what_changes_numbers_or_takes_long_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.tune.choices.inductor.has_compiler", lambda: True)
    monkeypatch.setattr("lockstep.tune.choices._works", lambda precision: True)
    assert "compile" in {factor for factor, _ in changes(ONE, [2], [], [], 300)}
    assert "precision" in {factor for factor, _ in changes(ONE, [2], [], ["precision"], 60)}


def test_a_stated_backend_does_not_rule_out_several_ranks() -> None:
    found = [keys for factor, keys in changes(ONE, [2], ["backend"], [], 60) if factor == "ranks"]
    assert found
    assert all("backend" not in keys for keys in found)
    assert {keys["strategy"] for keys in found} == {"ddp", "flat"}


def test_who_pays_by_the_core_may_use_fewer() -> None:
    found = [keys for factor, keys in changes(ONE, [1, 2], [], [], 60) if factor == "ranks"]
    assert any((keys["ranks"], keys["threads"]) == (1, 1) for keys in found)


def test_several_ranks_have_more_to_choose() -> None:
    two = ONE.with_({"ranks": 2, "threads": 1, "backend": "shm", "strategy": "ddp"})
    found = [keys for _, keys in changes(two, [2], [], [], 60)]
    assert {"backend": "gloo"} in found
    assert {"strategy": "flat"} in found
    assert {"ddp.bucket_mb": 4.0} in found
    assert two.words() == ["ranks=2", "threads=1", "backend=shm", "strategy=ddp"]
    assert two.with_({"ddp.bucket_mb": 4.0, "fused": True, "micro_batch": 8}).words()[4:] == [
        "ddp.bucket_mb=4",
        "micro_batch=8",
        "fused=true",
    ]


def test_passes_of_batch_norm_are_left_alone() -> None:
    normed = Way(Recipe(global_batch=64, regularize=Regularize(batch_norm="per-rank")), ONE.placement)
    assert "passes" not in {factor for factor, _ in changes(normed, [2], [], [], 60)}
    residual = Way(Recipe(global_batch=64, model="resnet20", data="cifar10"), ONE.placement)
    assert "passes" not in {factor for factor, _ in changes(residual, [2], [], [], 60)}


def test_no_exchange_beats_its_link() -> None:
    link = parse_link("100mbit,5ms")
    assert least_seconds(1e6, 2, link) == pytest.approx(8e6 / 100e6 + 0.01)
    assert least_seconds(1e6, 1, link) == 0.0


# ---------------------------------------------------------------- who is out


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    Made.noise.seed(5)


class Made:
    """A contender whose steps take what they are said to, in made-up time."""

    noise: ClassVar[random.Random] = random.Random(5)
    whole_steps = 1

    def __init__(self, name: str, step: float, fails: str = "") -> None:
        self.name, self._step, self._fails = name, step, fails
        self.starts, self.windows, self._life = 0, 0, 1.0

    def start(self, number: int) -> None:
        self.starts += 1
        self._life = math.exp(self.noise.gauss(0, 0.015))

    def ready(self) -> None:
        if self._fails:
            raise ContenderFailed(self._fails)

    def take(self, lead: int, steps: int) -> Taken:
        self.windows += 1
        wall = steps * self._step * self._life * math.exp(self.noise.gauss(0, 0.03))
        return Taken(samples=32.0 * steps, wall=wall, cpu=wall)

    def end(self) -> None:
        pass


def test_the_time_goes_to_those_who_can_win() -> None:
    best, near, far = Made("best", 0.010), Made("near", 0.0102), Made("far", 0.02)
    race = Knockout([far, near, best], Budget(seconds=60))
    race.run()
    standings = race.standings()
    assert {standings[0].name, standings[1].name} == {"best", "near"}
    assert race.out == ["far"]
    assert far.starts == 1
    assert best.starts > 1
    assert far.windows < best.windows / 3
    assert standings[-1].ratio == pytest.approx(2.0, rel=0.06)
    assert standings[-1].low < 2.0 < standings[-1].high


def test_the_one_chosen_is_nearly_always_within_three_percent_of_the_best() -> None:
    """Of forty made-up machines with eight ways each."""
    draw, regrets = random.Random(1), []
    for _ in range(40):
        steps = [0.01 * math.exp(abs(draw.gauss(0, 0.1))) for _ in range(8)]
        race = Knockout([Made(str(n), step) for n, step in enumerate(steps)], Budget(seconds=60))
        race.run()
        regrets.append(steps[int(race.standings()[0].name)] / min(steps) - 1)
    # Of 150 such machines 2.7 % were above 3 %, and none above 4.4 %.
    assert sum(regret > 0.03 for regret in regrets) <= 4
    assert max(regrets) < 0.06


def test_later_starts_count_where_the_first_contender_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that everything was compared with at first is out after four rounds; what two others showed there is noise."""

    class Moody(Made):
        def start(self, number: int) -> None:
            super().start(number)
            self._life = 1.08 if number == 1 else 1.0  # a bad first start

    best, other = Moody("best", 0.010), Made("other", 0.0105)
    race = Knockout([Made("default", 0.03), other, best], Budget(seconds=60))
    race.run()
    assert race.standings()[0].name == "best"


def test_who_pays_by_the_core_gets_another_answer() -> None:
    contenders = [Made("one core", 0.016), Made("two cores", 0.010)]
    race = Knockout(contenders, Budget(seconds=60), weights={"one core": 1.0, "two cores": 2.0})
    race.run()
    assert race.standings()[0].name == "one core"
    assert race.standings()[1].ratio == pytest.approx(1.25, rel=0.06)


def test_a_way_that_fails_is_a_result() -> None:
    race = Knockout([Made("a", 0.01), Made("b", 0.01, fails="no such thing"), Made("c", 0.012)], Budget(seconds=60))
    race.run()
    assert race.failures == {"b": "no such thing"}
    assert [each.name for each in race.standings()] == ["a", "c"]


# ---------------------------------------------------------------- the search


class Machine:
    """Says what a step of each way takes, instead of ranks that take it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **factors: dict[Any, float]) -> None:
        self.factors = factors
        self.started: list[str] = []
        monkeypatch.setattr(stages, "Ranks", self._ranks)
        monkeypatch.setattr(stages, "cores", lambda: 2)

    def seconds(self, recipe: Recipe, placement: Placement) -> float:
        found = 0.01
        for key, values in self.factors.items():
            value = getattr(recipe, key, None) if key in Recipe.__struct_fields__ else getattr(placement, key)
            found *= values.get(value, 1.0)
        return found

    def _ranks(self, name: str, recipe: Recipe, placement: Placement, *more: Any) -> Made:
        self.started.append(name)
        return Made(name, self.seconds(recipe, placement))


def test_it_finds_what_several_changes_together_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(
        monkeypatch, fused={False: 2.0}, ranks={2: 0.8}, strategy={"flat": 0.9}, memory_format={"contiguous": 1.3}
    )
    found = Search(Recipe(data="embedded", global_batch=64), Placement(), ["data"], 60.0, runs=tmp_path).run()
    # A change that does nothing may be chosen too: by chance one of many looks as if it helped.
    assert set(found.words) >= {"ranks=2", "threads=1", "backend=shm", "strategy=flat"}
    assert "fused=false" not in found.words
    assert machine.seconds(found.recipe, found.placement) == pytest.approx(0.0072)
    assert found.default == "ranks=1 threads=2"
    assert found.default_ratio == pytest.approx(1 / (0.8 * 0.9), rel=0.06)
    costs = {one.words: one.ratio for one in found.otherwise}
    assert costs["fused=false"] == pytest.approx(2.0, rel=0.06)
    assert costs["strategy=ddp"] == pytest.approx(1 / 0.9, rel=0.06)
    assert len(found.races) >= 2
    assert all((Path(race) / "windows.jsonl").exists() for race in found.races), "every window is kept"
    assert found.step_seconds == pytest.approx(0.0072, rel=0.1)
    text = tune_part(found, command_line(("data=embedded",), found), "seconds").headlines[0]
    assert text.next == f"lockstep run data=embedded {' '.join(found.words)}"


def test_one_host_may_be_better_than_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Machine(monkeypatch, hosts={2: 20.0}, ranks={2: 0.6})
    asked = ("data=embedded", "hosts=emulated:2", "ranks=2", "link=10mbit,5ms")
    placement = Placement(hosts=2, emulated=True, ranks=2, link="10mbit,5ms")
    stated = [word.partition("=")[0] for word in asked]
    found = Search(Recipe(data="embedded", global_batch=64), placement, stated, 60.0, runs=tmp_path).run()
    assert found.default.startswith("hosts=emulated:2 ranks=2")
    assert set(found.words) >= {"ranks=2", "threads=1"}, "two ranks, on one host"
    assert found.placement.hosts == 1
    assert found.default_ratio == pytest.approx(20, rel=0.1)
    told = command_line(asked, found)
    assert told.startswith("lockstep run data=embedded ranks=2")
    assert told.endswith("hosts=1 link=none")


def test_where_nothing_helps_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Machine(
        monkeypatch,
        fused={False: 1.2},
        ranks={2: 1.5},
        memory_format={"contiguous": 1.3},
        micro_batch=dict.fromkeys((8, 16, 32), 1.4),
    )
    found = Search(Recipe(data="embedded", global_batch=64), Placement(), [], 60.0, runs=tmp_path).run()
    assert found.words == ["ranks=1", "threads=2"]
    assert "nothing that was tried is better" in tune_part(found, "", "seconds").headlines[0].verdict
    assert len(found.races) == 1


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_for_real(cli: Cli) -> None:
    begin = time.monotonic()
    found = cli("tune", *SHORT, "global_batch=64", "--budget", "30s", "--json")
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert time.monotonic() - begin < 60
    assert document["default"].startswith("ranks=1")
    assert any(one["ratio"] for one in document["otherwise"])
    again = cli("run", *document["command"].split()[2:], "--name", "as-told")
    assert again.returncode == 0, again.stderr
    assert Run(cli.runs / "as-told").status()["state"] == "done"
    assert processes_of(cli.folder) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "5s"), "--budget 5s is too short to start and race anything: give it 15s or more"),
        (("launcher=slurm",), "tune within an allocation"),
        (("--cost", "euros"), "'euros' is not one of"),
        (("global_batch=0",), "global_batch"),
        (("train.py",), "train.py has a loop of its own: race its ways yourself"),
        (("model=no-such",), "no such model"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, words: tuple[str, ...], said: str) -> None:
    found = cli("tune", *words)
    assert found.returncode == 2
    assert said in found.stderr
    assert "Traceback" not in found.stderr
