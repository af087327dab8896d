"""A student's code, tried in a process of its own with a time limit, in a folder of its own (trials/).

Right first, then fast, each with limits of its own; all code of a hand-in together has an allowance. Time in which the code waits for a
processor that others have does not count: a busy machine takes nothing from it. Where starting is slow, every limit is so much longer.

This is no sandbox: the code can read what the teacher can read, and can use the network. Grade in a container or as a user without rights
where that matters (docs/labs.md).
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from lockstep.lab.definition import Task
from lockstep.lab.patience import Ended, Patience, Watch
from lockstep.process import PARENT
from lockstep.reading import Damaged, is_file, read_end, read_shape
from lockstep.text import last_line, printable
from lockstep.turns import guard

END_S, LOOK_S = 10.0, 1.0
# More than any file that a trial has to write, a downloaded data set included.
LARGEST_FILE = 512 << 20
# Until a file is found right or wrong, both tries together. The reference solutions take 3 to 15 s on two cores of an AMD EPYC (Zen 4).
JUDGING_S = 60.0
# Code that fails is tried once more, since a busy machine may have made it miss a clock: not where it took this long for itself.
AGAIN_S = 20.0
# Importing torch takes 2 s there. Where it takes longer than this, as from a disk of the network, limits grow in proportion.
START_S = 3.0
# Code that fails in a race is raced once more, for the same reason.
RACES = 2
RACE_S = 30.0
# Beyond its seconds a race is given this for its starts and its last round.
RACE_MORE_S = 30.0
# The smallest allowance is for so many files, raced for RACE_S: three minutes.
FILES = 3
QUIET_S = 40.0
# However busy the machine is, a trial is over after this time beside its own.
BUSY_S = 1200.0
# So many processes compute side by side.
RANKS = 2
# The exit codes of a child that somebody has killed, or its guard: the system does where memory runs out.
KILLED = [code for sign in (signal.SIGKILL, signal.SIGTERM) for code in (-sign, 128 + sign)]
REQUEST, VERDICT, LOG = "request.json", "verdict.json", "log.txt"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial is asked to do."""

    kind: str
    file: str
    object: str
    reference: str = ""
    """The reference solution to race against; empty: find out whether the code is right."""
    seconds: float = 0.0
    """How long the race may take."""
    token: str = ""
    """Has to be in the verdict, and is on no disk any more when the student's code begins: no file that it writes is taken for one."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as fast as the reference, with the interval of the race; None where there was none."""

    times: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    failed: str = ""
    """Why it failed in the last of its races; empty where it did not."""
    unmeasured: str = ""
    """Why no race has come to an end."""

    def slower_than(self, bar: float) -> bool:
        """Settled to be: the whole interval is below. A machine that is too noisy to tell takes no points."""
        return self.high is not None and self.high < bar

    def loses(self, bar: float) -> bool:
        """Whether the points for speed are lost: it is too slow, or failed in every race."""
        return bool(self.failed) or self.slower_than(bar)

    def sentence(self, bar: float) -> str:
        if self.failed:
            return f"it failed in the race ({self.failed}), so it has no speed"
        if not self.n:
            return f"speed was not measured{self.unmeasured and ': '}{self.unmeasured}, which takes no points"
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
    """Whether anything can be said: not where the machine was too busy to come to an end, nor of a race that had to be ended."""
    failed: bool = False
    """It raised, hung or ended, and did not come to a result that is wrong."""
    why: str
    """What was checked, or what is wrong."""
    speed: Speed | None = None
    token: str = ""


@dataclass
class Allowance:
    """Seconds that the code of one hand-in may still take for itself: all files and tries together."""

    seconds: float
    slow: float = 1.0
    """How many times as long as usual starting takes here: so many times as long are all limits but that of a race itself."""


def allowance(tasks: Sequence[Task], race_s: float, slow: float = 1.0) -> Allowance:
    """For all code of a hand-in: three minutes, and more where a lab has more files, longer races are asked for, or starting is slow."""
    raced = sum(bool(task.speed) for task in tasks)
    return Allowance(JUDGING_S * slow * max(FILES, len(tasks)) + raced * max(0.0, race_s - RACE_S), slow)


def slowness() -> float:
    """How many times as long as usual a start takes on this machine; 1 where it is not slow."""
    took = _start_s()
    if took > START_S:  # the first one may have read from a disk what the next ones find in memory
        took = min(took, _start_s())
    return max(1.0, took / START_S)


def _start_s() -> float:
    with TemporaryDirectory(prefix="lockstep-start-") as place:
        argv = [sys.executable, "-P", "-c", "import torch"]
        return run_child(argv, Path(place), Path(place), Patience(cpu_s=BUSY_S, quiet_s=BUSY_S, wall_s=BUSY_S))[1]


def tried(task: Task, code: Path, lab: Path, seconds: float) -> Verdict:
    """The verdict on one file by itself, raced where it is right and `seconds` are given for it."""
    whole = allowance([task], seconds)
    verdict = judged(task, code, whole)
    if verdict.right and task.speed:
        verdict = msgspec.structs.replace(verdict, speed=raced(task, code, lab, seconds, whole))
    return verdict


def judged(task: Task, code: Path, whole: Allowance) -> Verdict:
    """Whether it is right. Whatever the code does, this returns when our patience is at its end.

    Code that fails is tried once more: on a machine that is busy enough, right code may miss a clock. A wrong result is wrong at once, and
    so is code that took long for itself.
    """
    if not is_file(code):
        return Verdict(right=False, why=f"{task.file} is missing")
    limit_s = JUDGING_S * whole.slow
    found, own_s = _trial(task, code, whole, limit_s)
    if found.failed and own_s < AGAIN_S * whole.slow:
        found, _ = _trial(task, code, whole, limit_s - own_s)
    return found


def raced(task: Task, code: Path, lab: Path, seconds: float, whole: Allowance) -> Speed:
    """How fast code that is right is."""
    reference = lab / task.reference  # a student's own folder of a teacher's lab has none
    speed = Speed()
    for _ in range(RACES if seconds > 0 and is_file(reference) else 0):
        if whole.seconds < seconds:
            once = f"it failed in a race ({speed.failed}), and " if speed.failed else ""
            return Speed(unmeasured=f"{once}the time for the code of this hand-in is over")
        found, _ = _trial(task, code, whole, seconds + RACE_MORE_S * whole.slow, reference, seconds)
        if not found.settled:
            return Speed(unmeasured=found.why)
        speed = found.speed or Speed(failed=found.why)
        if not speed.failed:
            break
    return speed


def _trial(
    task: Task, code: Path, whole: Allowance, limit_s: float, reference: Path | None = None, seconds: float = 0.0
) -> tuple[Verdict, float]:
    """What one process says, and the seconds that it took for itself: all that it had, where it did not come to an end."""
    patience = Patience(cpu_s=RANKS * limit_s, quiet_s=QUIET_S * whole.slow, own_s=limit_s, wall_s=BUSY_S + limit_s)
    with TemporaryDirectory(prefix="lockstep-try-") as place:
        folder = Path(place)
        work = folder / "code"
        work.mkdir()
        for path in code.parent.glob("*.py"):
            shutil.copyfile(path, work / path.name)
        request = Request(
            kind=task.kind,
            file=str(work / task.file),
            object=task.object,
            reference=str(reference.absolute()) if reference else "",
            seconds=seconds,
            token=secrets.token_hex(),
        )
        (folder / REQUEST).write_bytes(msgspec.json.encode(request))
        # Not in the folder of the student's files, nor with it in the search path: a random.py of theirs would be taken for Python's own.
        argv = [sys.executable, "-P", "-m", "lockstep.lab.trials", str(folder)]
        ended, own_s = run_child(argv, folder, folder, patience)
        own_s = own_s if ended in ("over", "killed", "starved") else limit_s
        whole.seconds -= own_s
        return _verdict(folder, request, ended, patience), own_s


def run_child(argv: list[str], folder: Path, cwd: Path, patience: Patience) -> tuple[Ended, float]:
    """Run a command to its end, or until our patience is; how it ended, and the seconds that it took for itself.

    None of its processes is left afterwards.
    """
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
                    code = process.wait(LOOK_S)
                    return "killed" if code in KILLED else "over", watch.own_s
                except subprocess.TimeoutExpired:
                    if ended := watch.look():
                        return ended, watch.own_s
        finally:
            guard.end(process, END_S)


def _verdict(folder: Path, request: Request, ended: Ended, patience: Patience) -> Verdict:
    found = None
    with suppress(Damaged):
        found = read_shape(folder / VERDICT, Verdict)
    if found is not None and found.token == request.token:
        return found
    if ended == "starved":
        return Verdict(
            right=False,
            settled=False,
            why=f"the machine was too busy: no verdict within {patience.wall_s:.0f} s; grade it again",
        )
    if ended not in ("over", "killed"):
        # A race is the reference's, too, and whoever fails in it is named by their own clocks.
        raced = bool(request.reference)
        why = f"the race was ended: {ended}" if raced else f"it hangs: {ended}"
        return Verdict(right=False, settled=not raced, failed=True, why=why)
    said = last_line(read_end(folder / LOG))
    return Verdict(
        right=False,
        failed=True,
        why=f"the trial ended without a verdict: {printable(said)[:300] or 'it said nothing'}",
    )
