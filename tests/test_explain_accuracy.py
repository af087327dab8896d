"""Accuracy beside planted twins: runs of the same recipe in one process. The verdict follows from them, and never contradicts them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.explain import accuracy, twins
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.measure.environment import version_of
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.run import Run, write_atomic
from lockstep.verify import verified
from test_explain import RECIPE, Folder, curve, spec_of

replace = msgspec.structs.replace
SINGLE = Placement(ranks=1, threads=1, launcher="single", device="cpu", strategy="single")
TWO = Placement(ranks=2, threads=1, launcher="spawn", device="cpu", backend="gloo", strategy="ddp")
LOCAL = replace(TWO, strategy="local-sgd")
PER_RANK = replace(RECIPE, regularize=replace(RECIPE.regularize, batch_norm="per-rank"))
SEEDS = range(5)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def seeded(
    folder: Folder, placement: Placement, accuracies: Sequence[float], recipe: Recipe = RECIPE, first: int = 0
) -> list[Run]:
    """One run for each seed."""
    return [
        folder.run(replace(recipe, seed=seed), placement, test_accuracy=each)
        for seed, each in enumerate(accuracies, first)
    ]


def found(runs: Sequence[Run], peers: Sequence[Run] = ()) -> Finding:
    """What is said of the first of them."""
    curve(runs[0], [0.5], [0.5])
    (finding,) = accuracy.answer(Evidence(runs[0], [*runs, *peers]))
    return finding


def prove(folder: Folder, run: Run) -> None:
    write_atomic(run.folder / "environment.json", {name: version_of(name) for name in ("torch", "lockstep")})
    verified.record(folder.root, [run.spec()], checks=9, steps=32)


@pytest.mark.parametrize(
    ("recipe", "placement", "proven", "off"),
    list(itertools.product([RECIPE, PER_RANK], [TWO, LOCAL], [False, True], [-0.04, 0.0, 0.04])),
)
def test_the_verdict_follows_from_the_twins(
    folder: Folder, recipe: Recipe, placement: Placement, proven: bool, off: float
) -> None:
    """Five seeds on both sides, which differ by this much: whatever else changed, and whether or not it was verified."""
    alone = [0.9 + 0.002 * seed for seed in SEEDS]
    # Two ranks are not exactly one.
    ours = [value + off + 0.0002 * (-1) ** seed for seed, value in zip(SEEDS, alone, strict=True)]
    runs = seeded(folder, placement, ours, recipe)
    if proven:
        prove(folder, runs[0])
    finding = found(runs, seeded(folder, SINGLE, alone, recipe))
    assert finding.figures["twin"] == ("differs" if off else "the same")
    assert finding.figures["difference"] == pytest.approx(off, abs=0.001)
    assert ("differs" in finding.verdict or "+4.0" in finding.verdict or "−4.0" in finding.verdict) == bool(off)
    same = ("that of one process", "has the same accuracy", "does not change what is computed")
    assert any(words in finding.verdict for words in same) == (off == 0)
    assert "n = 5 pairs of one seed" in finding.why


def test_what_noise_hides_is_neither_the_same_nor_different(folder: Folder) -> None:
    """One point off, and 500 test samples that leave 3.7 points to chance."""
    run = folder.run(test_accuracy=0.90)
    finding = found([run], [folder.run(placement=SINGLE, test_accuracy=0.91)])
    assert finding.figures["twin"] == "open"
    assert finding.verdict.endswith("cannot be told from that of one process")
    low, high = finding.figures["interval"]
    assert low < -0.01 < 0 < high
    assert "by drawing 500 test samples alone; seeds may differ by more" in finding.why
    changed = folder.run(PER_RANK, test_accuracy=0.90)
    finding = found([changed], [folder.run(PER_RANK, SINGLE, test_accuracy=0.91)])
    assert "whether the accuracy differs from one process cannot be told from 1 run" in finding.verdict


def test_what_was_not_measured_is_not_blamed(folder: Folder) -> None:
    finding = found([folder.run(PER_RANK, test_accuracy=0.9)])
    assert finding.verdict == (
        "the recipe changed with the ranks: batch norm; what that does to the accuracy was not measured"
    )


def test_a_batch_that_was_stated_per_rank_has_its_twin_in_the_same_global_batch(folder: Folder) -> None:
    """The same batch and rate in one process, however they were stated: it is the recipe that changed, and not the distribution."""
    values = [0.9 + 0.002 * seed for seed in SEEDS]
    stated = replace(RECIPE, batch_per_rank=32, lr_rule="linear")
    same = replace(RECIPE, lr_rule="linear", lr_batch=32)
    runs = seeded(folder, TWO, values, stated)
    assert runs[0].spec().plan.lr == 2 * RECIPE.optimizer.lr
    other_rate = seeded(folder, SINGLE, [value - 0.2 for value in values])
    finding = found(runs, [*seeded(folder, SINGLE, values, same), *other_rate])
    assert finding.figures["one_process_runs"] == 5, "another rate is another recipe"
    assert finding.verdict == (
        "the recipe changed with the ranks: global batch, but one process with this batch and rate has the same accuracy"
    )


def test_all_samples_right_leaves_something_to_chance(folder: Folder) -> None:
    finding = found([folder.run(test_accuracy=1.0)], [folder.run(placement=SINGLE, test_accuracy=0.998)])
    assert finding.figures["twin"] == "open", "one of 500"


def test_weights_that_were_not_compared_are_not_said_to_differ(folder: Folder) -> None:
    finding = found([folder.run(test_accuracy=0.9, ranks_agree=None)])
    weights = next(check for check in finding.figures["checks"] if check["name"] == "weights")
    assert (weights["changed"], weights["evidence"]) == (False, "not compared between ranks")


def test_other_mathematics_says_nothing_about_the_spread_of_seeds(folder: Folder) -> None:
    """Three seeds of local-sgd lie far apart; the twin of another seed is 3 points off, which is more than 500 samples explain of 0.95."""
    run = folder.run(test_accuracy=0.98)
    scattered = seeded(folder, LOCAL, [0.5, 0.7, 0.9])
    twin = folder.run(replace(RECIPE, seed=9), SINGLE, test_accuracy=0.95)
    finding = found([run], [twin, *scattered])
    assert finding.figures["twin"] == "differs"
    assert "test samples alone" in finding.why


class Stub:
    """A run in memory."""

    def __init__(self, placement: Placement, seed: int, value: float) -> None:
        self._spec, self._value = spec_of(replace(RECIPE, seed=seed), placement, "x"), value

    def spec(self) -> Any:
        return self._spec

    def summary(self) -> dict[str, Any]:
        return {"test_accuracy": self._value}


@pytest.mark.parametrize(
    ("ours", "theirs"), [(1, 3), (3, 1), (3, 3), (5, 5), (2, 2)], ids=["1+3", "3+1", "3 pairs", "5 pairs", "2+2"]
)
def test_seeds_that_differ_by_chance_are_called_different_in_5_of_a_hundred_at_most(ours: int, theirs: int) -> None:
    """Every run is drawn with a standard deviation of one point. Two deviations of three seeds would be wrong in 18 of 100."""
    rng, trials, wrong = np.random.default_rng(3), 400, 0
    for _ in range(trials):
        # Where the seeds are not the same, nothing is paired.
        first = 0 if ours == theirs > 2 else 100
        runs = [Stub(TWO, seed, 0.9 + 0.01 * rng.standard_normal()) for seed in range(ours)]
        alone = [Stub(SINGLE, first + seed, 0.9 + 0.01 * rng.standard_normal()) for seed in range(theirs)]
        evidence: Any = type("Beside", (), {"run": runs[0], "peers": [*runs[1:], *alone], "spec": runs[0].spec()})
        twin = twins.compared(evidence, runs[0].summary()["test_accuracy"])
        assert twin is not None
        wrong += twin.verdict == "differs"
    assert wrong <= trials * (0.05 + 3 * (0.05 * 0.95 / trials) ** 0.5), f"{wrong} of {trials}"
