"""The schemas that editors complete keys by: every file of ours is valid, and a slip is not."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from lockstep.cli.schema import EPILOG
from lockstep.settings import all_keys
from lockstep.study.schema import recipe_file, study_file
from support import Cli

ROOT = Path(__file__).parents[1]
RECIPES = [*ROOT.glob("src/lockstep/recipes/published/*.toml"), *ROOT.glob("examples/*.toml")]
STUDIES = [*ROOT.glob("src/lockstep/study/builtin/*.toml"), *ROOT.glob("docs/studies/*.toml")]


def problems(schema: dict[str, Any], text: str) -> list[str]:
    return [error.message for error in Draft202012Validator(schema).iter_errors(tomllib.loads(text))]


def test_every_file_of_ours_is_valid() -> None:
    assert len(RECIPES) > 20
    assert len(STUDIES) > 10
    for schema, paths in ((recipe_file(), RECIPES), (study_file(), STUDIES)):
        Draft202012Validator.check_schema(schema)
        for path in paths:
            assert problems(schema, path.read_text()) == [], path.name


def test_a_recipe_that_is_printed_names_the_schema_beside_it(cli: Cli) -> None:
    """By the name that the help of `lockstep schema` writes it to, so that an editor finds it."""
    (cli.folder / "recipe.schema.json").write_text(cli("schema", "recipe").stdout)
    for words in (("run", "data=embedded", "--dry-run"), ("recipes", "published/d-mnist")):
        first, _, rest = cli(*words).stdout.partition("\n")
        name = first.removeprefix("#:schema ")
        assert name != first
        assert f"> {Path(name).name}" in EPILOG
        recipe = rest.partition("# global batch")[0]
        assert problems(json.loads((cli.folder / name).read_text()), recipe) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("globalbatch = 3", "globalbatch"),
        ("optimizer.learning_rate = 1", "learning_rate"),
        ('optimizer.name = "adma"', "adma"),
        ("global_batch = 0", "0 is less than"),
        ("[placement]\nrank = 2", "rank"),
        ('[placement]\nhosts = "emulated"', "emulated"),
    ],
)
def test_a_slip_in_a_recipe_is_found(text: str, said: str) -> None:
    assert any(said in problem for problem in problems(recipe_file(), text))


@pytest.mark.parametrize(
    "text", ['metrics = ["second"]', "[cells.a]\nrank = 2", "[quick]\nepoch = 1", "name = 3", "[factors]\nranks = 2"]
)
def test_a_slip_in_a_study_is_found(text: str) -> None:
    assert problems(study_file(), text)


def test_every_key_is_there_and_says_what_it_is_where_the_source_does(cli: Cli) -> None:
    schema = json.loads(cli("schema", "recipe").stdout)
    definitions, top = schema["$defs"], schema["properties"]
    for key in all_keys():
        table, dot, inner = key.partition(".")
        owner = top if table in top else top["placement"]["properties"]
        found = definitions[owner[table]["$ref"].rpartition("/")[2]]["properties"][inner] if dot else owner[table]
        assert found, key
    assert top["lr_batch"]["description"] == "The global batch that `optimizer.lr` was meant for."


@pytest.mark.parametrize(
    ("words", "kind"), [(("recipes", "published/d-mnist"), "recipe"), (("study", "copy", "batch-size"), "study")]
)
def test_a_file_of_ones_own_has_its_schema_beside_it(cli: Cli, words: tuple[str, ...], kind: str) -> None:
    (cli.folder / "new").mkdir()
    made = cli(*words, "-o", "new/mine.toml")
    assert made.returncode == 0, made.stderr
    text = (cli.folder / "new/mine.toml").read_text()
    assert text.startswith(f"#:schema ./{kind}.schema.json\n")
    assert problems(json.loads((cli.folder / f"new/{kind}.schema.json").read_text()), text) == []
    assert "is there already" in cli.error(*words, "-o", "new/mine.toml", code=2)
    assert (cli.folder / "new/mine.toml").read_text() == text
    planned = cli(*made.stderr.split("next: lockstep ")[1].partition(" (")[0].split(), "data=embedded")
    assert planned.returncode == 0, planned.stderr


def test_what_cannot_be_copied_is_one_line(cli: Cli) -> None:
    assert "did you mean 'batch-size'" in cli.error("study", "copy", "batchsize", "-o", "mine.toml", code=2)
    assert "there is no folder" in cli.error("study", "copy", "batch-size", "-o", "no/mine.toml", code=2)
    assert "name one" in cli.error("recipes", "-o", "mine.toml", code=2)
    assert not (cli.folder / "mine.toml").exists()
