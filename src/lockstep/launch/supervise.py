"""Watching a run: start the processes, follow them, end them all when one fails, and find the first cause."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from lockstep import shapes
from lockstep.errors import DataError, InputError, LockstepError, RunCancelled, RunFailed
from lockstep.launch.base import Start
from lockstep.launch.cores import cores_of
from lockstep.launch.stall import Stalled, StallWatch
from lockstep.process import CORES, PARENT
from lockstep.run import FolderError, Run, Spec, folder_error, folder_problem, read_json

Progress = Callable[[Run, Spec], None]

POLL_S = 0.05
PROGRESS_S = 0.2
# After the first failure the other ranks notice within a moment and write their account; then they are ended.
GRACE_S = 3.0
KILL_AFTER_S = 2.0
# How backends say that nobody came in time; a connection that broke is another thing (parallel/group.py has both).
LATE = ("Timed out", "Wait timeout", "Socket Timeout")


@dataclass
class Watched:
    process: subprocess.Popen[bytes]
    start: Start
    ended: float | None = None
    """When it was seen to have ended by itself, by the clock that accounts use; None where we ended it."""


class CannotStart(Exception):
    """The system refused to start a process."""


def supervise(run: Run, spec: Spec, starts: list[Start], host_index: int, progress: Progress | None) -> None:
    """Returns when the run is done; raises what ended it otherwise. No process is left behind either way."""
    watched: list[Watched] = []
    first_host = host_index == 0
    watch = FolderWatch(run)

    def ends(state: str, **more: Any) -> None:
        """Why the run ended is said in any case; where it can be written down, it is."""
        _end_all(watched)
        if first_host and watch.problem() is None:
            run.write_final_status(state, **more)

    with signals_as_interrupt(), cores_of(spec.placement) as cores:
        try:
            if first_host:
                pinned = {"cores": cores[CORES]} if CORES in cores else {}
                run.write_status("starting", supervisor_pid=os.getpid(), host=platform.node(), **pinned)
            for start in starts:
                watched.append(_begin(run, start, cores))
            _follow(run, spec, watched, watch, Reporter(run, spec, progress))
        except KeyboardInterrupt:
            ends("cancelled", cause="stopped by the user")
            raise RunCancelled(f"stopped; what was measured is in {run.folder}") from None
        except Stalled as stalled:
            ends("stalled", cause=stalled.cause, rank=stalled.rank)
            raise RunFailed(f"run stalled: {stalled.cause}; what was measured is in {run.folder}") from None
        except (CannotStart, FolderError) as error:
            ends("failed", cause=str(error))
            raise RunFailed(f"run failed: {error}") from None
        except OSError as error:
            ends("failed", cause=str(folder_error(run.folder, error)))
            raise folder_error(run.folder, error) from None
        finally:
            _end_all(watched)
        if (problem := watch.problem()) is not None:
            raise RunFailed(f"run failed: {problem}")
        # A rank that stumbles on its way out, after rank 0 has written the results, does not undo them.
        finished = first_host and run.recorded_status()["state"] == "done"
        if any(w.process.returncode for w in watched) and not finished:
            cause = first_cause(run, watched)
            if first_host:
                run.write_final_status("failed", **cause)
            raise failure(run, cause)


def _begin(run: Run, start: Start, cores: dict[str, str]) -> Watched:
    environment = {**start.defaults, **os.environ, **start.environment, **cores, PARENT: str(os.getpid())}
    with (run.folder / "launcher.log").open("ab") as log:
        try:
            # A session of its own: Ctrl-C at the terminal reaches us, and we end the ranks in order.
            process = subprocess.Popen(
                start.argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            what = f"rank {start.rank}" if start.rank is not None else start.what
            raise CannotStart(f"cannot start {what} ({start.argv[0]}): {error.strerror}") from None
    return Watched(process, start)


class FolderWatch:
    """The run folder as it was at the start. One that is removed, or replaced, in mid-run is not written to any more."""

    def __init__(self, run: Run) -> None:
        self._folder = run.folder
        self._was = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino

    def problem(self) -> FolderError | None:
        try:
            same = self._was is not None and self._identity() == self._was
        except OSError:  # a file server that does not answer for a moment
            return None
        return None if same else FolderError(f"the run folder {self._folder} was removed while the run was under way")


class Reporter:
    """Shows how a run goes. Whoever looked on may go away (`lockstep run … | head`), and the run goes on."""

    def __init__(self, run: Run, spec: Spec, progress: Progress | None) -> None:
        self._run, self._spec, self._progress = run, spec, progress

    def __call__(self) -> None:
        if self._progress is None:
            return
        try:
            self._progress(self._run, self._spec)
        except OSError:  # a closed pipe, a terminal that hung up, a log on a full disk
            self._progress = None


def _follow(run: Run, spec: Spec, watched: list[Watched], watch: FolderWatch, report: Reporter) -> None:
    next_look, failed_at = 0.0, None
    stall = StallWatch(run, spec)
    while True:
        now = time.monotonic()
        for w in watched:
            if w.ended is None and w.process.poll() is not None:
                w.ended = time.time()
                if w.process.returncode and failed_at is None:
                    failed_at = now
        if all(w.ended is not None for w in watched):
            break
        if failed_at is not None and now - failed_at > GRACE_S:
            return
        if now >= next_look:
            next_look = now + PROGRESS_S
            if (problem := watch.problem()) is not None:
                raise problem
            report()
            if failed_at is None:
                stall.check(now)
        time.sleep(POLL_S)
    report()


def _end_all(watched: list[Watched]) -> None:
    """SIGTERM, then SIGKILL, to each process group that is still there."""
    for sign, patience in ((signal.SIGTERM, KILL_AFTER_S), (signal.SIGKILL, KILL_AFTER_S)):
        left = [w for w in watched if w.process.poll() is None]
        for w in left:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(w.process.pid, sign)
        until = time.monotonic() + patience
        for w in left:
            with suppress(subprocess.TimeoutExpired):
                w.process.wait(max(0.0, until - time.monotonic()))


def failure(run: Run, cause: dict[str, Any]) -> LockstepError:
    """What to raise for a cause: with the exit code that the rank's own error has."""
    kind: type[LockstepError] = {2: InputError, 4: DataError}.get(int(cause.get("exit_code") or 0), RunFailed)
    if kind is not RunFailed:
        return kind(str(cause["message"]))
    return RunFailed(f"run failed: {cause['cause']}; what was measured is in {run.folder}")


# Signals that nothing of the program's own asks for: whoever died of one did not die of another rank's failure.
_VIOLENT = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")


def first_cause(run: Run, watched: list[Watched]) -> dict[str, Any]:
    """What failed first, and why: a launcher or a rank by a signal, a rank by an exception, or the loss of the others."""
    accounts = sorted(run.failures(), key=lambda account: float(account["time"]))
    own = [account for account in accounts if not account["consequence"]]
    launcher = _killed_launcher(run, watched)
    # A launcher whose rank failed ends with an exit code. One that a signal ended was the first to go, and took its ranks with it.
    if launcher is not None and not (own and float(own[0]["time"]) < launcher["time"] - 1.0):
        return {key: value for key, value in launcher.items() if key != "time"}
    killed = sorted(_killed(run, watched), key=lambda account: float(account["time"]))
    if own and not (killed and killed[0]["signal"] in _VIOLENT):
        account = own[0]
        where = f" after step {account['step']}" if account["step"] else ""
        kind = f"{account['kind']}: " if account["kind"] else ""
        text = f"rank {account['rank']}{where}: {kind}{account['message']}"
        return {
            "cause": text,
            "rank": account["rank"],
            "step": account["step"],
            "exit_code": account["exit_code"],
            "message": account["message"],
        }
    if killed:
        rank, name = killed[0]["rank"], killed[0]["signal"]
        step = _step_of(run, rank)
        return {
            "cause": f"rank {rank} was killed by {name} after step {step}{_hint(name)}",
            "rank": rank,
            "signal": name,
            "step": step,
        }
    if accounts:
        return _lost(run, accounts)
    problem = folder_problem(run.folder)
    if problem is not None:
        return {"cause": f"no rank could leave an account: {problem}"}
    codes = ", ".join(
        f"{f'rank {w.start.rank}' if w.start.rank is not None else w.start.what}: {w.process.returncode}"
        for w in watched
    )
    return {"cause": f"no rank left an account (exit codes {codes}); see {run.folder / 'launcher.log'}"}


def _hint(name: str) -> str:
    return " (by hand, or by the system for lack of memory)" if name == "SIGKILL" else ""


def _lost(run: Run, accounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Nobody says more than that it lost the others: who was it that they lost?"""
    account = accounts[0]
    told = {each["rank"] for each in accounts}
    silent = [beat for beat in run.rank_statuses() if beat["rank"] not in told]
    late = any(sign in account["message"] for sign in LATE)
    # A rank that hangs in code of its own still reports, and does not wait; the others gave up waiting for it.
    held = [beat for beat in silent if not beat.get("waits", True)]
    if late and len(held) == 1:
        rank = int(held[0]["rank"])
        step = _step_of(run, rank)
        text = f"rank {rank} did not come to the exchange after step {step}, and the others gave up waiting"
        return {"cause": text, "rank": rank, "step": step}
    text = f"rank {account['rank']} after step {account['step']}: lost the other ranks: {account['message']}"
    if silent and not late:
        ranks = ", ".join(str(beat["rank"]) for beat in silent)
        hosts = ", ".join(sorted({str(beat.get("host")) for beat in silent}))
        who = f"rank {ranks}" if len(silent) == 1 else f"ranks {ranks}"
        text += f"; {who} on {hosts} left no account: the process or its host died"
    return {"cause": text, "rank": account["rank"], "step": account["step"]}


def _killed_launcher(run: Run, watched: list[Watched]) -> dict[str, Any] | None:
    """torchrun, mpirun or srun, where a signal ended it before we ended any."""
    for w in watched:
        if w.start.rank is None and w.ended is not None and w.process.returncode < 0:
            name, step = signal_name(w.process.returncode), _step_of(run, 0)
            cause = f"{w.start.what} (process {w.process.pid}) was killed by {name} after step {step}{_hint(name)}"
            return {"cause": cause, "signal": name, "step": step, "time": w.ended}
    return None


def _killed(run: Run, watched: list[Watched]) -> Iterator[dict[str, Any]]:
    """Ranks that a signal ended before we ended any: our own children, torchrun's accounts, and the sitters'."""
    for w in watched:
        if w.start.rank is not None and w.ended is not None and w.process.returncode < 0:
            yield {"rank": w.start.rank, "signal": signal_name(w.process.returncode), "time": w.ended}
    for path in run.folder.glob("agent-*.json"):
        for account in (read_json(path, shapes.Agent) or {}).get("failures", []):
            if account["exit_code"] < 0:
                yield {**account, "signal": signal_name(account["exit_code"])}
    for path in run.folder.glob("ranks/*/exit.json"):
        ended = read_json(path, shapes.Exit)
        if ended and ended["exit_code"] < 0:
            yield {**ended, "signal": signal_name(ended["exit_code"])}


def signal_name(code: int) -> str:
    """What ended a process, by the exit code that Python gives it. Real-time signals have numbers only."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _step_of(run: Run, rank: int) -> int:
    from lockstep.measure.records import read_steps

    return len(read_steps(run.rank_folder(rank) / "steps.bin"))


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP stop a run as Ctrl-C does: in order, keeping what was measured."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    except ValueError:  # not in the main thread (a notebook, a test runner): leave them as they are
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
