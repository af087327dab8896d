"""The house: which room may import which (docs/design.md), and the imports that the source really has.

A room is a folder or a file directly in src/lockstep. Its imports are read from the source by `ast`, wherever they stand: at the top of a
module, inside a function, or under TYPE_CHECKING. An import inside a function is still an import: it makes a start faster, not a
dependency smaller.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/lockstep"

# A room may import every room in the rows below its own. Beside it in the same row it may import only what stands behind its arrow.
# Folders end with a slash.
ROWS = """
lockstep    __main__
cli/
dashboard/    api/    lab/
report/
tune/ > predict/    explain/ > study/ verify/    predict/    study/ > verify/    export/    verify/
attach/ > turns/    comms/    deploy/    preflight/    probe    turns/
launch/
worker
training/
resolve/
strategies/ > backends/    kernels/    quantize/    models/ > data/    data/    backends/
statistics/ > metrics    metrics
measure/ > machine/    machine/
words > settings recipes/ placement    settings > placement    task    index > run/    lines > run/    ways > run/    run/ > placement plan    plan > placement    placement    schedule    recipes/
recipe    shapes    toml > reading    reading    plugins > files    offered > plugins    process    files    keyed    seeding
errors    text    units    torch_private    rounds    inside/
"""

# The supervisor starts workers as processes, by command. Importing worker would bring torch into the supervisor.
NEVER = {("launch/", "worker"): "launch starts worker as a process, and never imports it"}


class Import(NamedTuple):
    path: str
    """The importing file, from src/lockstep on."""
    line: int
    source: str
    target: str


def rows() -> list[dict[str, set[str]]]:
    """The table, top to bottom: in each row its rooms, and for each what it may import beside it."""
    found = []
    for line in ROWS.strip().splitlines():
        row: dict[str, set[str]] = {}
        for entry in line.split("    "):
            room, _, beside = entry.strip().partition(" > ")
            row[room] = set(beside.split())
        found.append(row)
    return found


def allowed() -> dict[str, set[str]]:
    """What each room may import: all the rows below it, and what is named beside it."""
    table = rows()
    return {
        room: beside | {below for lower in table[level + 1 :] for below in lower}
        for level, row in enumerate(table)
        for room, beside in row.items()
    }


def rooms() -> list[str]:
    """The rooms that there are: folders and files of src/lockstep."""
    folders = [f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")]
    return sorted([*folders, *("lockstep" if path.stem == "__init__" else path.stem for path in SOURCE.glob("*.py"))])


@cache
def imports() -> tuple[Import, ...]:
    """Every import from one room into another."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        here = path.relative_to(SOURCE)
        source = room_of(here.with_suffix("").parts)
        for line, target in imported(path.read_text(), ("lockstep", *here.parts)):
            if target != source:
                found.append(Import(str(here), line, source, target))
    return tuple(found)


def imported(text: str, where: tuple[str, ...] = ("lockstep", "module.py")) -> Iterator[tuple[int, str]]:
    """The rooms that a file imports, with the line of each. `where` is its path, for relative imports."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(where[: len(where) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = [str(node.args[0].value)] if called in ("import_module", "__import__") else []
        for name in names:
            top, *rest = name.split(".")
            if top == "lockstep":
                yield node.lineno, room_of(tuple(rest))


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module, by its path from lockstep on; names that are not modules belong to the public surface."""
    if parts and (SOURCE / parts[0] / "__init__.py").exists():
        return f"{parts[0]}/"
    if parts and parts[0] != "__init__" and (SOURCE / f"{parts[0]}.py").exists():
        return parts[0]
    return "lockstep"
