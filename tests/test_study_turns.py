"""The two parts of a study: times from turns, by start, and accuracies from trainings, by seed. Figures are made up, so that the truth is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.machine.cpu import TICKS_S, Ticks
from lockstep.report.cells import reason
from lockstep.run import Options, append_line, write_atomic
from lockstep.statistics import compare_family
from lockstep.study import beside, compare, execute, racing, timing, versus
from lockstep.study.definition import Claim, Published
from lockstep.study.file import from_tree
from lockstep.study.folder import StudyFolder
from lockstep.study.gather import of_study
from lockstep.study.plan import Planned, apart, plan, timed_content
from lockstep.study.seeds import undecided
from lockstep.study.session import Session, Watcher
from lockstep.turns import estimate
from lockstep.turns.contender import Taken
from lockstep.turns.estimate import Window
from lockstep.turns.ranks import Look
from support import Cli
from test_study_compare import cells_of, finished

BASE: dict[str, Any] = {
    "data": "embedded",
    "train_limit": 960,
    "test_limit": 100,
    "global_batch": 48,
    "epochs": 2,
    "threads": 1,
    "backend": "gloo",
}
STARTS = 6


class Made:
    """A study that was planned here, with a race and trainings that are made up."""

    def __init__(self, root: Path, **tree: Any) -> None:
        self.planned: Planned = plan(from_tree({"recipe": BASE, **tree}, "mine"), runs=root)
        self.folder = StudyFolder(root / "studies" / "mine")
        self.folder.write(self.planned)

    def race(
        self,
        costs: dict[str, float],
        evaluation: float = 0.5,
        memory: float = 100e6,
        noise: float = 0.002,
        forward: dict[str, float] | None = None,
        tensors: dict[str, list[float]] | None = None,
    ) -> None:
        """`costs`: microseconds for an image. Every start has a life of its own, every round a machine of its own.

        `forward`: its share of a step. `tensors`: bytes, start by start.
        """
        draw = random.Random(1)
        for start in range(1, STARTS + 1):
            lives = {name: draw.gauss(1, noise) for name in costs}
            for name in costs:
                counted = (tensors or {}).get(name, [1e6])
                record = timing.Started(
                    cell=name,
                    start=start,
                    evaluation=evaluation,
                    memory=memory + start * 1e5,
                    tensor_memory=counted[start % len(counted)],
                )
                append_line(self.folder.path / timing.STARTED, msgspec.to_builtins(record))
            for number in range(8):
                machine = draw.uniform(1, 1.5)
                for name, cost in costs.items():
                    wall = 1e-6 * cost * lives[name] * machine * 480
                    ahead = (forward or {}).get(name, 0.4)
                    window = Window(
                        contender=name,
                        start=start,
                        round=number,
                        steps=10,
                        samples=480,
                        wall=wall,
                        cpu=wall,
                        phases={"forward": ahead * wall, "backward": (0.9 - ahead) * wall},
                    )
                    append_line(self.folder.path / timing.WINDOWS, msgspec.to_builtins(window))
        cells, own = timed_content(self.planned)
        windows = timing.read_windows(self.folder)
        ratios = estimate.ratios(windows, racing.pairs(self.planned))
        state = timing.State(cells=cells, own=own, over=True, seconds=60.0, starts=STARTS, ratios=ratios)
        write_atomic(self.folder.path / timing.STATE, msgspec.to_builtins(state))

    def train(self, accuracies: dict[str, list[float]], seconds: float = 10.0, **summary: Any) -> None:
        """By the first cell of each recipe, one accuracy for each seed."""
        for name, values in accuracies.items():
            cell = self.planned.cell(name)
            items = [item for item in self.planned.items if item.cell == name]
            for item, accuracy in zip(items, values, strict=False):
                recipe = msgspec.structs.replace(cell.recipe, seed=item.seed)
                usual = {"epochs": 2, "train_images": 1920, "eval_seconds": 1.0}
                run = finished(self.folder.runs, recipe, cell.placement, seconds, accuracy, **usual | summary)
                self.folder.begins(item, run.id)

    @property
    def document(self) -> dict[str, Any]:
        return compare.study_document(self.folder)


def test_times_come_from_turns_and_accuracies_from_trainings(tmp_path: Path) -> None:
    study = Made(tmp_path, factors={"ranks": [1, 2]}, repeats=3)
    study.race({"ranks=1": 100.0, "ranks=2": 60.0})
    study.train({"ranks=1": [0.9, 0.91, 0.92]})
    one, two = study.document["cells"]
    # The machine of a round is up to half slower: a time by itself knows that, a ratio within rounds does not see it.
    assert one["metrics"]["seconds"]["median"] == pytest.approx(1920 * 125e-6, rel=0.15)
    assert one["metrics"]["seconds"]["n"] == STARTS
    against = two["metrics"]["seconds"]["against_baseline"]
    assert (against["verdict"], against["n"], against["how"]) == ("faster", STARTS, "turns")
    assert against["effect"] == pytest.approx(0.6, rel=0.005)
    assert two["metrics"]["images_per_second"]["against_baseline"]["effect"] == pytest.approx(1 / 0.6, rel=0.005)
    assert two["speed_up"] == pytest.approx(1 / 0.6, rel=0.005)
    assert two["efficiency"] == pytest.approx(1 / 1.2, rel=0.005)
    assert two["metrics"]["memory"]["median"] == pytest.approx(100e6, rel=0.01)
    # Two ranks compute what one does: its trainings are theirs.
    assert two["metrics"]["accuracy"]["values"] == [0.9, 0.91, 0.92]
    assert two["metrics"]["accuracy"]["against_baseline"]["verdict"] == "the same"
    assert (two["ranks"], two["cores"], two["runs"]) == (2, 2, one["runs"])


def test_forward_and_backward_are_compared_within_rounds_like_the_whole_step(tmp_path: Path) -> None:
    made = Made(
        tmp_path,
        cells={"plain": {}, "fused": {"fused": True}},
        metrics=["seconds", "forward_seconds", "backward_seconds"],
    )
    made.race({"plain": 100.0, "fused": 100.0}, forward={"plain": 0.6, "fused": 0.3})
    fused = compare.study_document(made.folder)["cells"][1]["metrics"]
    found = {name: column["against_baseline"] for name, column in fused.items()}
    assert found["forward_seconds"]["effect"] == pytest.approx(0.5, rel=0.01)
    assert found["backward_seconds"]["effect"] == pytest.approx(2.0, rel=0.01)
    verdicts = {name: against["verdict"] for name, against in found.items()}
    assert verdicts == {"seconds": "the same", "forward_seconds": "faster", "backward_seconds": "slower"}
    # 960 images, two epochs.
    assert fused["forward_seconds"]["median"] == pytest.approx(0.3 * 100e-6 * 1.25 * 1920, rel=0.1)


def test_bytes_that_are_the_same_in_every_start_were_counted_and_need_no_test(tmp_path: Path) -> None:
    cells = {"adam": {}, "sgd": {"optimizer.name": "sgd"}, "uneven": {"optimizer.name": "rmsprop"}}
    made = Made(tmp_path, cells=cells, metrics=["tensor_memory"])
    made.race(dict.fromkeys(cells, 100.0), tensors={"adam": [2.82e6], "sgd": [2.75e6], "uneven": [2.7e6, 2.9e6]})
    sgd, uneven = (cell["metrics"]["tensor_memory"] for cell in compare.study_document(made.folder)["cells"][1:])
    assert sgd["against_baseline"]["verdict"] == "lower"
    assert sgd["against_baseline"]["low"] == sgd["against_baseline"]["high"] == pytest.approx(2.75 / 2.82)
    assert uneven["against_baseline"]["verdict"] == "not significant", "what differs from start to start is tested"


def test_a_time_to_an_accuracy_is_epochs_of_trainings_times_the_epoch_of_turns(tmp_path: Path) -> None:
    metrics = ["seconds_to_target", "cost_to_target"]
    study = Made(tmp_path, factors={"ranks": [1, 2]}, repeats=3, metrics=metrics, target_accuracy=0.85)
    study.race({"ranks=1": 100.0, "ranks=2": 60.0})
    study.train({"ranks=1": [0.9, 0.91, 0.92]}, seconds=777.0)  # made in some other minute: not what is compared
    one, two = study.document["cells"]
    ratio = two["metrics"]["seconds_to_target"]["median"] / one["metrics"]["seconds_to_target"]["median"]
    assert ratio == pytest.approx(0.6, rel=0.01)
    assert one["metrics"]["seconds_to_target"]["median"] < 1, "two epochs of 960 images at about 125 µs"
    column = one["metrics"]["seconds_to_target"]
    assert column["high"] > 1.01 * column["low"], (
        "all seeds need two epochs, but how long these take is not known exactly"
    )
    ratio = two["metrics"]["cost_to_target"]["median"] / one["metrics"]["cost_to_target"]["median"]
    assert ratio == pytest.approx(1.2, rel=0.01)


def test_whole_trainings_check_what_turns_say_and_early_stopping_counts(tmp_path: Path) -> None:
    study = Made(tmp_path, factors={"ranks": [1, 2]}, repeats=3)
    study.race({"ranks=1": 100.0, "ranks=2": 60.0}, evaluation=1.0)
    steps = compare.study_document(study.folder)["cells"][0]["metrics"]["seconds"]["median"]
    study.train({"ranks=1": [0.9] * 3}, seconds=1.1 * steps, eval_seconds=2.0)
    check = study.document["check"]
    assert check["n"] == 3
    assert check["median"] == pytest.approx(0.1 * steps / (steps + 2.0), abs=0.01)
    assert not check["beside"]
    # The machine became a third faster after the race: by the windows beside the training, it took 4 % more than its steps.
    run = study.folder.started()[study.planned.items[0].digest][0]
    turns = {"before": 0.9 * 1.1 * steps / 1.04 / 1920, "after": 1.1 * 1.1 * steps / 1.04 / 1920, "evaluation": 1.0}
    study.folder.log({"run": run, "state": "done", "began": 1.0, "ended": 2.0, "beside": turns})
    check = study.document["check"]
    assert (check["n"], check["beside"]) == (1, True), "the other two have no windows beside them"
    assert check["runs"][0]["off"] == pytest.approx(0.04 * 1.1 * steps / (1.1 * steps + 2.0), rel=0.1)
    stopped = Made(tmp_path / "stopped", factors={"ranks": [1, 2]}, repeats=3)
    stopped.race({"ranks=1": 100.0, "ranks=2": 60.0})
    stopped.train({"ranks=1": [0.9] * 3}, train_images=960, epochs=1)
    assert stopped.document["cells"][0]["metrics"]["seconds"]["median"] == pytest.approx(steps / 2, rel=0.01)


def test_two_starts_are_too_few_for_an_interval_and_said_to_be_two() -> None:
    ratio = estimate.Ratio(contender="b", baseline="a", verdict="not settled", n=2, rounds=8, effect=1.2)
    found = versus._raced(ratio, 1.0, "time")
    assert versus.verdict_text(found).startswith("2 starts: too few for an interval")
    one = versus._raced(msgspec.structs.replace(ratio, n=1), 1.0, "time")
    assert versus.verdict_text(one).startswith("1 start: too few")
    assert versus.verdict_text(compare_family([([1.0], [2.0])], "time")[0]) == "one pair: repeat it"


def test_how_long_early_stopping_makes_a_training_shows_in_trainings_alone(tmp_path: Path) -> None:
    cells = {"whole": {}, "early": {"early_stopping.patience": 1}}
    study = Made(tmp_path, cells=cells, repeats=3)
    study.race({"whole": 100.0, "early": 100.0})
    early = compare.study_document(study.folder)["cells"][1]["metrics"]
    assert early["seconds"]["n"] == 0
    assert early["seconds"]["against_baseline"]["verdict"] == "too few"
    assert early["images_per_second"]["against_baseline"]["verdict"] == "the same"
    study.train({"whole": [0.9] * 3})
    study.train({"early": [0.9] * 3}, train_images=960, epochs=1)
    against = study.document["cells"][1]["metrics"]["seconds"]["against_baseline"]
    assert (against["verdict"], round(against["effect"], 2)) == ("faster", 0.5)


def test_a_study_that_asks_nothing_about_time_does_not_race(tmp_path: Path) -> None:
    cells = {"a": {}, "b": {"optimizer.lr": 0.01}}
    assert racing.racing(Made(tmp_path / "learned", cells=cells, metrics=["accuracy"]).planned) == []
    assert racing.racing(Made(tmp_path / "timed", cells=cells, metrics=["accuracy", "seconds_to_target"]).planned)


def test_claims_about_any_two_cells_are_asked_of_the_race(tmp_path: Path) -> None:
    claims = [
        Claim(text="3 is slower than 2", metric="seconds", more="ranks=3", less="ranks=2"),
        Claim(text="2 as 1", metric="accuracy", more="ranks=1", less="ranks=2", same=True),
        Claim(text="1 is slower than 2", metric="seconds", more="ranks=1", less="ranks=2"),
    ]
    published = [msgspec.to_builtins(Published(source="B", claims=claims))]
    study = Made(tmp_path, factors={"ranks": [1, 2, 3]}, repeats=3, published=published)
    assert racing.pairs(study.planned) == [("ranks=2", "ranks=1"), ("ranks=3", "ranks=1"), ("ranks=3", "ranks=2")]
    study.race({"ranks=1": 100.0, "ranks=2": 60.0, "ranks=3": 70.0})
    study.train({"ranks=1": [0.9, 0.91, 0.92]})
    found = study.document["published"][0]["claims"]
    assert [claim["verdict"] for claim in found] == ["agrees", "agrees", "agrees"]
    assert found[0]["ours"] == pytest.approx(70 / 60, rel=0.01)
    assert found[2]["ours"] == pytest.approx(100 / 60, rel=0.01), "the race compared the other way round"


def test_a_claim_that_came_out_otherwise_has_what_is_known_about_it(tmp_path: Path) -> None:
    claims = [
        Claim(text="2 is slower", metric="seconds", more="ranks=2", less="ranks=1", why="their link was slow"),
        Claim(text="large is better", metric="accuracy", more="large", less="ranks=1"),
    ]
    published = [msgspec.to_builtins(Published(source="B", claims=claims))]
    cells = {"ranks=1": {"ranks": 1}, "ranks=2": {"ranks": 2}, "large": {"global_batch": 96, "optimizer.lr": 0.01}}
    study = Made(tmp_path, cells=cells, repeats=3, published=published)
    study.race({"ranks=1": 100.0, "ranks=2": 60.0, "large": 90.0})
    study.train({"ranks=1": [0.9, 0.91, 0.92], "large": [0.8, 0.81, 0.82]})
    time, learned = study.document["published"][0]["claims"]
    assert time["verdict"] == learned["verdict"] == "differs"
    assert time["known"] == "2 cores instead of 1"
    assert learned["known"] == "'large' against 'ranks=1': global batch 96 against 48, optimizer.lr 0.01 against 0.0005"
    assert reason(time) == f"their link was slow; {time['known']}"


def test_factors_that_are_crossed_have_effects_and_interactions(tmp_path: Path) -> None:
    factors = {"ranks": [1, 2], "accumulation": [1, 2]}
    study = Made(tmp_path, factors=factors, repeats=3, metrics=["seconds"])
    # Two ranks take 0.6 of the time, accumulation 1.2, and together 1.1 times what both would.
    study.race(
        {
            "ranks=1, accumulation=1": 100.0,
            "ranks=1, accumulation=2": 120.0,
            "ranks=2, accumulation=1": 60.0,
            "ranks=2, accumulation=2": 60.0 * 1.2 * 1.1,
        }
    )
    found = {(one["factor"], one["level"]): one for one in study.document["effects"]}
    ranks = found["ranks", "ranks=2 against ranks=1"]
    assert ranks["effect"] == pytest.approx(0.6 * 1.1**0.5, rel=0.005)
    assert ranks["verdict"] == "faster"
    both = found["ranks and accumulation", "ranks=2 with accumulation=2"]
    assert both["effect"] == pytest.approx(1.1, rel=0.005)
    assert both["low"] > 1
    none = Made(tmp_path / "none", factors=factors, repeats=3, metrics=["seconds"])
    none.race(dict.fromkeys((cell.name for cell in none.planned.cells), 100.0))
    assert all(one["low"] < 1 < one["high"] for one in none.document["effects"])


def test_recipes_are_trained_with_more_seeds_until_they_are_told_apart(tmp_path: Path) -> None:
    draw = random.Random(3)
    study = Made(tmp_path, factors={"optimizer.name": ["adam", "sgd", "rmsprop"]}, repeats=3)
    clear = [0.95 + draw.gauss(0, 0.001) for _ in range(6)]
    study.train(
        {
            "optimizer.name=adam": clear[:3],
            "optimizer.name=sgd": [value - 0.2 for value in clear[:3]],
            "optimizer.name=rmsprop": [0.951, 0.93, 0.97],
        }
    )
    # What is far away is settled; what is within its own spread goes on, and so does what it is compared with.
    assert undecided(study.folder, study.planned, 3) == {"optimizer.name=adam", "optimizer.name=rmsprop"}


def test_what_is_the_same_for_every_seed_is_settled(tmp_path: Path) -> None:
    study = Made(tmp_path, factors={"precision": ["fp32", "bf16"]}, repeats=3)
    study.train({"precision=fp32": [0.9, 0.92, 0.91], "precision=bf16": [0.9001, 0.9202, 0.9099]})
    assert undecided(study.folder, study.planned, 3) == set()


def test_two_seeds_are_judged_by_what_seeds_change_in_all_recipes(tmp_path: Path) -> None:
    sizes = [32, 64, 256, 512]
    study = Made(tmp_path, factors={"global_batch": sizes}, repeats=2)
    values = [[0.799, 0.803], [0.765, 0.772], [0.741, 0.738], [0.722, 0.729]]
    study.train({f"global_batch={size}": pair for size, pair in zip(sizes, values, strict=True)})
    assert undecided(study.folder, study.planned, 2) == set()
    cell = study.document["cells"][1]["metrics"]["accuracy"]["against_baseline"]
    assert (cell["n"], cell["verdict"], cell["how"]) == (2, "worse", "pooled t")
    # By themselves, two pairs leave everything open.
    alone = Made(tmp_path / "alone", factors={"global_batch": sizes[:2]}, repeats=2)
    alone.train({f"global_batch={size}": pair for size, pair in zip(sizes[:2], values[:2], strict=True)})
    assert undecided(alone.folder, alone.planned, 2) == {"global_batch=32", "global_batch=64"}


@pytest.mark.parametrize("spread", [0.002, 0.02])
def test_looking_three_times_keeps_the_error(spread: float) -> None:
    """Two recipes that learn the same, looked at after 5, 10 and 20 seeds; without a margin there is no other way to stop."""
    draw, wrong, trials = random.Random(5), 0, 400
    for _ in range(trials):
        a, b = ([draw.gauss(0.9, spread) for _ in range(20)] for _ in range(2))
        verdicts = [compare_family([(a[:n], b[:n])], "accuracy", versus.LOOK_ALPHA)[0].verdict for n in (5, 10, 20)]
        wrong += any(verdict in ("better", "worse") for verdict in verdicts)
    assert wrong <= 0.05 * trials + 2.33 * (0.05 * 0.95 * trials) ** 0.5


class Windows:
    """Ranks that take 2 ms for a sample, all of it on a processor, and wait for one for as long as they are told."""

    whole_steps = 1

    def __init__(self, waited: float) -> None:
        self.waited, self.used = waited, 0.0

    def start(self, number: int) -> None: ...

    def ready(self) -> None: ...

    def look(self) -> Look:
        return Look(0.5, *[None] * (len(Look._fields) - 1))

    def take(self, lead: int, steps: int) -> Taken:
        wall = 0.002 * steps * 10
        self.used += wall
        return Taken(samples=10.0 * steps, wall=wall, cpu=wall, used=wall, waited=self.waited * wall)


@pytest.mark.parametrize(("waited", "kept"), [(0.0, True), (0.05, True), (0.5, False)])
def test_windows_beside_a_training_count_where_they_had_their_cores(
    waited: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Windows(waited)
    clock = itertools.count()
    monkeypatch.setattr(beside, "ticks", lambda: Ticks(total=0, busy=round(2 * TICKS_S * ranks.used), stolen=0))
    monkeypatch.setattr(beside.time, "monotonic", lambda: 0.1 * next(clock))
    parked = beside.Beside(ranks)  # type: ignore[arg-type]
    found = parked.found()
    assert (found is not None) == kept
    if found:
        assert found == {"before": pytest.approx(0.002), "after": pytest.approx(0.002), "evaluation": 0.5}


def test_a_race_goes_on_only_on_the_kind_of_machine_it_began_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Made(tmp_path, factors={"ranks": [1, 2]}, repeats=3)
    study.race({"ranks=1": 100.0, "ranks=2": 60.0})
    state = msgspec.to_builtins(timing.read(study.folder, study.planned).state)  # type: ignore[union-attr]
    here, heard = racing.machine_here(), list[str]()

    def raced_on(machine: dict[str, str]) -> bool:
        write_atomic(study.folder.path / timing.STATE, state | {"machine": machine})
        return racing._before(study.folder, study.planned, heard.append).over

    assert raced_on(here)
    assert not heard
    assert not raced_on(here | {"cpu": "AMD EPYC (family 25, model 17)"})
    assert heard == [f"the cells raced on AMD EPYC (family 25, model 17), and this is {here['cpu']}: they race again"]
    assert not raced_on(here | {"torch": "1.0"})
    assert "its software" in heard[1]
    # A race of before names had their kind: whether it is another processor is not known.
    monkeypatch.setattr(racing, "cpu_model", lambda: "AMD EPYC (family 26, model 2)")
    for was in ("AMD EPYC", "AMD EPYC (family 25, model 17)"):
        assert not raced_on(here | {"cpu": was})
    assert ["its software" in each for each in heard[2:]] == [True, False]


def test_a_race_of_other_cells_says_nothing(tmp_path: Path) -> None:
    study = Made(tmp_path, factors={"ranks": [1, 2]}, repeats=3)
    study.race({"ranks=1": 100.0, "ranks=2": 60.0})
    assert of_study(study.folder, study.planned)[1].time is not None
    # A proof that failed changes where it is trained, not what was timed.
    parted = apart(study.planned, "ranks=2", "gradients differ")
    assert of_study(study.folder, parted)[1].time is not None
    other = plan(
        from_tree({"recipe": {**BASE, "global_batch": 24}, "factors": {"ranks": [1, 2]}}, "mine"), runs=tmp_path
    )
    assert of_study(study.folder, other)[1].time is None
    study.folder.write(parted)
    assert any("'ranks=2' does not compute what one process would" in note for note in study.document["fairness"])


def test_a_cell_that_fell_out_of_the_race_is_a_result(tmp_path: Path) -> None:
    study = Made(tmp_path, factors={"ranks": [1, 2, 3]}, repeats=3)
    study.race({"ranks=1": 100.0, "ranks=2": 60.0})
    state = timing.read(study.folder, study.planned)
    assert state is not None
    lost = msgspec.structs.replace(state.state, failures={"ranks=3": "rank 2: MemoryError"})
    write_atomic(study.folder.path / timing.STATE, msgspec.to_builtins(lost))
    study.train({"ranks=1": [0.9, 0.91, 0.92]})
    three = cells_of(study.document)["ranks=3"]
    assert three["failed"] == ["in the race: rank 2: MemoryError"]
    assert three["metrics"]["accuracy"]["n"] == 3


# ---------------------------------------------------------------- in real processes


def test_the_budget_is_for_proofs_and_checks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a clock that only they move: a proof of 40 s, and for a training of 100 s a parked start, 10 s before it and 5 s after."""
    study = Made(tmp_path, cells={"alone": {}, "ranks": {"ranks": 2}}, repeats=1, budget_minutes=60.0)
    now = 0.0

    def took(seconds: float) -> None:
        nonlocal now
        now += seconds

    def session() -> Session:
        return Session(study.folder, study.planned, Options(), study.folder.runs, Watcher(), clock=lambda: now)

    monkeypatch.setattr(execute.proof, "prove", lambda folder, cell, data_root: took(40.0))
    first = session()
    execute._prove(first)
    execute._look(first, again=False)
    assert first.spent == 40
    monkeypatch.setattr(execute.proof, "known", lambda root, cell: True)

    class Parked:
        def found(self) -> None:
            took(5.0)

    @contextmanager
    def parked(*_: object) -> Iterator[Parked]:
        took(10.0)
        yield Parked()

    monkeypatch.setattr(execute, "beside", parked)
    monkeypatch.setattr(execute, "execute", lambda run, spec, progress: took(100.0))
    monkeypatch.setattr(execute, "_overhead", lambda *_: {})
    first.costs = {"alone": 1e-4, "ranks": 2e-4}
    execute._one(first, first.step(study.planned.items[0]))
    assert first.spent == 40 + 115
    (record,) = study.folder.records()
    assert (record["ended"] - record["began"], record["checked_s"]) == (100, 15), (
        "the training by itself is what others are estimated by"
    )
    again = session()
    execute._prove(again)
    execute._look(again, again=False)
    assert again.spent == 40 + 115, "the same in the next call"


SMALL = """
repeats = 2
race_minutes = 0.7
[recipe]
data = "embedded"
train_limit = 960
test_limit = 200
global_batch = 48
epochs = 1
[placement]
threads = 1
[cells.alone]
ranks = 1
[cells.ranks]
ranks = 2
backend = "gloo"
[cells.averaged]
ranks = 2
backend = "gloo"
strategy = "local-sgd"
"""


@pytest.mark.slow
def test_a_study_races_proves_and_trains(cli: Cli) -> None:
    (cli.folder / "small.toml").write_text(SMALL)
    done = cli("study", "run", "small.toml", timeout=400)
    assert done.returncode == 0, done.stderr
    assert "[race, " in done.stderr
    assert "[proof 1/1] ranks: does it compute what one process does?" in done.stderr
    folder = StudyFolder.find("small", cli.runs)
    assert folder is not None
    document = compare.study_document(folder)
    assert document["race"]["over"]
    assert document["race"]["starts"] >= 1
    alone, ranks, averaged = document["cells"]
    assert alone["runs"] == ranks["runs"] != averaged["runs"]
    assert alone["metrics"]["seconds"]["n"] == document["race"]["starts"]
    assert alone["evaluation_seconds"] > 0
    assert alone["metrics"]["memory"]["median"] > 1e6
    checked = [record["beside"] for record in folder.records() if "beside" in record]
    assert len(checked) == 3, "the first three trainings, also where other work had the cores"
    assert all(each is None or min(each["before"], each["after"], each["evaluation"]) > 0 for each in checked)
    assert not (folder.path / racing.STARTS).exists()
    assert "Traceback" not in done.stderr
    windows = (folder.path / timing.WINDOWS).stat().st_size
    again = cli("study", "run", "small.toml", timeout=100)
    assert again.returncode == 0, again.stderr
    assert (folder.path / timing.WINDOWS).stat().st_size == windows, "what is over is not raced again"
