"""Words, recipe files, study files and whole command lines: an answer, or one line that says what is wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import click
import folders
import hostile
import pytest
from harness import answer, command, count, examples
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan import plan
from lockstep.settings import as_toml, load

NAMES = ["alone", "last", "mine", "study-one", "runs/alone", "runs/studies/mine", "good.toml", "study.toml", "out.html", "out.md", "out.csv", "runs", "new", "nowhere/x"]  # fmt: skip
_numbers = itertools.count()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to be in, with runs, a study and files."""
    where = tmp_path_factory.mktemp("place")
    folders.study_folder(where / "runs", repeats=1)
    folders.run_folder(where / "runs", "alone", "one")
    (where / "good.toml").write_text('data = "embedded"\ntrain_limit = 64\n[placement]\nranks = 2\n')
    (where / "study.toml").write_text(
        'repeats = 2\n[recipe]\ndata = "embedded"\ntrain_limit = 64\n[factors]\nranks = [1, 2]\n'
    )
    return where


@pytest.fixture(autouse=True)
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("LOCKSTEP_RUNS", raising=False)
    monkeypatch.delenv("LOCKSTEP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))


@examples("words")
@given(words=hostile.words(), whole=st.integers(0, 19))
def test_words(words: list[str], whole: int) -> None:
    count("words")
    found = answer(lambda: load([], words))
    if isinstance(found, tuple):
        answer(lambda: plan(*found, 1000, 500))
        # What was understood can be written down and understood again.
        text = as_toml(*found)
        Path("again.toml").write_text(text)
        assert load([Path("again.toml")], []) == found, text
    if not whole:
        command("run", *words, "--dry-run")


@examples("recipe files")
@given(text=hostile.toml(hostile.KEYS))
def test_recipe_files(text: str) -> None:
    count("recipe files")
    path = Path("a.toml")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    answer(lambda: load([path], []))


@examples("study files")
@given(text=hostile.toml(hostile.STUDY_KEYS), words=hostile.words(), dry=st.integers(0, 4))
def test_study_files(text: str, words: list[str], dry: int) -> None:
    count("study files")
    Path("s.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    more = [] if dry else words[:1]
    command("study", "run", "s.toml", *more, "--dry-run")


@examples("command lines")
@given(words=hostile.command_line(NAMES))
def test_command_lines(words: list[str]) -> None:
    count("command lines")
    command(*words)


NOT_NAMES = ["n" * 5000, "~nobody-is-called-so/x", "a/" * 3000 + "x", "x.py/y", "a.py:" + "n" * 5000]
NEEDED = {"race": [["ranks=1", "threads=2"]], "study run": [["study.toml"], ["workers", "--quick"]]}


@pytest.mark.parametrize("name", sorted(hostile.COMMANDS))
def test_names_that_nothing_can_have(name: str) -> None:
    """In the place of every value of every command, with and without the run or study that it asks for."""
    for option in hostile.COMMANDS[name].params:
        for value in NOT_NAMES:
            given = [value] if isinstance(option, click.Argument) else [option.opts[0], value]
            if not getattr(option, "is_flag", False):
                for needed in ([], ["alone"], *NEEDED.get(name, [])):
                    command(*name.split(), *needed, *given)
