"""Every lab that comes with Lockstep can be solved by the commands in it, and a right solution is found right."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest

import lab_solver
from lockstep.cli.commands import cli as cli_group
from lockstep.lab.definition import builtin
from lockstep.lab.folder import make
from support import Cli

# Grading watches what its processes do, and one that the zygote forked is not below it.
COLD = {"LOCKSTEP_TEST_ZYGOTE": ""}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lab", lab_solver.names())
def test_a_right_solution_has_all_its_points(cli: Cli, lab: str) -> None:
    file = lab_solver.solved(cli, lab, "Ana Li", "ana")
    result = cli("lab", "check", str(file), "-o", "grades", "--race", "5s", "--json", timeout=800, **COLD)
    (graded,) = json.loads(result.stdout)
    assert result.returncode == 0, json.dumps([graded["flags"], graded["marks"]])
    assert graded["right"]
    assert graded["points"] == graded["of"]
    page = (cli.folder / "grades/Ana-Li/page.html").read_text()
    assert "Since messages take time." in page
    results = json.loads((cli.folder / "grades/Ana-Li/results.json").read_text())
    assert results["score"] == graded["points"] == sum(test["score"] for test in results["tests"])
    assert {test["status"] for test in results["tests"]} == {"passed"}
    assert (cli.folder / "grades/class.csv").read_text().count("Ana Li") == 1


def test_every_lab_has_tasks_of_a_hundred_points_or_fewer_and_a_page(tmp_path: Path) -> None:
    labs = builtin()
    assert [lab.name for lab in labs] == lab_solver.names()
    assert len(labs) == 8
    for lab in labs:
        assert 50 <= sum(task.worth for task in lab.tasks) <= 100
        made = make(lab.name, tmp_path / lab.name, "Ana")
        text = (made.path / "README.md").read_text()
        for task in lab.tasks:
            assert f"**{task.name}**" in text
            if task.file:
                assert "yours" in (made.path / task.file).read_text().lower()
        assert not list(made.path.glob("reference*"))


@pytest.mark.parametrize("name", lab_solver.names())
def test_every_command_on_a_students_page_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = make(name, tmp_path / "lab", "Ana")
    monkeypatch.chdir(made.path)
    text = (made.path / "README.md").read_text()
    found = [*re.findall(r"^ +lockstep ([^\n]*)$", text, flags=re.MULTILINE), *re.findall(r"`lockstep ([^`]*)`", text)]
    assert len(found) >= 2
    for line in found:
        words = shlex.split(line)
        command, rest = cli_group.get_command(click.Context(cli_group), words[0]), words[1:]
        while isinstance(command, click.Group) and rest:
            command, rest = command.get_command(click.Context(command), rest[0]), rest[1:]
        assert command is not None, line
        command.make_context(words[0], list(rest))
        if words[:2] == ["lab", "run"]:
            made.lab.task(words[2], "run")
