"""How the kernels get onto a machine: compiled once, by one of several processes, or not at all; and clean under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.kernels import build, native, trial
from lockstep.machine.native_code import compiler

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which(compiler()) is None, reason="there is no C++ compiler")

CALL = """
import torch
from lockstep.kernels import FusedConvReLU
conv = FusedConvReLU(1, 4, 3, padding=1)
again = FusedConvReLU(1, 4, 3, padding=1)
x = torch.randn(2, 1, 28, 28)
assert torch.allclose(conv(x), torch.relu(torch.nn.functional.conv2d(x, conv.weight, conv.bias, padding=1)), atol=1e-5)
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, text=True, capture_output=True, timeout=120
    )


def test_without_a_compiler_pytorch_computes_and_one_warning_says_so(tmp_path: Path) -> None:
    done = python(CALL, LOCKSTEP_DATA=str(tmp_path / "data"), CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no C++ compiler (no-such-compiler): install g++, or set CXX") == 1
    assert "Traceback" not in done.stderr


def test_a_compiler_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: out of order' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = python(CALL, LOCKSTEP_DATA=str(tmp_path / "data"), CXX=str(broken))
    assert done.returncode == 0, done.stderr
    assert f"{broken} failed: x.cpp:1: error: out of order" in done.stderr


def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    # A compiler that only counts how often it was asked to link, and hands out the library that is there already.
    if native.load() is None:
        pytest.skip("there is no C++ compiler")
    counter, compiler = tmp_path / "links", tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\nsleep 0.2\nfor last; do :; done\ncase "$*" in *-shared*) echo link >> {counter}; cp {build.library(trial.best_target())} "$last";;'
        ' *) : > "$last";; esac\n'
    )
    compiler.chmod(0o755)
    where = {"LOCKSTEP_DATA": str(tmp_path / "data"), "CXX": str(compiler)}
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda _: python(CALL, **where), range(3)))
    assert [done.returncode for done in ended] == [0, 0, 0], [done.stderr for done in ended]
    assert counter.read_text().split() == ["link"]
    left = sorted(
        path.suffix for path in (tmp_path / "kernels").iterdir() if not path.name.startswith(("table-", "tried-"))
    )
    assert left == [".lock", ".so"]


def test_an_instruction_set_that_cannot_run_is_said_to_be() -> None:
    done = python(CALL, LOCKSTEP_KERNELS_ISA="sparc")
    assert done.returncode == 0
    assert "LOCKSTEP_KERNELS_ISA=sparc cannot run here: choose one of" in done.stderr


# Every target that this processor can run. Where it has no AVX512, 16 lanes run in the instructions that it knows: two vectors of AVX2
# for each one.
WIDTHS = {name: build.TARGETS[name].words for name in build.able()}
if "avx2" in WIDTHS and "avx512" not in WIDTHS:
    WIDTHS["wide"] = ("-mavx2", "-mfma", "-DREAL=float", "-DLANES=16")
# What runs on most machines, and what reaches farthest; all of them would take too long.
SANITIZED = [name for name in WIDTHS if name != "portable"] or ["portable"]


def harness(by: str, words: Sequence[str], folder: Path) -> Path:
    """The kernels with test_kernels_harness.cpp around them, as a program."""
    flags = ["-std=c++17", "-Wall", "-Werror", f"-I{build.SOURCES}", *words]
    sources = [build.SOURCES / "winograd.cpp", build.SOURCES / "direct.cpp", HERE / "test_kernels_harness.cpp"]

    def compiled(source: Path) -> str:
        made = folder / f"{source.stem}.o"
        subprocess.run([by, *flags, "-c", str(source), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    program = folder / "harness"
    subprocess.run([by, *flags, *objects, "-o", str(program)], check=True)
    return program


def assert_right(*command: str | Path) -> None:
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("ok ") == 64


@needs_compiler
@pytest.mark.parametrize("width", WIDTHS)
def test_the_sources_are_clean_under_the_sanitizers_and_right_at_every_width(width: str, tmp_path: Path) -> None:
    # -O0: half the time to compile, and nothing is optimised away that the sanitizers should see.
    flags = ["-O0", *WIDTHS[width]]
    if width in SANITIZED:
        flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    assert_right(harness(compiler(), flags, tmp_path))


# On an ARM processor the tests above and below run as they are; elsewhere it is emulated.
TO_ARM, EMULATED = "aarch64-linux-gnu-g++", shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


@pytest.mark.skipif(shutil.which(TO_ARM) is None, reason=f"there is no {TO_ARM}: apt-get install g++-aarch64-linux-gnu")
@pytest.mark.skipif(EMULATED is None, reason="there is no emulator of ARM: apt-get install qemu-user")
def test_the_kernels_are_right_on_arm(tmp_path: Path) -> None:
    """As they are compiled for it, so that what is run is NEON with the tiles for its registers."""
    words = [word for word in build.FLAGS if word not in ("-std=c++17", "-fPIC", "-fopenmp")]
    assert_right(str(EMULATED), harness(TO_ARM, [*words, "-static", *build.TARGETS["portable"].words], tmp_path))


@needs_compiler
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="compiles for x86-64")
@pytest.mark.skipif("avx512" in WIDTHS, reason="they run, in the test above")
def test_the_avx512_kernels_compile(tmp_path: Path) -> None:
    """Where the processor does not have AVX512 that is all there is to see of them."""
    target = build.TARGETS["avx512"].words
    for name in ("direct", "winograd"):
        words = [
            compiler(),
            "-std=c++17",
            "-O0",
            "-Wall",
            "-Werror",
            *target,
            "-c",
            str(build.SOURCES / f"{name}.cpp"),
        ]
        subprocess.run([*words, "-o", str(tmp_path / f"{name}.o")], check=True)
