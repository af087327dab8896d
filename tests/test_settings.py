"""Settings: files and words, and errors that name the key and the fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.recipe import Optimizer, Recipe, unused_settings
from lockstep.run import Options
from lockstep.settings import all_keys, as_toml, checked, load, parse_value


def test_words_go_where_they_belong() -> None:
    recipe, placement = load(
        [], ["ranks=2", "global_batch=64", "optimizer.lr=1e-2", "model_args.k=3", "shuffle=false", "data=cifar10"]
    )
    assert (placement.ranks, recipe.global_batch, recipe.optimizer.lr) == (2, 64, 0.01)
    assert (recipe.model_args, recipe.shuffle, recipe.data) == ({"k": 3}, False, "cifar10")


def test_a_file_then_words_over_it(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("epochs = 9\noptimizer.lr = 0.1\n[placement]\nranks = 4\n")
    recipe, placement = load([file], ["epochs=1"])
    assert (recipe.epochs, recipe.optimizer.lr, placement.ranks) == (1, 0.1, 4)


def test_the_last_word_about_hosts_says_whether_they_are_emulated(tmp_path: Path) -> None:
    file, resolved = tmp_path / "a.toml", tmp_path / "b.toml"
    file.write_text('[placement]\nranks = 2\nhosts = "emulated:2"\n')
    resolved.write_text(as_toml(*load([file], [])))
    for source in (file, resolved):
        hosts = [(made.hosts, made.emulated) for _, made in (load([source], words) for words in ([], ["hosts=1"]))]
        assert hosts == [(2, True), (1, False)], source.read_text()
    for words in (["hosts=emulated:3", "hosts=2"], ["placement.hosts=2"]):
        assert not load([file], words)[1].emulated
    assert load([], ["emulated=true", "hosts=2"])[1].emulated
    assert load([], ["hosts=1"], {"emulated": True, "hosts": 4})[1] == Placement()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("epoch=3", "unknown key 'epoch': did you mean 'epochs'?"),
        ("batch=32", "unknown key 'batch': did you mean 'global_batch'?"),
        ("lr=0.1", "unknown key 'lr': did you mean 'optimizer.lr'?"),
        ("optimizer.learning=0.1", "unknown key 'optimizer.learning'"),
        ("global_batch=abc", "global_batch=abc: expected a whole number"),
        ("global_batch=1.5", "global_batch=1.5: expected a whole number"),
        ("optimizer.lr=abc", "optimizer.lr=abc: expected a number"),
        ("shuffle=maybe", "shuffle=maybe: expected true or false"),
        ("epochs=0", "epochs=0: expected a whole number >= 1"),
        ("epochs=-2", "epochs=-2: expected a whole number >= 1"),
        ("optimizer.lr=0", "optimizer.lr=0: expected a number > 0"),
        ("ranks=0", "ranks=0: expected a whole number >= 1"),
        ("seed=-1", "seed=-1: expected a whole number >= 0"),
        ("optimizer.name=adamm", "optimizer.name=adamm: expected one of adam, adamw, rmsprop, sgd"),
        ("fused=maybe", "fused=maybe: expected auto, true or false"),
        ("device=gpu", "device=gpu: expected one of auto, cpu, cuda"),
        ("optimizer=adam", "optimizer=adam: state its parts"),
        ("hello", "'hello' is not key=value"),
    ],
)
def test_bad_words(word: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        load([], [word])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epochs = ", "is not TOML"),
        ("epoch = 3", "did you mean 'epochs'?"),
        ("[placement]\nrank = 2", "did you mean 'ranks'?"),
        ("[placement]\nepochs = 2", "unknown key 'epochs'"),
        ("model_args = 3", "model_args=3: state its parts"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(InputError) as error:
        load([file], [])
    assert message in str(error.value)
    assert "bad.toml" in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load([tmp_path / "none.toml"], [])


def test_what_is_printed_can_be_read_again(tmp_path: Path) -> None:
    recipe = Recipe(
        model="a/b.py:Net",
        model_args={"k": 2, "name": 'quo"te'},
        optimizer=Optimizer(name="sgd", momentum=0.9),
        max_steps=5,
    )
    placement = Placement(ranks=2, threads=1, timeout_s=5)
    file = tmp_path / "again.toml"
    file.write_text(as_toml(recipe, placement))
    assert load([file], []) == (recipe, placement)


@given(st.one_of(st.integers(), st.booleans(), st.text(alphabet="abcxyz./:-_", min_size=1)))
def test_plain_values_survive(value: object) -> None:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    expected = None if text == "none" else value
    assert parse_value(text) == expected


def test_every_key_is_listed() -> None:
    keys = all_keys()
    assert {"global_batch", "ranks", "optimizer.lr", "seed"} <= set(keys)
    assert len(keys) == len(set(keys))


def test_settings_without_effect_are_named() -> None:
    found = unused_settings(Recipe(optimizer=Optimizer(name="adam", momentum=0.9)))
    assert found == ["optimizer.momentum=0.9 has no effect with optimizer.name=adam"]
    assert "set a momentum" in unused_settings(Recipe(optimizer=Optimizer(name="sgd", nesterov=True)))[0]
    assert unused_settings(Recipe()) == []


class _Net:
    """What a user may have defined in a notebook."""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Recipe(global_batch=0), "global_batch=0: expected a whole number >= 1"),
        (Recipe(epochs=-1), "epochs=-1: expected a whole number >= 1"),
        (Recipe(epochs="3"), "epochs=3: expected a whole number"),  # type: ignore[arg-type]
        (Recipe(precision="fp8"), "precision=fp8: expected one of bf16"),  # type: ignore[arg-type]
        (Recipe(optimizer=Optimizer(lr=-1)), "optimizer.lr=-1: expected a number > 0"),
        (Placement(ranks=0), "ranks=0: expected a whole number >= 1"),
        (Options(checkpoint_every="x"), "checkpoint_every=x: expected a whole number"),  # type: ignore[arg-type]
        (Recipe(model=_Net), "model=_Net: ranks import it: state model='test_settings:_Net'"),  # type: ignore[arg-type]
        (Recipe(data=lambda: 0), "state data='path/to/file.py:NAME'"),  # type: ignore[arg-type]
        (Recipe(model_args={"net": object()}), "Recipe: "),  # type: ignore[dict-item]
    ],
)
def test_what_is_made_in_python_is_held_to_the_same_rules(settings: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        checked(settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert checked(Recipe()) == Recipe()


def test_a_class_of_a_notebook_is_told_how_to_be_named(tmp_path: Path) -> None:
    _Net.__module__ = "__main__"
    with pytest.raises(
        InputError, match=r"lockstep.run\(model=_Net\), or write it into a file and state model='path/to/"
    ):
        lockstep.run(Recipe(model=_Net), runs=tmp_path)  # type: ignore[arg-type]


def test_no_suggestion_is_better_than_a_wrong_one() -> None:
    for word, message in (
        ("criterion=mse", "did you mean 'loss'?"),
        ("learning_rate=1", "did you mean 'optimizer.lr'?"),
        ("momentun=1", "did you mean 'optimizer.momentum'?"),
        ("qqq=1", "unknown key 'qqq': known keys are model, "),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            load([], [word])
