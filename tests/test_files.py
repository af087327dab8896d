"""Atomic replacement and locks, with real processes that are really killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lockstep.files import TEMPORARY, Held, locked, replacing, write_atomically

# `cold`: these are about processes themselves.
pytestmark = pytest.mark.cold


def start(code: str, *arguments: Path | str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


# ---------------------------------------------------------------- replacement

REWRITE = """
import sys
from pathlib import Path
from lockstep.files import write_atomically
path, count = Path(sys.argv[1]), 0
while True:
    count += 1
    write_atomically(path, str(count % 10).encode() * 2_000_000, durable=False)
    if count == 1:
        print("going", flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for number in range(12):
        process = start(REWRITE, path)
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        time.sleep(0.003 * number)
        kill(process)
        content = path.read_bytes()
        assert len(content) == 2_000_000
        assert len(set(content)) == 1, "half of one and half of another"


HALF = """
import sys, time
from pathlib import Path
from lockstep.files import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_bytes(b"half")
    print("half", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_writer_leaves_is_recognised_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    process = start(HALF, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    kill(process)
    assert path.read_bytes() == b"old"
    (left,) = tmp_path.glob(TEMPORARY)
    assert left.read_bytes() == b"half"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_writer_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    write_atomically(path, b"old")

    def fail() -> None:
        with replacing(path) as temporary:
            assert temporary.suffix == ".pt"
            temporary.write_bytes(b"half")
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_threads_that_replace_one_file_do_not_meet_in_a_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    failures: list[BaseException] = []

    def work(letter: bytes) -> None:
        try:
            for _ in range(50):
                write_atomically(path, letter * 100_000, durable=False)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(set(path.read_bytes())) == 1
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------- locks

# Each process adds one to a number many times, by reading and writing it: without a lock some additions are lost.
COUNT = """
import sys, time
from pathlib import Path
from lockstep.files import locked
number = Path(sys.argv[1])
for _ in range(40):
    with locked(number.with_suffix(".lock"), "counting"):
        value = int(number.read_text())
        time.sleep(0.0005)
        number.write_text(str(value + 1))
"""


def test_processes_exclude_each_other(tmp_path: Path) -> None:
    number = tmp_path / "number"
    number.write_text("0")
    processes = [start(COUNT, number) for _ in range(3)]
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert number.read_text() == "120"


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with locked(tmp_path / "lock", "working"):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


HOLD = """
import sys, time
from pathlib import Path
from lockstep.files import locked
with locked(Path(sys.argv[1]), "holding on"):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = start(HOLD, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_killed_holder_frees_the_lock_and_a_waiter_says_once_what_it_waits_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = holder(path)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        kill(process)

    with locked(path, "holding on", say, patience=0.2):
        assert process.returncode == -signal.SIGKILL
    assert said == ["waiting for another process that is holding on"]


def test_without_waiting_the_holder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = holder(path)
    with pytest.raises(Held, match=f"process {process.pid}") as caught, locked(path, "holding on", wait=False):
        pass
    assert caught.value.holder == str(process.pid)
    kill(process)
    with locked(path, "holding on", wait=False):
        pass


def test_a_lock_ends_with_its_block_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom lockstep.files import locked\npath = Path(sys.argv[1])\n"
        "with locked(path, 'forking'):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n        time.sleep(60)\n        os._exit(0)\n"
        "with locked(path, 'going on', wait=False):\n    print('again', flush=True)\n"
        "os.kill(child, 9)\n"
    )
    out, err = start(code, tmp_path / "lock").communicate(timeout=30)
    assert out == "again\n", err


def test_what_cannot_be_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), locked(tmp_path / "file" / "lock", "trying"):
        pass
