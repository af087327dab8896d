"""Study files: what they come to, and what is wrong with them in one line; and the plan of their runs. No process is started."""

from __future__ import annotations

import json
import os
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.recipe import Optimizer, Recipe
from lockstep.study import builtin, make, racing
from lockstep.study.definition import Study
from lockstep.study.file import read, with_words
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Cell, Planned, apart, outcome, plan, prepared, run_name

ROOT = Path(__file__).parents[1]
BASE = """
[recipe]
data = "embedded"
train_limit = 480
test_limit = 100
optimizer.lr = 0.002
[placement]
backend = "gloo"
threads = 1
"""


def study_of(folder: Path, text: str, base: str = BASE) -> Study:
    path = folder / "mine.toml"
    # In TOML, keys of the study itself stand above the first table.
    path.write_text(text + base if not text.lstrip().startswith("[") else base + text)
    return read(path)


# ---------------------------------------------------------------- what a file comes to


def test_factors_make_a_grid_of_keys_and_named_bundles(tmp_path: Path) -> None:
    study = study_of(
        tmp_path,
        """
[factors]
global_batch = [48, 96]
optimizer.name = ["adam", "sgd"]
[factors.launch.alone]
ranks = 1
[factors.launch.torchrun]
ranks = 2
launcher = "torchrun"
[cells.extra]
optimizer.lr = 0.1
""",
    )
    cells = study.all_cells()
    assert len(cells) == 2 * 2 * 2 + 1
    assert "global_batch=96, optimizer.name=sgd, torchrun" in cells
    recipe, placement = study.settings("global_batch=96, optimizer.name=sgd, torchrun")
    assert (recipe.global_batch, recipe.optimizer.name, recipe.optimizer.lr) == (96, "sgd", 0.002)
    assert (placement.ranks, placement.launcher, placement.threads) == (2, "torchrun", 1)
    assert study.settings("extra")[0].optimizer.lr == 0.1
    assert study.name == "mine"


def test_a_base_may_come_from_a_recipe_file(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("global_batch = 96\nepochs = 7\n[placement]\nranks = 2\n")
    study = study_of(tmp_path, 'files = ["recipe.toml"]\n[recipe]\nepochs = 1\n', base="")
    recipe, placement = study.settings("base")
    assert (recipe.global_batch, recipe.epochs, placement.ranks) == (96, 1, 2)


def test_seeds_are_the_same_in_all_cells() -> None:
    study = make("mine", Recipe(seed=5), factors={"ranks": [1, 2]}, repeats=4)
    assert (
        [study.seed_of("ranks=1", k) for k in range(4)]
        == [5, 6, 7, 8]
        == [study.seed_of("ranks=2", k) for k in range(4)]
    )
    stated = make("mine", factors={"ranks": [1, 2]}, repeats=4, seeds=[1, 2])
    assert [stated.seed_of("ranks=2", k) for k in range(4)] == [1, 2, 1, 2]


def test_a_study_from_python_keeps_what_the_objects_say() -> None:
    recipe = Recipe(
        data="embedded", optimizer=Optimizer(name="sgd", momentum=0.9), model_args={"k": 2}, model="tied-conv"
    )
    placement = Placement(ranks=2, launcher="torchrun", hosts=2, emulated=True)
    study = make("mine", recipe, placement, cells={"a": {"epochs": 1}, "b": {"epochs": 2}})
    ours, where = study.settings("b")
    assert ours == Recipe(
        data="embedded", optimizer=Optimizer(name="sgd", momentum=0.9), model_args={"k": 2}, model="tied-conv", epochs=2
    )
    assert where == placement


def test_words_and_quick_change_the_base_and_the_levels(tmp_path: Path) -> None:
    study = study_of(
        tmp_path,
        'baseline = "global_batch=48"\n',
        BASE + "[factors]\nglobal_batch = [48, 96]\n[quick]\nrepeats = 2\ntrain_limit = 96\n",
    )
    quick = with_words(study, ["epochs=9", "global_batch=[48, 24]"], quick=True)
    assert (quick.repeats, list(quick.all_cells())) == (2, ["global_batch=48", "global_batch=24"])
    recipe, _ = quick.settings("global_batch=24")
    assert (recipe.train_limit, recipe.epochs) == (96, 9)
    assert with_words(study, [], repeats=7).repeats == 7
    assert with_words(study, ["global_batch=96"]).baseline is None, "the baseline's level was taken away"
    with pytest.raises(InputError, match=r"'epochs' is not key=value"):
        with_words(study, ["epochs"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("repeat = 3\n", "unknown study key 'repeat': did you mean 'repeats'?"),
        ("ranks = 3\n", "unknown study key 'ranks': recipe keys stand in [recipe], placement keys in [placement]"),
        ("repeats = 0\n", "repeats=0: expected a whole number >= 1"),
        ('baseline = "twoo"\n[cells.two]\nranks = 2\n', "baseline: no such cell 'twoo'; did you mean 'two'?"),
        ('metrics = ["second"]\n', "metrics: no such metric 'second'; did you mean 'seconds'?"),
        ("[factors]\nranks = 2\n", "factors.ranks=2: expected a list of values, for example ranks = [1, 2]"),
        ("[factors]\nranks = [2, 2]\n", "a value is there twice"),
        ("[factors]\nrank = [1, 2]\n", "cell 'rank=1': unknown key 'rank': did you mean 'ranks'?"),
        ("[factors]\nepochs = [1, 0]\n", "cell 'epochs=0': epochs=0: expected a whole number >= 1"),
        ("[factors]\nseed = [1, 2]\n", "seeds are the same in all cells; state seeds = [1, 2, …] instead"),
        ("[cells]\ntwo = 2\n", "two: expected a table of keys"),
        ("cells = 3\n", "cells: expected a table, [cells]"),
        ("[factors]\nglobal_batch = [" + ",".join(map(str, range(1, 10_002))) + "]\n", "10,001 cells are more than 10,000"),
        ("repeats = \n", "is not TOML"),
    ],
)  # fmt: skip
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read(path)
    assert message in str(error.value)
    assert "wrong.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_study_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'batch-size'"):
        builtin.find("batch-sizes")
    with pytest.raises(InputError, match=r"study file none\.toml: No such file"):
        builtin.find("none.toml")


# ---------------------------------------------------------------- the built-in ones


def test_every_published_experiment_has_its_study() -> None:
    wanted = {
        "launchers", "batch-size", "accumulation", "optimizers", "backends", "precision", "regularization", "augmentation",
        "topology", "scaling", "workers", "quantization", "fused-kernel", "cifar",
    }  # fmt: skip
    assert set(builtin.published()) == wanted
    assert {study.name for study in builtin.find("published")} == wanted


def test_the_optimizers_study_is_fair_and_keeps_the_trainings_of_its_pack() -> None:
    (study,), (search,) = builtin.find("optimizers"), builtin.find("optimizer-rates")
    with zipfile.ZipFile(ROOT / "docs/studies/optimizers.study.zip") as pack:
        packed = msgspec.json.decode(pack.read("study/study.json"), type=Planned)
    # A training is known again by its recipe: the same cells still have the recipes that were trained.
    for cell in packed.cells:
        assert study.settings(cell.name)[0] == cell.recipe
    one_rate = {
        study.settings(cell)[0].optimizer.name: study.settings(cell)[0].optimizer.lr
        for cell in study.factors["optimizer.name"]
    }
    own = [study.settings(cell)[0].optimizer for cell in study.cells]
    assert {each.name for each in own} == one_rate.keys()
    assert len(set(one_rate.values())) == 1
    assert all(each.weight_decay > 0 for each in own if each.name == "adamw")
    searched = [search.settings(cell)[0].optimizer for cell in search.all_cells()]
    for each in own:
        alike = [other.lr for other in searched if replace(other, lr=each.lr) == each]
        assert min(alike) < each.lr < max(alike), "the search went beyond it on both sides"
    assert not set(search.seeds) & {study.seed_of(study.baseline or "", repeat) for repeat in range(4 * study.repeats)}


def test_the_study_of_the_fused_kernel_fuses_only_what_it_calls_fused() -> None:
    (study,) = builtin.find("fused-kernel")
    assert {cell: study.settings(cell)[0].fused for cell in study.all_cells()} == {
        cell: cell.endswith("fused") for cell in study.all_cells()
    }


@pytest.mark.parametrize("name", builtin.names())
def test_built_in_studies_are_whole(name: str) -> None:
    (study,) = builtin.find(name)
    quick = with_words(study, [], quick=True)
    assert study.about
    assert 3 <= quick.repeats <= 10
    for cell in quick.all_cells():
        quick.settings(cell)
    for published in study.published:
        assert published.claims
        assert set(published.figures) <= set(study.all_cells())
        assert published.source[0] in "ABCD"


@pytest.mark.parametrize("name", builtin.names())
def test_a_quick_study_is_over_in_five_minutes_and_its_race_leaves_half_of_them_for_training(name: str) -> None:
    (study,) = builtin.find(name)
    quick = with_words(study, [], quick=True)
    settings = {cell: quick.settings(cell) for cell in quick.all_cells()}
    cells = [Cell(name=cell, recipe=recipe, placement=placement) for cell, (recipe, placement) in settings.items()]
    assert quick.budget_minutes == 5
    assert racing.budget_of(Planned(study=quick, cells=cells, items=[])) <= 150


# ---------------------------------------------------------------- the plan


def planned_of(folder: Path, text: str = "[factors]\nranks = [1, 2, 3]\n", **changes: object) -> Planned:
    study = study_of(folder, text)
    words = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    return plan(with_words(study, words), runs=folder / "runs")


def test_cells_that_compute_the_same_are_trained_once(tmp_path: Path) -> None:
    planned = planned_of(tmp_path, global_batch=48, repeats=6)
    assert [(item.cell, item.repeat, item.seed) for item in planned.items] == [
        ("ranks=1", k, 123 + k) for k in range(6)
    ]
    assert len({item.digest for item in planned.items}) == 6
    assert [cell.name for cell in planned.alike("ranks=2")] == ["ranks=1", "ranks=2", "ranks=3"]
    assert not (tmp_path / "runs").exists(), "planning leaves nothing behind"


COMPUTED = """
[cells.alone]
ranks = 1
[cells.stated-per-rank]
ranks = 2
batch_per_rank = 24
[cells.accumulated]
ranks = 2
accumulation = 4
[cells.scaled]
ranks = 2
batch_per_rank = 24
lr_rule = "linear"
lr_batch = 24
[cells.averaged]
ranks = 2
strategy = "local-sgd"
[cells.compressed]
ranks = 2
ddp.hook = "fp16"
[cells.longer]
epochs = 4
[cells.normed]
regularize.batch_norm = "synchronised"
[cells.normed-accumulated]
regularize.batch_norm = "synchronised"
accumulation = 2
"""


def test_what_is_computed_decides_not_how_it_is_stated(tmp_path: Path) -> None:
    planned = planned_of(tmp_path, COMPUTED, global_batch=48, repeats=2)
    groups = {tuple(cell.name for cell in planned.alike(one.name)) for one in planned.cells}
    together = ("alone", "stated-per-rank", "accumulated")
    others = {cell.name for cell in planned.cells} - {*together}
    assert groups == {together, *((name,) for name in others)}
    # As many seeds as could be needed: four times as many, where recipes are compared.
    assert max(item.repeat for item in planned.items) == 7
    assert len(planned.expected(())) == 2 * (1 + len(others))


def test_where_only_times_are_asked_for_one_training_checks_them(tmp_path: Path) -> None:
    planned = planned_of(tmp_path, metrics=["seconds", "memory"], global_batch=48)
    assert {item.repeat for item in planned.items} == {0}


def test_identities_stay_until_the_recipe_changes(tmp_path: Path) -> None:
    def digests(**changes: object) -> dict[tuple[str, int], str]:
        return {
            (item.cell, item.repeat): item.digest for item in planned_of(tmp_path, global_batch=48, **changes).items
        }

    base = digests()
    assert digests() == base
    assert base.items() <= digests(repeats=9).items(), "more repeats keep the runs there are"
    assert not set(base.values()) & set(digests(epochs=2).values())
    assert base == digests(timeout_s=30.0), "another placement computes the same"


def test_a_cell_that_is_found_to_compute_something_else_is_trained_by_itself(tmp_path: Path) -> None:
    planned = planned_of(tmp_path, global_batch=48)
    changed = apart(planned, "ranks=2", "its gradients differ")
    assert {item.cell for item in changed.items} == {"ranks=1", "ranks=2"}
    assert [cell.name for cell in changed.alike("ranks=3")] == ["ranks=1", "ranks=3"]
    assert changed.cell("ranks=2").unproven == "its gradients differ"
    kept = {item.digest for item in changed.items if item.cell == "ranks=1"}
    assert {item.digest for item in planned.items} <= kept


def test_a_changed_model_file_is_a_changed_recipe(tmp_path: Path) -> None:
    net = tmp_path / "net.py"
    net.write_text("import torch\n")
    first = planned_of(tmp_path, model=f"{net}:Net", global_batch=48).items[0].digest
    assert planned_of(tmp_path, model=f"{net}:Net", global_batch=48).items[0].digest == first
    net.write_text("import torch\n# changed\n")
    assert planned_of(tmp_path, model=f"{net}:Net", global_batch=48).items[0].digest != first


def test_a_cell_that_cannot_run_here_is_left_out_and_says_why(tmp_path: Path) -> None:
    planned = planned_of(tmp_path, global_batch=50)
    (left,) = [cell for cell in planned.cells if cell.left_out]
    assert left.name == "ranks=3"
    assert left.left_out == "global_batch=50 does not divide by ranks=3: choose global_batch=48 or 51"
    assert {item.cell for item in planned.items} == {"ranks=1"}
    with pytest.raises(InputError, match="no cell can run here; 'ranks=3': global_batch=50 does not divide"):
        planned_of(tmp_path, "[factors]\nranks = [3, 7]\n", global_batch=50)


def test_hosts_that_each_need_a_command_are_not_for_a_study(tmp_path: Path) -> None:
    hosts = '[cells.a]\nranks = 1\n[cells.b]\nranks = 2\nhosts = 2\nrendezvous = "10.0.0.1:29500"\n'
    planned = planned_of(tmp_path, hosts)
    assert "use launcher=slurm or hosts=emulated:2" in (planned.cell("b").left_out or "")


def test_what_is_done_and_what_failed_is_not_run_again_and_what_was_killed_is(tmp_path: Path) -> None:
    planned = planned_of(tmp_path, global_batch=48, repeats=6)
    runs = tmp_path / "runs"
    folder = StudyFolder.of("mine", runs)
    folder.write(planned)
    for item, state in zip(planned.items, ("done", "failed", "cancelled", "running", "planned"), strict=False):
        run, _ = prepared(planned, item, "ranks=2", None, runs, known=partial(folder.begins, item))
        assert run.spec().placement.ranks == 2
        # The process that watched it is gone: 2^22 is above every pid that Linux gives.
        run.write_status(state, supervisor_pid=1 << 22, host=os.uname().nodename)
    folder.begins(planned.items[5], "killed-before-its-folder-was-made")
    there = folder.runs_of(planned.items)
    assert [outcome(there.get(item.digest)) for item in planned.items[:6]] == [
        "done",
        "failed",
        "to do",
        "to do",
        "to do",
        "to do",
    ]
    assert outcome(there[planned.items[1].digest], again=True) == "to do"
    name = run_name(planned, planned.items[0], "ranks=2", tmp_path)
    assert name.endswith(planned.items[0].digest)
    assert "/" not in name


def test_a_study_of_which_only_variants_were_run_is_found(tmp_path: Path) -> None:
    def made(changed: float, **how: Any) -> StudyFolder:
        folder = StudyFolder.of("mine", tmp_path, **how)
        folder.path.mkdir(parents=True)
        (folder.path / "study.json").write_text("{}")
        os.utime(folder.path / "study.json", (changed, changed))
        return folder

    def found(name: str) -> str | None:
        folder = StudyFolder.find(name, tmp_path)
        return folder.name if folder else None

    assert found("mine") is None
    other = made(1.0, words=("epochs=1",))
    assert found("mine") == other.name
    quick = made(2.0, quick=True)
    assert found("mine") == quick.name == "mine-quick", "the newest variant"
    assert found("min") is None
    assert found("mine-quick") == quick.name
    made(0.0)
    assert found("mine") == "mine", "the study itself comes before its variants"
