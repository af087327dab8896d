"""Where a run is, is its step and nothing else: stopped anywhere, by anything, it goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.measure import recorder
from lockstep.measure.records import read_steps
from lockstep.run import Run
from support import SHORT, train_here

# 703 samples at 48: 15 steps an epoch, the last of 31. All that depends on the step or the sample, but a schedule that knows
# how long the run is: there a shorter run is another recipe.
WORDS = (
    *SHORT,
    "epochs=3",
    "optimizer.name=adamw",
    "schedule.name=step",
    "schedule.every_epochs=2",
    "schedule.warmup_steps=4",
    "augment.crop=2",
    "regularize.dropout=0.2",
    "regularize.mixup=0.4",
)
STEPS, PER_EPOCH = 45, 15


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(runs: Path) -> dict[str, Any]:
    return train_here(runs, *WORDS)


def assert_same(found: dict[str, Any], whole: dict[str, Any]) -> None:
    assert found["weights_sha256"] == whole["weights_sha256"]
    assert (found["steps"], found["train_images"], found["stopped_by"]) == (STEPS, 3 * 703, None)
    for key in ("epoch", "step", "samples", "test_loss", "test_accuracy", "train_accuracy"):
        assert [e[key] for e in found["epochs"]] == [e[key] for e in whole["epochs"]], key
    # A sum that was carried over a checkpoint was added up in another order.
    assert [e["train_loss"] for e in found["epochs"]] == pytest.approx(
        [e["train_loss"] for e in whole["epochs"]], rel=1e-12
    )
    assert not any(e["partial"] for e in found["epochs"])


@pytest.mark.parametrize("stop", [1, 7, 14, 15, 16, 29, 30, 44])
def test_stopped_by_max_steps_and_resumed_it_ends_with_the_same_bits(
    runs: Path, whole: dict[str, Any], stop: int
) -> None:
    first = train_here(runs, *WORDS, f"max_steps={stop}", checkpoint_every=1)
    assert first["steps"] == stop
    last = first["epochs"][-1]
    assert (last["step"], last["partial"]) == (stop, stop % PER_EPOCH > 0)
    assert last["samples"] == (stop % PER_EPOCH * 48 or 703)
    again = train_here(runs, "max_steps=none", resume=first["run"])
    assert_same(again, whole)
    rows = read_steps(Path(again["run"]) / "ranks" / "0000" / "steps.bin")
    assert rows["step"].tolist() == list(range(stop + 1, STEPS + 1))
    assert rows["epoch"].tolist() == [(step - 1) // PER_EPOCH + 1 for step in rows["step"]]


def test_stopped_by_a_time_limit_in_the_middle_of_an_epoch(runs: Path, whole: dict[str, Any]) -> None:
    first = train_here(runs, *WORDS, time_limit_s=1e-9, checkpoint_steps=1000)
    assert (first["steps"], first["epochs"][-1]["partial"]) == (1, True)
    assert_same(train_here(runs, resume=first["run"]), whole)


def test_stopped_again_and_again(runs: Path, whole: dict[str, Any]) -> None:
    """A few steps at a time, by checkpoints within the epoch, at its end, and where a run ends."""
    found = train_here(runs, *WORDS, "max_steps=4", checkpoint_steps=3)
    for stop in (9, 14, 15, 31, 33):
        found = train_here(runs, f"max_steps={stop}", resume=found["run"], checkpoint_steps=4)
        assert [e["epoch"] for e in found["epochs"]] == list(range(1, -(-stop // PER_EPOCH) + 1))
    assert_same(train_here(runs, "max_steps=none", resume=found["run"]), whole)


@pytest.mark.parametrize("step", [1, 14, 16, 33])
def test_ended_by_an_exception_after_any_step(
    runs: Path, whole: dict[str, Any], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill ends it: no last words. What counts is the newest checkpoint."""
    after_step = recorder.Recorder.after_step

    def ended(self: Any, epoch: int, number: int, samples: int) -> None:
        after_step(self, epoch, number, samples)
        if number == step + 1:
            raise KeyboardInterrupt

    before = set(runs.iterdir())
    monkeypatch.setattr(recorder.Recorder, "after_step", ended)
    with pytest.raises(KeyboardInterrupt):
        train_here(runs, *WORDS, checkpoint_steps=1)
    monkeypatch.undo()
    (folder,) = set(runs.iterdir()) - before
    assert_same(train_here(runs, resume=str(folder)), whole)


def test_a_run_that_is_at_its_end_has_its_results_when_it_is_resumed(runs: Path, whole: dict[str, Any]) -> None:
    for words in ((), ("max_steps=20",)):
        first = train_here(runs, *WORDS, *words, checkpoint_every=1)
        again = train_here(runs, resume=first["run"])
        for key in ("weights_sha256", "steps", "test_loss", "train_loss", "train_images"):
            assert again[key] == first[key], key
        assert again["epochs"] == first["epochs"]


def test_checkpoints_change_nothing(runs: Path, whole: dict[str, Any]) -> None:
    assert_same(train_here(runs, *WORDS, checkpoint_every=1, checkpoint_steps=4), whole)


def test_the_epochs_of_a_cut_run_are_said_to_be_cut(runs: Path) -> None:
    cut = Run(Path(train_here(runs, *WORDS, "max_steps=17")["run"]))
    assert [epoch["partial"] for epoch in cut.epochs()] == [False, True]
    assert [epoch["partial"] for epoch in cut.epochs(rank=0)] == [False, True]
