"""Compiles csrc/winograd8.cpp on first use, and calls it. The result is kept beside the other compiled kernels."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.kernels.build import compiler, folder, locked
from lockstep.machine.cpu import cpu_flags

SOURCE = Path(__file__).with_name("csrc") / "winograd8.cpp"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-mavx2", "-mfma", "-mtune=znver3")
NEEDS = {"avx2", "fma"}


def why_not() -> str:
    """Why these kernels cannot be here; nothing where they can."""
    if not cpu_flags() >= NEEDS:
        return "it needs a CPU with AVX2"
    if shutil.which(compiler()) is None:
        return f"it needs a C++ compiler ({compiler()})"
    return ""


@cache
def winograd8() -> Any:
    """The function, compiled now if it is not there yet. Of several processes one compiles, and the others wait."""
    digest = hashlib.sha256(" ".join((*FLAGS, os.uname().machine)).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    where = folder() / f"int8-{digest}.so"
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        with locked(where.with_suffix(".lock")):
            if not where.is_file():
                _compile(where)
        function = ctypes.CDLL(str(where)).lockstep_winograd8
    except OSError as error:
        raise InputError(f"--engine winograd: {error.strerror or error}: set LOCKSTEP_DATA to another folder") from None
    function.argtypes = [ctypes.c_void_p] * 6
    return function


def _compile(where: Path) -> None:
    print("lockstep: compiling the int8 kernels, once for this machine", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=where.parent) as scratch:
        made, part = Path(scratch) / "int8.so", Path(scratch) / "int8.o"
        # OpenMP is not linked: it is found in the process, where PyTorch has loaded its own, so that there is one pool of threads.
        for words in (["-c", *FLAGS, str(SOURCE), "-o", str(part)], ["-shared", str(part), "-o", str(made)]):
            done = subprocess.run([compiler(), *words], capture_output=True, text=True)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "error" in line]
                raise InputError(f"--engine winograd: {compiler()} failed: {errors[0] if errors else done.returncode}")
        made.replace(where)  # whole or not at all
