"""Compiling, keeping and loading native code, on a library of one function."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.files import TEMPORARY
from lockstep.machine.native_code import CannotBuild, Library, build, code_digest, compiler, folder, load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(compiler()) is None, reason="there is no C++ compiler"),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "cache" / "data"))


def answering(tmp_path: Path, number: int = 42, *flags: str) -> Library:
    source = tmp_path / "answer.cpp"
    source.write_text(f'extern "C" int answer() {{ return {number}; }}\n')
    return Library("answer", "the answer", (source,), ("-fPIC", *flags))


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_it_is_compiled_once_and_again_when_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(answering(tmp_path))
    made = first.stat().st_mtime_ns
    assert load(answering(tmp_path)).answer() == 42
    assert build(answering(tmp_path)) == first
    assert first.stat().st_mtime_ns == made
    flags = build(answering(tmp_path, 42, "-O1"))
    monkeypatch.setenv("CXX", script(tmp_path / "other", f'exec {shutil.which(compiler())} "$@"'))
    other = build(answering(tmp_path))
    code_digest.cache_clear()  # as a new process: sources do not change while one runs
    source = build(answering(tmp_path, 43))
    assert len({first, flags, other, source}) == 4
    assert load(answering(tmp_path, 43)).answer() == 43


def test_another_torch_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = answering(tmp_path)
    here = library.path()
    monkeypatch.setattr("lockstep.machine.native_code.version", lambda name: "99.0")
    code_digest.cache_clear()
    assert library.path() != here
    code_digest.cache_clear()


def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    library = answering(tmp_path)
    build(library).write_bytes(b"not a library")
    assert load(library).answer() == 42


def test_without_a_compiler_a_library_of_another_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = answering(tmp_path)
    elsewhere = build(library)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build(library) == elsewhere
    assert load(library).answer() == 42
    with pytest.raises(
        CannotBuild, match=r"there is no C\+\+ compiler \(no-such-compiler\): install g\+\+, or set CXX"
    ):
        build(answering(tmp_path, 42, "-O1"))


def test_a_damaged_library_that_cannot_be_compiled_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = answering(tmp_path)
    path = build(library)
    path.write_bytes(b"not a library")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CannotBuild, match=f"{path} cannot be loaded"):
        load(library)


def test_what_the_compiler_says_is_one_line(tmp_path: Path) -> None:
    library = answering(tmp_path)
    library.sources[0].write_text("int answer() { return missing; }\nint other() { return missing; }\n")
    with pytest.raises(CannotBuild, match=r"failed: .*answer\.cpp:1:.*missing") as caught:
        build(library)
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in folder().iterdir()] == [".lock"], "nothing half-made is left"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder().parent.mkdir(parents=True)
    folder().touch()
    with pytest.raises(CannotBuild, match=f"{folder()} cannot be written .*set LOCKSTEP_DATA"):
        build(answering(tmp_path))


BUILD = """
import sys
from pathlib import Path
from lockstep.machine.native_code import Library, build
print(build(Library("answer", "the answer", (Path(sys.argv[1]),), ("-fPIC",))))
"""


@pytest.mark.cold
def test_a_kill_while_it_links_leaves_nothing_that_is_used_and_frees_the_lock(tmp_path: Path) -> None:
    library = answering(tmp_path)
    linking = tmp_path / "linking"
    slow = f'for last; do :; done\ncase "$*" in *-shared*) echo half > "$last"; echo $$ > {linking}; exec sleep 60;; esac\n: > "$last"'
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(library.sources[0])],
        env={**os.environ, "CXX": script(tmp_path / "slow", slow)},
        stderr=subprocess.DEVNULL,
    )
    while not (linking.exists() and linking.read_text().endswith("\n")):
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.kill(int(linking.read_text()), signal.SIGKILL)
    assert list(folder().glob(TEMPORARY)), "it was killed in the middle"
    assert not list(folder().glob("answer-*.so"))
    assert load(library).answer() == 42
