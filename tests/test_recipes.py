"""The published recipes: every file says where it comes from, holds the report's settings, and runs."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import recipes
from lockstep.errors import InputError
from lockstep.launch import specify
from lockstep.models import CATALOGUE
from lockstep.recipe import unused_settings
from lockstep.recipes import Published, path_of, published
from lockstep.run import Run
from lockstep.settings import load
from lockstep.verify.records import step_losses
from support import Cli, train_here

NAMES = [recipe.name for recipe in published()]
# The settings that the documents state, written down once more, by hand.
ADAM = {"optimizer.name": "adam", "optimizer.lr": 5e-4, "optimizer.weight_decay": 5e-4}
D = {
    "model": "mnist-convnet",
    "data": "mnist",
    "batch_per_rank": 32,
    "shuffle": False,
    "epochs": 3,
    "seed": 123,
    **ADAM,
}
A = {"model": "cifar-vgg", "data": "cifar10", "normalize": "half", "shuffle": False, "epochs": 20, **ADAM}
C = {
    "data": "cifar10", "epochs": 15, "batch_per_rank": 32, "augment.flip": True, "optimizer.name": "adamw",
    "optimizer.weight_decay": 5e-2, "optimizer.lr": 1e-3, "schedule.name": "onecycle",
}  # fmt: skip
STATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "d-mnist": (D, {"ranks": 1, "threads": 1, "eval_batch": 128}),
    "d-mnist-1x2": (D, {"ranks": 2, "launcher": "torchrun", "backend": "gloo", "strategy": "ddp"}),
    "d-mnist-2x1": (D, {"ranks": 2, "hosts": 2, "launcher": "slurm", "backend": "gloo", "strategy": "ddp"}),
    "d-mnist-2x2": (D, {"ranks": 4, "hosts": 2, "launcher": "slurm", "backend": "gloo", "strategy": "ddp"}),
    "d-mnist-2x2-mpi": (D, {"ranks": 4, "hosts": 2, "backend": "mpi"}),
    "a-cifar": ({**A, "batch_per_rank": 32}, {"ranks": 1}),
    "a-cifar-ddp": ({**A, "batch_per_rank": 32}, {"ranks": 2, "strategy": "ddp", "backend": "gloo"}),
    "a-cifar-256": ({**A, "batch_per_rank": 256}, {"ranks": 1}),
    "a-cifar-256-ddp": ({**A, "batch_per_rank": 256}, {"ranks": 2, "strategy": "ddp", "backend": "gloo"}),
    "a-cifar-mixed": ({**A, "batch_per_rank": 256, "epochs": 10, "precision": "fp16"}, {"ranks": 2, "strategy": "ddp"}),
    "a-cifar-regularized": (
        {**A, "batch_per_rank": 256, "early_stopping.patience": 2, "early_stopping.on": "test_loss"},
        {"ranks": 2, "strategy": "ddp"},
    ),
    "b-single": ({"optimizer.name": "adam"}, {"ranks": 1}),
    "b-spawn": ({"optimizer.name": "adam"}, {"ranks": 2, "launcher": "spawn", "strategy": "ddp"}),
    "b-torchrun": ({"optimizer.name": "adam"}, {"ranks": 2, "launcher": "torchrun", "strategy": "ddp"}),
    "b-batch-16": ({"global_batch": 16}, {"ranks": 1}),
    "b-batch-128": ({"global_batch": 128}, {"ranks": 1}),
    "b-accumulation": ({"global_batch": 128}, {"accumulation": 4}),
    "b-sgd": ({"optimizer.name": "sgd"}, {"ranks": 1}),
    "b-rmsprop": ({"optimizer.name": "rmsprop"}, {"ranks": 1}),
    "c-tied-2": ({"model": "tied-conv", "data": "mnist", "model_args": {"k": 2}}, {"ranks": 1}),
    "c-tied-10": ({"model": "tied-conv", "data": "mnist", "model_args": {"k": 10}}, {"ranks": 1}),
    "c-cifar-augmented": (C, {"ranks": 1}),
    "c-cifar-augmented-ddp": (C, {"ranks": 2, "strategy": "ddp"}),
}  # fmt: skip
# The embedded set of the same shape: the published ones may have to be fetched.
INSTEAD = {"mnist": "embedded", "fashion-mnist": "embedded", "cifar10": "embedded-color"}


def at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = getattr(tree, part)
    return tree


def test_the_list_is_complete() -> None:
    assert [name.removeprefix("published/") for name in NAMES] == sorted(STATED)


@pytest.mark.parametrize("recipe", published(), ids=lambda recipe: recipe.name)
def test_a_file_says_what_its_document_says(recipe: Published) -> None:
    settings, placement = load([recipe.path], [])
    in_recipe, in_placement = STATED[recipe.path.stem]
    assert {key: at(settings, key) for key in in_recipe} == in_recipe
    assert {key: at(placement, key) for key in in_placement} == in_placement
    assert unused_settings(settings) == []
    comment = [line for line in recipe.text().splitlines() if line.startswith("#")]
    for part in (f"# Document {recipe.document}: ", "# Stated: ", "# Open, so ours: ", "# Measured by the report: "):
        assert any(line.startswith(part) for line in comment), part
    assert recipe.path.stem[0].upper() == recipe.document
    assert CATALOGUE[settings.model].data == settings.data or settings.data == "fashion-mnist"


@pytest.mark.parametrize("name", NAMES)
def test_every_file_can_be_planned(name: str, tmp_path: Path) -> None:
    """As far as a dry run goes: resolved, counted, with its launch command."""
    path = path_of(name)
    assert path
    recipe, _ = load([path], [])
    _, spec = specify(*load([path], [f"data={INSTEAD[recipe.data]}"]), runs=tmp_path)
    assert spec.plan.train_samples == 12_000
    share = recipe.batch_per_rank or recipe.global_batch // spec.plan.ranks
    assert spec.plan.global_batch == share * spec.plan.ranks
    assert spec.command


def test_names_and_near_misses() -> None:
    assert path_of("published/d-mnist") == recipes.FOLDER / "published/d-mnist.toml"
    assert [path_of(word) for word in ("epochs=3", "mine.toml", "train.py", "something")] == [None] * 4
    for word in ("published/d-mnits", "d-mnist", "dmnist", "published/D-mnist"):
        with pytest.raises(InputError, match="did you mean 'published/d-mnist'"):
            path_of(word)
    with pytest.raises(InputError, match="see lockstep recipes"):
        path_of("published/zebra")


def test_the_command_lists_and_prints(cli: Cli) -> None:
    listed = json.loads(cli("recipes", "--json").stdout)
    assert [row["name"] for row in listed] == NAMES
    assert all(row["about"] and row["document"] in "ABCD" for row in listed)
    table = cli("recipes").stdout
    assert all(name in table for name in NAMES)
    shown = cli("recipes", "published/d-mnist")
    printed = shown.stdout
    assert printed == "#:schema ./recipe.schema.json\n" + (recipes.FOLDER / "published/d-mnist.toml").read_text()
    assert shown.stderr.startswith("next: lockstep run published/d-mnist --dry-run ")
    assert tomllib.loads(printed)["optimizer"]["lr"] == 5e-4
    document = json.loads(cli("recipes", "d-mnist", "--json").stdout)
    assert document["recipe"]["batch_per_rank"] == 32
    assert "did you mean 'published/a-cifar'" in cli.error("recipes", "a-cifra", code=2)


def test_a_published_recipe_runs_by_name(module_cli: Cli) -> None:
    """Document D's on two ranks: 32 samples a rank in the order of the file, against the same written out, in one process."""
    words = ("data=embedded", "max_steps=6", "test_limit=100")
    named = module_cli.run("published/d-mnist", *words, "ranks=2", "backend=gloo")
    assert named["plan"]["global_batch"] == 64
    assert named["recipe"]["shuffle"] is False
    written = train_here(
        module_cli.runs, "model=mnist-convnet", "shuffle=false", "global_batch=64", "epochs=3", "seed=123", "optimizer.lr=5e-4",
        "optimizer.weight_decay=5e-4", "threads=1", *words,
    )  # fmt: skip
    one, other = (step_losses(Run(Path(document["run"]))) for document in (named, written))
    np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["published/c-cifar-augmented", "published/a-cifar-regularized"])
def test_the_larger_recipes_run_too(module_cli: Cli, name: str) -> None:
    words = ("data=embedded-color", "batch_per_rank=8", "train_limit=64", "test_limit=50", "epochs=2", "ranks=2")
    document = module_cli.run(name, *words, "backend=gloo")
    assert document["state"] == "done"
    assert document["steps"] == 8
    assert document["ranks_agree"]
    assert all(np.isfinite(epoch["train_loss"]) for epoch in document["epochs"])


def test_a_dry_run_prints_the_settings(cli: Cli) -> None:
    plan = cli("run", "published/d-mnist-2x2", "data=embedded", "launcher=torchrun", "hosts=emulated:2", "--dry-run")
    assert "global batch 128 = 4 ranks x 32 micro batch x 1 accumulation" in plan.stdout
    assert "did you mean 'published/d-mnist-2x2'" in cli.error("run", "published/d-mnist-2x3", code=2)
