"""`lockstep predict` with real ranks: one fit of a small recipe, and one held-out run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.backends.costs import store
from lockstep.launch import prepare
from lockstep.predict import check, document, measure
from lockstep.predict import fit as fits
from lockstep.predict.held import GROUPS, QUICK
from lockstep.predict.here import here
from lockstep.predict.messages import Message
from lockstep.predict.model import Case, predict
from lockstep.predict.scaling import table
from lockstep.settings import load
from support import Cli

WORDS = (
    "data=embedded",
    "global_batch=16",
    "ranks=2",
    "backend=gloo",
    "strategy=ddp",
    "threads=1",
    "epochs=1",
    "max_steps=30",
)


@pytest.mark.alone
def test_a_fit(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "cache" / "data"))
    monkeypatch.setattr(measure, "SECONDS", 1.0)
    monkeypatch.setattr(measure, "CELL_S", 0.01)
    recipe, placement = load([], WORDS)
    recipe, here_placement, remarks = here(recipe, placement)
    assert (here_placement.ranks, here_placement.launcher, remarks) == (2, "spawn", [])
    told: list[str] = []
    made = measure.make(recipe, here_placement, recipe.global_batch, told.append)
    assert [point.samples for point in made.compute.alone] == [1, 2, 4, 8, 16]
    assert [point.samples for point in made.compute.sharing] == [1, 2, 4, 8, 16]
    assert all(0 < point.backward + point.optimizer < point.seconds for point in made.compute.alone)
    assert [one.samples for one in made.together] == [8, 16, 1, 2], "its own batch, the double, and two small ones"
    # The net has six parameters of 4,266 numbers; gradients come from the last layer to the first.
    assert [gradient.bytes for gradient in made.gradients] == [144, 16, 1152, 32, 15680, 40]
    assert made.gradients[4].ready < made.gradients[2].ready < made.gradients[0].ready <= 1
    assert [len(rank) >= 8 and abs(sum(rank) / len(rank)) < 0.02 for rank in made.noise] == [True, True]
    assert [one.ranks for one in made.software] == [2]
    kept = {cell.message_bytes for cell in store.load() if cell.collective == "all_reduce"}
    assert 17_064 in kept, "kept for backend=auto too"
    # What was measured together is what it says of the same placements, up to their mean, in which each counts by how sure it is.
    steps = [predict(made, Case(micro=one.samples, per_host=2)) for one in made.together]
    off = [step.exchange + step.waiting - one.beyond for step, one in zip(steps, made.together, strict=True)]
    sure = [one.spread**-2 for one in made.together]
    assert sum(s * o for s, o in zip(sure, off, strict=True)) / sum(sure) == pytest.approx(0.0, abs=1e-9)
    # A second fit takes the all-reduce from the store; the command finds the fit that is kept.
    told.clear()
    sent = [Message(bytes=17_064, ready=1.0)]
    again = measure.exchange(here_placement, sent, tmp_path / "again", told.append, anew=False)
    assert (again, told) == (made.software, [])
    fits.save(made)
    asked, assumed = document.ask(
        made, recipe, placement, link=None, weak=False, per_host=None, batch=None, algorithm="auto", every=None
    )
    assert "10gbit,50us, which is assumed" in assumed[0]
    rows = table(made, asked, [2, 4])
    assert rows[2].step
    assert rows[2].step.exchange > 2 * made.software[0].whole(17_064)


@pytest.mark.parametrize(
    ("words", "collectives"),
    [
        (("strategy=flat",), ["all_reduce"]),
        (("ddp.hook=bf16",), ["all_reduce"]),
        (
            ("strategy=fsdp", "regularize.batch_norm=synchronised", "optimizer.clip_norm=1"),
            ["all_gather", "all_reduce", "reduce_scatter"],
        ),
        (("zero=true", "ddp.hook=powersgd", "regularize.batch_norm=synchronised"), ["all_reduce", "broadcast"]),
    ],
)
def test_fits_of_other_strategies(
    words: tuple[str, ...], collectives: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "cache" / "data"))
    monkeypatch.setattr(measure, "SECONDS", 0.5)
    monkeypatch.setattr(measure, "CELL_S", 0.005)
    recipe, placement, _ = here(*load([], [*WORDS, *words]))
    made = measure.make(recipe, placement, recipe.global_batch, lambda text: None)
    assert sorted({one.collective for one in made.software}) == collectives
    assert len(made.together) == 4
    assert len(made.norms) == (2 if "batch_norm" in str(words) else 0)
    assert predict(made, Case(micro=8, per_host=2)).seconds > 0
    folder = tmp_path / "fits"
    fits.save(made, folder)
    assert fits.load(recipe, placement, folder) == made


def test_a_run_without_a_fit_says_how_to_get_one(cli: Cli) -> None:
    cli.environment["LOCKSTEP_DATA"] = str(cli.folder / "cache" / "data")
    prepare(*load([], WORDS), runs=cli.runs, name="mine")
    said = cli.error("predict", "last", code=2)
    assert said == "mine: its recipe has no fit on this machine yet: add --measure (about a minute)"


@pytest.mark.slow
def test_a_survey_fits_and_measures_in_the_same_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How near predictions come is for 'predict --check' to say; here, that both were measured and are of one kind."""
    monkeypatch.setattr(check, "ROUNDS", 4)
    group = QUICK[0]._replace(held=QUICK[0].held[:2])
    made, found, failed = check._survey(group, tmp_path, lambda text: None)
    assert failed == []
    assert [each.held for each in found] == list(group.held)
    assert all(0.4 < each.measured / each.predicted < 2.5 for each in found), found
    assert [point.samples for point in made.compute.alone][-1] == 256


@pytest.mark.slow
def test_ranks_that_crowd_the_cores_are_predicted_from_two_of_the_same_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "ROUNDS", 3)
    monkeypatch.setattr(check, "STARTS", 1)
    group = next(group for group in GROUPS if group.name == "mnist-convnet, fsdp")
    group = group._replace(held=tuple(each for each in group.held if not each.emulated))
    made, found, failed = check._survey(group, tmp_path, lambda text: None)
    assert failed == []
    assert [(each.held.ranks, each.held.kind) for each in found] == [(2, "strategy"), (4, "strategy")]
    assert all(each.predicted > 0 and each.measured > 0 for each in found)
    assert sorted(one.collective for one in made.software) == ["all_gather", "all_reduce", "reduce_scatter"]
    assert len(made.noise) == 2, "two ranks, step by step"
