"""A student's code, tried in a process of its own with a time limit, in a folder of its own (trials/).

This is no sandbox: the code can read what the teacher can read, and can use the network. Grade in a container or as a user without rights
where that matters (docs/labs.md).
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from lockstep.lab.definition import Task
from lockstep.lab.patience import PATIENCE, Ended, Patience, Watch
from lockstep.process import PARENT
from lockstep.reading import Damaged, is_file, read_end, read_shape
from lockstep.text import last_line, printable
from lockstep.turns import guard

END_S, LOOK_S = 10.0, 1.0
# More than any file that a trial has to write, a downloaded data set included.
LARGEST_FILE = 512 << 20
# Code that fails in a race is raced once more, since a busy machine may have made it miss a time limit.
RACES = 2
# Of processor time and of time, as a multiple of what a race is given: two ranks compute, and every start takes time of its own.
RACE_COSTS = 3
REQUEST, VERDICT, LOG = "request.json", "verdict.json", "log.txt"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial is asked to do."""

    kind: str
    file: str
    object: str
    reference: str = ""
    """The reference solution; empty: speed does not count."""
    seconds: float = 0.0
    """How long the race may take."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as fast as the reference, with the interval of the race; None where there was none."""

    times: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    failed: str = ""
    """Why it failed in the last of its races; empty where it did not."""

    def slower_than(self, bar: float) -> bool:
        """Settled to be: the whole interval is below. A machine that is too noisy to tell takes no points."""
        return self.high is not None and self.high < bar

    def loses(self, bar: float) -> bool:
        """Whether the points for speed are lost: it is too slow, or failed in every race."""
        return bool(self.failed) or self.slower_than(bar)

    def sentence(self, bar: float) -> str:
        if self.failed:
            return f"it failed in the race, {RACES} times ({self.failed}), so it has no speed"
        if not self.n:
            return "speed was not measured, which takes no points"
        if self.times is None or self.low is None or self.high is None:
            return f"not settled: too few starts (n = {self.n}) for an interval, which takes no points"
        found = (
            f"{self.times:.2f} times as fast as the reference ({self.low:.2f} to {self.high:.2f}, n = {self.n} starts)"
        )
        if self.high < bar:
            return f"too slow: {found}, and {bar:g} times is asked for"
        return f"fast enough: {found}" if self.low >= bar else f"not settled, which takes no points: {found}"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a trial."""

    right: bool
    settled: bool = True
    """Whether anything can be said: not where the machine was too busy to come to an end."""
    failed: bool = False
    """It raised, hung or ended, and did not come to a result that is wrong."""
    why: str
    """What was checked, or what is wrong."""
    speed: Speed | None = None


Told = Callable[[str], None]


def tried(task: Task, code: Path, lab: Path, seconds: float, patience: Patience = PATIENCE) -> Verdict:
    """The verdict on one file. Whatever the code does, this returns when our patience is at its end.

    Code that fails is tried once more: on a machine that is busy enough, right code may miss a time limit. A wrong result is wrong at once.
    """
    found = _tried(task, code, lab, seconds, patience)
    return _tried(task, code, lab, seconds, patience) if found.failed else found


def _tried(task: Task, code: Path, lab: Path, seconds: float, patience: Patience) -> Verdict:
    if not is_file(code):
        return Verdict(right=False, why=f"{task.file} is missing")
    with TemporaryDirectory(prefix="lockstep-try-") as place:
        folder = Path(place)
        work = folder / "code"
        work.mkdir()
        for path in code.parent.glob("*.py"):
            shutil.copyfile(path, work / path.name)
        request = Request(kind=task.kind, file=str(work / task.file), object=task.object)
        reference = lab / f"reference_{task.file}"  # a student's own folder of a teacher's lab has none
        if task.speed and seconds > 0 and is_file(reference):
            request = msgspec.structs.replace(request, reference=str(reference.absolute()), seconds=seconds)
            patience = patience.with_more(RACES * RACE_COSTS * seconds)
        (folder / REQUEST).write_bytes(msgspec.json.encode(request))
        # Not in the folder of the student's files, nor with it in the search path: a random.py of theirs would be taken for Python's own.
        argv = [sys.executable, "-P", "-m", "lockstep.lab.trials", str(folder)]
        ended = run_child(argv, folder, folder, patience)
        return _verdict(folder, ended, patience)


def run_child(argv: list[str], folder: Path, cwd: Path, patience: Patience) -> Ended:
    """Run a command to its end, or until our patience is. None of its processes is left afterwards."""
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", guard.__file__, *argv],
            env={**os.environ, PARENT: str(os.getpid()), "OMP_NUM_THREADS": "1"},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        watch = Watch(process.pid, patience)
        try:
            # Passed on to all that it starts: a program that prints without end does not fill the disk.
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
            while True:
                try:
                    process.wait(LOOK_S)
                    return "over"
                except subprocess.TimeoutExpired:
                    if ended := watch.look():
                        return ended
        finally:
            guard.end(process, END_S)


def _verdict(folder: Path, ended: Ended, patience: Patience) -> Verdict:
    found = None
    with suppress(Damaged):
        found = read_shape(folder / VERDICT, Verdict)
    if found is not None:
        return found
    if ended == "starved":
        return Verdict(
            right=False,
            settled=False,
            why=f"the machine was too busy: no verdict within {patience.wall_s:.0f} s; grade it again",
        )
    if ended != "over":
        return Verdict(right=False, failed=True, why=f"it hangs: {ended}")
    said = last_line(read_end(folder / LOG))
    return Verdict(
        right=False,
        failed=True,
        why=f"the trial ended without a verdict: {printable(said)[:300] or 'it said nothing'}",
    )
