"""A user's own objects, named as `package.module:callable` or `path/to/file.py:callable`."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import InputError
from lockstep.files import home_path

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_spec(name: str) -> bool:
    """Whether `name` has the form of a user's own object (it may still not exist)."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not _DOTTED.fullmatch(attribute):
        return False
    return where.endswith(".py") or _DOTTED.fullmatch(where) is not None


def load_object(spec: str, option: str) -> Any:
    """Import the callable that `spec` names; `option` ("model", "data") is what an error message blames."""
    if not is_spec(spec):
        raise InputError(f"{option} '{spec}': not of the form package.module:callable or path/to/file.py:callable")
    where, _, attribute = spec.rpartition(":")
    label = f"{option} '{spec}'"
    module = _load_file(where, label) if where.endswith(".py") else _load_module(where, label)
    found: Any = module
    for step in attribute.split("."):
        if not hasattr(found, step):
            raise InputError(f"{label}: {where} has no '{attribute}'{_nearest(step, found)}")
        found = getattr(found, step)
    if not callable(found):
        raise InputError(f"{label}: '{attribute}' is {_a(type(found).__name__)}, not something that can be called")
    return found


def source_digest(spec: str) -> str | None:
    """A hash of the file that holds a user's own object, which may change under the same name; None for everything else."""
    try:
        path = home_path(spec.rpartition(":")[0])
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" else None
    except (OSError, ValueError):
        return None


def one_line(error: BaseException, inside: str | None = None) -> str:
    """An exception as one line, with the last line of the file `inside` that led to it."""
    text = " ".join(str(error).split())
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        text, place = error.msg, f" ({Path(error.filename).name} line {error.lineno})"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        mine = [frame for frame in frames if inside is not None and frame.filename == inside]
        if mine:
            place = f" ({Path(mine[-1].filename).name} line {mine[-1].lineno})"
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _load_file(where: str, label: str) -> ModuleType:
    path = Path(os.path.realpath(home_path(where)))
    if not os.path.isfile(path):  # noqa: PTH113 - a name that nothing can have is no file, where Path.is_file raises
        raise InputError(f"{label}: there is no file {path}")
    # Unique per path, so that two files called model.py do not collide; the same within a process.
    name = f"lockstep_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise InputError(f"{label}: {path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    loader = found.loader
    try:
        _run(lambda: loader.exec_module(module), path.parent, f"{label}: cannot import {path}", str(path))
    except InputError:
        del sys.modules[name]
        raise
    return module


def _load_module(where: str, label: str) -> ModuleType:
    try:
        with _importable(Path.cwd()):
            found = importlib.util.find_spec(where)
    except ModuleNotFoundError as error:
        raise InputError(f"{label}: {error} (looked in {Path.cwd()} and the installed packages)") from None
    except Exception as error:  # find_spec imports the parents of a dotted name, and these may raise anything
        raise InputError(f"{label}: cannot import {where}: {one_line(error)}") from None
    if found is None:
        raise InputError(f"{label}: no module named '{where}' in {Path.cwd()} or the installed packages")
    inside = found.origin
    module: ModuleType = _run(
        lambda: importlib.import_module(where), Path.cwd(), f"{label}: cannot import {where}", inside
    )
    return module


def _run(load: Callable[[], Any], folder: Path, failed: str, inside: str | None) -> Any:
    """Import something; whatever the user's code raises becomes one line."""
    try:
        with _importable(folder):
            return load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may also call sys.exit() or raise its own BaseException
        raise InputError(f"{failed}: {one_line(error, inside)}") from None


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """First in the search path while importing; last afterwards, so as to shadow nothing imported later."""
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(entry)
        if entry not in sys.path:
            sys.path.append(entry)


def _nearest(name: str, module: Any) -> str:
    near = difflib.get_close_matches(name, [known for known in dir(module) if not known.startswith("_")], n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _a(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"
