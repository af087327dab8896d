"""Native code: compiled on first use, kept next to the data cache, loaded.

A library's file is named after everything that went into it (sources, flags, architecture, torch, compiler), so that it is compiled again
when any of them changes. The sources know neither Python nor PyTorch: PyTorch's headers alone would take half a minute to compile. torch's
version counts because OpenMP's functions are found in the copy that torch has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from lockstep.files import locked, replacing, to_stderr
from lockstep.machine.cache import cache_folder


class CannotBuild(Exception):
    """In one line, why the code cannot be compiled or loaded here."""


@dataclass(frozen=True)
class Library:
    """What one shared library is made of."""

    name: str
    """The first part of its file's name."""
    what: str
    """For messages: "the fused kernels"."""
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    headers: tuple[Path, ...] = ()

    def path(self) -> Path:
        return folder() / f"{self.name}-{code_digest(self)}-{_digest(compiler_identity(compiler()))}.so"


@cache
def code_digest(library: Library) -> str:
    """Of all that goes into a library but the compiler."""
    content = hashlib.sha256(" ".join((*library.flags, os.uname().machine, version("torch"))).encode())
    for file in (*library.sources, *library.headers):
        content.update(file.name.encode())
        content.update(file.read_bytes())
    return content.hexdigest()[:16]


def folder() -> Path:
    return cache_folder().parent / "kernels"


def compiler() -> str:
    return os.environ.get("CXX") or "c++"


def has_compiler() -> bool:
    return shutil.which(compiler()) is not None


def build(library: Library) -> Path:
    """The library's file, compiled now if it is not there yet. Of several processes one compiles, and the others wait."""
    path = library.path()
    if not path.is_file() and not has_compiler():
        # Compute nodes often have no compiler, but share the cache with a node that has one.
        elsewhere = sorted(folder().glob(f"{library.name}-{code_digest(library)}-*.so"))
        if elsewhere:
            return elsewhere[-1]
        raise CannotBuild(f"there is no C++ compiler ({compiler()}): install g++, or set CXX")
    return build_once(path, library.what, lambda made: _compile(library, made))


def load(library: Library) -> ctypes.CDLL:
    """The library, loaded; one that cannot be loaded (damaged, or made where the C library is newer) is compiled once more."""
    path = build(library)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if not has_compiler():
            raise CannotBuild(f"{path} cannot be loaded: {error}") from None
    path = build_once(library.path(), library.what, lambda made: _compile(library, made), again=True)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotBuild(f"{path} was compiled and cannot be loaded: {error}") from None


def build_once(path: Path, what: str, make: Callable[[Path], object], again: bool = False) -> Path:
    """`path`, made now if it is not there yet, under a lock and in one step."""
    try:
        if again or not path.is_file():
            with locked(path.with_suffix(".lock"), f"compiling {what}"):
                if again or not path.is_file():
                    to_stderr(f"compiling {what}, once for this machine")
                    with replacing(path) as made:
                        make(made)
    except OSError as error:
        raise CannotBuild(f"{path.parent} cannot be written ({error.strerror}): set LOCKSTEP_DATA") from None
    return path


def run_compiler(arguments: list[str]) -> str:
    """Returns what it says."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True)
    except OSError as error:
        raise CannotBuild(f"{arguments[0]} cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise CannotBuild(f"{arguments[0]} failed: {errors[0] if errors else f'exit code {done.returncode}'}")
    return done.stderr


def _compile(library: Library, made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {source: str(Path(scratch) / f"{source.stem}.o") for source in library.sources}
        list(
            pool.map(
                lambda source: run_compiler([compiler(), *library.flags, "-c", str(source), "-o", objects[source]]),
                library.sources,
            )
        )
        # OpenMP is not linked: its functions are found in the process, where PyTorch has loaded its own, so that there is one pool of threads.
        run_compiler([compiler(), "-shared", *objects.values(), "-o", str(made)])


def compiler_identity(program: str) -> str:
    """Of a compiler: its file, not what it says of its version, which would take a process each time."""
    found = shutil.which(program)
    if found is None:
        return ""
    path = Path(found).resolve()
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
