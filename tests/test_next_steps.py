"""Every command ends with what to type next, or is listed here with the reason why it does not."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from command_lines import next_ones, refused
from lockstep.cli.commands import COMMANDS, call
from lockstep.cli.commands import cli as cli_group
from lockstep.cli.output import next_step

WITHOUT = {
    "dashboard": "it serves until it is stopped, and its pages have links",
    "data show": "shows images or text: what there is to see is the end of it",
    "data verify": "says whether files are right; a wrong one is an error, with the way out",
    "schema": "prints a file for editors",
    "completion": "prints a script for the shell",
}


def leaves(command: click.Command, path: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                yield from leaves(inner, f"{path} {name}".strip())
    else:
        assert command.callback is not None
        yield path, inspect.unwrap(command.callback)


ALL = dict(leaves(cli_group))


def called(function: Any) -> Iterator[Any]:
    """The functions that a command names, and those that these name, as far as they are of lockstep.cli; imports within functions too."""
    waiting, seen = [function], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        yield one
        if one is not next_step and (getattr(one, "__module__", None) or "").startswith("lockstep.cli"):
            waiting += named(one)


def named(one: Any) -> list[Any]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
    imported = [
        getattr(importlib.import_module(node.module), alias.name, None)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lockstep.cli")
        for alias in node.names
    ]
    there: Mapping[str, Any] = vars(inspect.getmodule(one))
    ours = [there.get(node.id) for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return [each for each in (*imported, *ours) if inspect.isfunction(each) or inspect.isclass(each)]


def test_every_command_is_looked_at() -> None:
    assert {path.split()[0] for path in ALL} == {*COMMANDS}


@pytest.mark.parametrize("path", ALL)
def test_a_command_says_what_to_type_next_or_has_a_reason(path: str) -> None:
    assert (next_step in called(ALL[path])) is (path not in WITHOUT), path


QUICK = ("recipes", "recipes published/d-mnist", "data list", "study list", "lab list")


def stderr_of(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert call(words.split()) == 0
    return capsys.readouterr().err


@pytest.mark.parametrize("words", QUICK)
def test_json_has_no_next_step_and_text_has_one_that_is_accepted(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_RUNS", str(tmp_path))
    assert "next: " not in stderr_of(capsys, f"{words} --json")
    found = next_ones(stderr_of(capsys, words))
    assert found
    assert [why for line in found if (why := refused(line))] == []


@pytest.mark.parametrize("words", ["schema study", "completion bash"])
def test_what_is_written_for_programs_ends_without_a_next_step(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stderr_of(capsys, words) == ""


def test_next_ones_are_found_and_wrong_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    next_step(
        "lockstep race ranks=1 'ranks=2 backend=shm' --all data=embedded (which is faster); lockstep runs --runs 'a b'"
    )
    found = next_ones("lockstep: warning\n" + capsys.readouterr().err)
    assert found == [
        ["race", "ranks=1", "ranks=2 backend=shm", "--all", "data=embedded"],
        ["runs", "--runs", "a b"],
    ]
    assert [refused(line) for line in found] == ["", ""]
    assert next_ones("next: cd 'mine' && lockstep lab run one (when it is complete)\n") == [["lab", "run", "one"]]
    assert next_ones("next: tensorboard --logdir board\n") == []
    for wrong in (["rnu"], ["runs", "--rnus", "a"], ["run", "rnaks=2"], ["race", "ranks=1", "ranks=2 backend=smh"]):
        assert refused(wrong), wrong
