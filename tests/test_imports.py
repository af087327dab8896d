"""Imports point one way: the table of tests/house.py against what the source really imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

import house
import lockstep


def test_every_room_has_a_place_in_the_order() -> None:
    table = [room for row in house.rows() for room in row]
    assert sorted(table) == house.rooms()


def test_imports_point_downwards() -> None:
    allowed = house.allowed()
    wrong = [
        f"src/lockstep/{each.path}:{each.line} imports {each.target}"
        for each in house.imports()
        if each.target not in allowed[each.source]
    ]
    assert not wrong, "imports that tests/house.py does not allow:\n" + "\n".join(wrong)


def test_what_is_never_imported() -> None:
    wrong = [each for each in house.imports() if (each.source, each.target) in house.NEVER]
    assert not wrong, [house.NEVER[each.source, each.target] for each in wrong]


def test_the_table_has_no_circle() -> None:
    TopologicalSorter({room: beside for row in house.rows() for room, beside in row.items()}).prepare()
    for row in house.rows():
        for room, beside in row.items():
            assert beside <= row.keys(), f"{room} names {beside - row.keys()}, which is not beside it"


def test_a_public_function_is_not_hidden_by_the_room_of_its_name() -> None:
    """In a process of its own, and whichever is imported first."""
    code = (
        "import lockstep, lockstep.run, lockstep.explain.evidence, lockstep.study.folder, lockstep.verify\n"
        "from lockstep.run import Run\n"
        "for name in ('run', 'race', 'explain', 'verify', 'study'):\n"
        "    assert callable(getattr(lockstep, name)), name\n"
        "from lockstep import study\n"
        "assert study.__module__ == 'lockstep.api.calls'\n"
        "lockstep.mine = lockstep  # any other name is as in every module\n"
        "assert lockstep.mine is lockstep\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_room_is_imported_by_the_name_of_a_public_function() -> None:
    """`from lockstep import study` would be the function (docs/decisions/0041-names-of-rooms.md)."""
    shared = {name for name in lockstep.__all__ if f"{name}/" in house.rooms()}
    assert shared == {"run", "explain", "verify", "study"}
    for folder in ("src", "tests", "benchmarks", "docs", "examples"):
        for path in sorted((house.ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "lockstep":
                    assert not shared & {alias.name for alias in node.names}, f"{path}:{node.lineno}"
                if isinstance(node, ast.Import):
                    wrong = [
                        a.name
                        for a in node.names
                        if a.asname and a.name.split(".")[1:2] and a.name.split(".")[1] in shared
                    ]
                    assert not wrong, f"{path}:{node.lineno} imports {wrong[0]} as another name"


def test_every_form_of_import_is_seen() -> None:
    text = """
import lockstep.run
from lockstep import data, train
from .. import settings
if TYPE_CHECKING:
    from lockstep.launch import spawn
def late():
    from lockstep.report.document import Document
    importlib.import_module("lockstep.study")
import torch, lockstepper
"""
    found = [room for _, room in house.imported(text, ("lockstep", "cli", "run.py"))]
    assert sorted(found) == ["data/", "launch/", "lockstep", "report/", "run/", "settings", "study/"]


@pytest.mark.parametrize("room", [room for room in house.rooms() if room.endswith("/")])
def test_a_room_says_what_it_may_import_and_what_its_door_is(room: str) -> None:
    told = " ".join((ast.get_docstring(ast.parse((house.SOURCE / room / "__init__.py").read_text())) or "").split())
    may = re.search(r"May import (.+?)\.(?: |$)", told)
    door = re.search(r"Its doors? (?:is|are) (.+?)\.(?: |$)", told)
    assert may, f"{room} does not say what it may import"
    assert door, f"{room} does not say what its door is"
    assert set(re.findall(r"\b[a-z_]+/", may[1])) <= house.allowed()[room]
    for name in re.findall(r"[\w/]+\.py\b", door[1]):
        assert (house.SOURCE / room / name).exists() or (house.SOURCE / name).exists(), f"{room}: there is no {name}"
