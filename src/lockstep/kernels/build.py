"""Compiles the C++ sources on first use. The result is kept next to the data cache, for these sources and each kind of processor.

The sources know neither Python nor PyTorch: PyTorch's headers alone would take half a minute to compile.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.machine.cpu import cpu_flags

SOURCES = Path(__file__).with_name("csrc")
# No -ffast-math: it would change what becomes of NaN and infinity.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fvisibility=hidden")


@dataclass(frozen=True)
class Target:
    """One instruction set that the sources are compiled for."""

    lanes: int
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """What the processor has to have, by the names of Linux."""
    real: str = "float"

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.flags, f"-DREAL={self.real}", f"-DLANES={self.lanes}")


# The best first.
TARGETS = {
    "avx512": Target(
        16,
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
        ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    ),
    "avx2": Target(8, ("-mavx2", "-mfma"), ("avx2", "fma")),
    "portable": Target(4),
    # For checking only.
    "double": Target(2, real="double"),
}


def able() -> list[str]:
    """The targets that this processor can run, the best first. The only place in this room that asks what the processor has."""
    return [name for name, target in TARGETS.items() if cpu_flags() >= set(target.needs) and name != "double"]


def best_target() -> str:
    """The best that this processor can run, or what LOCKSTEP_KERNELS_ISA names."""
    asked = os.environ.get("LOCKSTEP_KERNELS_ISA")
    if asked and asked not in able():
        raise CannotBuild(f"LOCKSTEP_KERNELS_ISA={asked} cannot run here: choose one of {', '.join(able())}")
    return asked or able()[0]


class CannotBuild(Exception):
    """In one line, why there are no kernels."""


def compiler() -> str:
    return os.environ.get("CXX") or "c++"


def library(name: str) -> Path:
    """The library for one target, compiled now if it is not there yet. Of several processes one compiles, and the others wait."""
    where = folder() / f"{name}-{fingerprint(name)}.so"
    if where.is_file():
        return where
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        with locked(where.with_suffix(".lock")):
            if not where.is_file():
                _compile_to(where, TARGETS[name].words)
    except OSError as error:
        raise CannotBuild(f"{where.parent} cannot be written ({error.strerror}): set LOCKSTEP_DATA") from None
    return where


def folder() -> Path:
    from lockstep.machine.cache import cache_folder

    return cache_folder().parent / "kernels"


@cache
def fingerprint(name: str) -> str:
    """Of these sources and how they are compiled for a target."""
    words = (*FLAGS, *TARGETS[name].words, os.uname().machine)
    digest = hashlib.sha256(" ".join(words).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """The system lets go of the lock when its holder ends, in whatever way."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile_to(where: Path, target: tuple[str, ...]) -> None:
    if shutil.which(compiler()) is None:
        raise CannotBuild(f"there is no C++ compiler ({compiler()}): install g++, or set CXX")
    print("lockstep: compiling the fused kernels, once for this machine", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=where.parent) as name:
        scratch = Path(name)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda source: _object(source, target, scratch), sorted(SOURCES.glob("*.cpp"))))
        made = scratch / "kernels.so"
        # OpenMP is not linked: it is found in the process, where PyTorch has loaded its own, so that there is one pool of threads.
        _call([compiler(), "-shared", *map(str, objects), "-o", str(made)])
        made.replace(where)  # whole or not at all


def _object(source: Path, target: tuple[str, ...], scratch: Path) -> Path:
    made = scratch / f"{source.stem}.o"
    _call([compiler(), *FLAGS, *target, "-c", str(source), "-o", str(made)])
    return made


def _call(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise CannotBuild(f"{words[0]} failed: {errors[0] if errors else f'exit code {done.returncode}'}")
