"""A class or function of a notebook's cell, or of a script, as a file that ranks can import.

Ranks are processes of their own: nothing is pickled, and nothing runs the notebook or the script again. So the source of what is named is
written to RUNS/code/NAME-DIGEST.py, with what it uses: other classes and functions of the notebook, its imports, and plain constants. The
file is named by its content, so it is never written over, and a run can be started again from it.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import os
import symtable
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from lockstep.errors import InputError
from lockstep.files import write_atomically
from lockstep.run import folder_error, runs_root

ROOM = "code"
# A constant that is longer than this is data, and belongs into a file of its own.
LONGEST = 10_000
HEAD = '"""Written by Lockstep from a notebook or a script: {name}, and what it uses."""\n\nfrom __future__ import annotations'


def named(option: str, value: Callable[..., Any], runs: Path | None) -> str:
    """The name under which ranks import a class or function: `package.module:Net`, or `file.py:Net`."""
    if not isinstance(value, type | FunctionType):
        kind = type(value).__name__
        raise InputError(
            f"{option}: give the class or function that makes it, not an object ({kind}): each rank makes its own"
        )
    name = value.__qualname__
    if "<" in name:
        raise InputError(
            f"{option}={name}: ranks import it by its name: define it with def or class, and not inside a function"
        )
    module = sys.modules.get(value.__module__)
    if value.__module__ == "__main__":
        return f"{_write(option, value, runs)}:{name}"
    file = getattr(module, "__file__", None)
    # A module of a package is imported by its name, which its own relative imports need; one that stands alone is found by its path.
    alone = "." not in value.__module__ and str(file).endswith(".py") and not str(file).endswith("__init__.py")
    return f"{_near(Path(str(file)))}:{name}" if alone else f"{value.__module__}:{name}"


def _near(path: Path) -> str:
    """A path as people write it, where it is below the folder that we are in."""
    found = os.path.relpath(path)
    return str(path) if found.startswith("..") else found


def _write(option: str, value: type | FunctionType, runs: Path | None) -> str:
    text = Source(option, value).text()
    path = runs_root(runs) / ROOM / f"{value.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_atomically(path, text.encode())
    except OSError as error:
        raise folder_error(path.parent, error) from None
    return _near(path)


class Source:
    """The text of a file that defines one class or function of `__main__`, and all that it uses."""

    def __init__(self, option: str, value: type | FunctionType) -> None:
        self._label, self._name = f"{option}={value.__name__}", value.__name__
        self._namespace = vars(sys.modules["__main__"])
        self._seen: set[str] = set()
        self._imports: list[str] = []
        self._constants: list[str] = []
        self._definitions: list[str] = []
        self._add(value.__name__, value)

    def text(self) -> str:
        above = [HEAD.format(name=self._name), "\n".join(sorted(self._imports)), "\n".join(self._constants)]
        return "\n\n\n".join(["\n\n".join(part for part in above if part), *self._definitions]) + "\n"

    def _add(self, name: str, value: Any) -> None:
        """What stands behind a name, after all that it needs itself."""
        if name in self._seen:
            return
        self._seen.add(name)
        if isinstance(value, ModuleType):
            self._imports.append(f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else ""))
        elif getattr(value, "__module__", None) == "__main__" and isinstance(value, type | FunctionType):
            self._define(name, value)
        elif _plain(value):
            self._constants.append(f"{name} = {value!r}")
        elif home := _home(name, value):
            module, attribute = home
            self._imports.append(f"from {module} import {attribute}" + (f" as {name}" if name != attribute else ""))
        else:
            self._fail(
                f"it uses '{name}' of the notebook, which no file can hold ({type(value).__name__})", "make it inside"
            )

    def _define(self, name: str, value: type | FunctionType) -> None:
        source = next((found for text in _texts() if (found := _definition(text, value.__name__))), "")
        if not source or value.__name__ != name:
            self._fail(f"the source of '{name}' is not there", "define it at the top of a cell, under that name")
        for used in sorted(_globals(source)):
            if used.startswith("__"):  # each file has its own
                continue
            if used in self._namespace:
                self._add(used, self._namespace[used])
            elif not hasattr(builtins, used):
                self._fail(f"it uses '{used}', which is not defined", "define it in a cell above")
        self._definitions.append(source)

    def _fail(self, problem: str, fix: str) -> NoReturn:
        raise InputError(f"{self._label}: {problem}: {fix}, or write a file and state it as 'file.py:{self._name}'")


def _texts() -> list[str]:
    """What was run as `__main__`, the last first: the cells of a notebook as Python (IPython keeps them in `In`), or the script."""
    main = sys.modules["__main__"]
    cells = [str(cell) for cell in vars(main).get("In") or []]
    if not cells and (file := getattr(main, "__file__", None)):
        cells = [Path(file).read_text(encoding="utf-8")]
    return cells[::-1]


def _definition(text: str, name: str) -> str:
    """The last class or function of this name at the top of a cell, with its decorators; empty if there is none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a cell that never ran
        return ""
    kinds = (ast.ClassDef, ast.FunctionDef)
    found = [node for node in tree.body if isinstance(node, kinds) and node.name == name]
    if not found:
        return ""
    first = min([found[-1].lineno, *(decorator.lineno for decorator in found[-1].decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : found[-1].end_lineno])


def _globals(source: str) -> set[str]:
    """The names that it looks up beside its own: arguments and local variables are not among them."""
    found: set[str] = set()
    tables = [symtable.symtable(source, "<cell>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return found


def _home(name: str, value: Any) -> tuple[str, str] | None:
    """The module that something can be imported from, and its name there; the shortest one, as people write it."""
    for attribute in dict.fromkeys((getattr(value, "__name__", name), name)):
        homes = [
            module
            for module, found in list(sys.modules.items())
            # `__main__` has another name too, where multiprocessing was imported.
            if isinstance(found, ModuleType) and found.__name__ != "__main__" and vars(found).get(attribute) is value
        ]
        public = [module for module in homes if not any(part.startswith("_") for part in module.split("."))]
        if homes:
            return min(public or homes, key=lambda module: (module.count("."), len(module))), attribute
    return None


def _plain(value: Any) -> bool:
    """Whether its text is the value again: numbers, texts, and lists and tables of them."""
    try:
        return len(text := repr(value)) <= LONGEST and ast.literal_eval(text) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
