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
from typing import Any, NoReturn

from lockstep.errors import DataError, InputError, LockstepError, RunCancelled, RunFailed
from lockstep.launch.base import Start
from lockstep.launch.stall import Stalled, StallWatch
from lockstep.process import PARENT
from lockstep.run import Run, Spec, folder_error, read_json

Progress = Callable[[Run, Spec], None]

POLL_S = 0.05
PROGRESS_S = 0.2
# After the first failure the other ranks notice within a moment and write their account; then they are ended.
GRACE_S = 3.0
KILL_AFTER_S = 2.0


@dataclass
class Watched:
    process: subprocess.Popen[bytes]
    start: Start
    ended: float | None = None


def supervise(run: Run, spec: Spec, starts: list[Start], host_index: int, progress: Progress | None) -> None:
    """Returns when the run is done; raises what ended it otherwise. No process is left behind either way."""
    watched: list[Watched] = []
    first_host = host_index == 0
    with signals_as_interrupt():
        try:
            if first_host:
                run.write_status("starting", supervisor_pid=os.getpid(), host=platform.node())
            watched = [_begin(run, start) for start in starts]
            _follow(run, spec, watched, progress)
        except KeyboardInterrupt:
            _end_all(watched)
            if first_host:
                run.write_status("cancelled", cause="stopped by the user")
            raise RunCancelled(f"stopped; what was measured is in {run.folder}") from None
        except Stalled as stalled:
            _end_all(watched)
            if first_host:
                run.write_status("stalled", cause=stalled.cause, rank=stalled.rank)
            raise RunFailed(f"run stalled: {stalled.cause}; what was measured is in {run.folder}") from None
        except OSError as error:
            _end_all(watched)
            raise folder_error(run.folder, error) from None
        finally:
            _end_all(watched)
        # A rank that stumbles on its way out, after rank 0 has written the results, does not undo them.
        finished = first_host and run.recorded_status()["state"] == "done"
        if any(w.process.returncode for w in watched) and not finished:
            _report_failure(run, spec, watched, first_host)


def _begin(run: Run, start: Start) -> Watched:
    environment = {**start.defaults, **os.environ, **start.environment, PARENT: str(os.getpid())}
    with (run.folder / "launcher.log").open("ab") as log:
        # A session of its own: Ctrl-C at the terminal reaches us, and we end the ranks in order.
        process = subprocess.Popen(
            start.argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return Watched(process, start)


def _follow(run: Run, spec: Spec, watched: list[Watched], progress: Progress | None) -> None:
    next_progress, failed_at = 0.0, None
    stall = StallWatch(run, spec)
    while True:
        now = time.monotonic()
        for w in watched:
            if w.ended is None and w.process.poll() is not None:
                w.ended = now
                if w.process.returncode and failed_at is None:
                    failed_at = now
        if all(w.ended is not None for w in watched):
            break
        if failed_at is not None and now - failed_at > GRACE_S:
            return
        if now >= next_progress:
            next_progress = now + PROGRESS_S
            if progress:
                progress(run, spec)
            if failed_at is None:
                stall.check(now)
        time.sleep(POLL_S)
    if progress:
        progress(run, spec)


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


def _report_failure(run: Run, spec: Spec, watched: list[Watched], first_host: bool) -> NoReturn:
    cause = first_cause(run, watched)
    if first_host:
        run.write_status("failed", **cause)
    kind: type[LockstepError] = {2: InputError, 4: DataError}.get(int(cause.get("exit_code") or 0), RunFailed)
    if kind is not RunFailed:
        raise kind(str(cause["message"]))
    raise RunFailed(f"run failed: {cause['cause']}; what was measured is in {run.folder}")


def first_cause(run: Run, watched: list[Watched]) -> dict[str, Any]:
    """Which rank failed first, and why: a signal, an exception, or the loss of the others."""
    killed = sorted(_killed(run, watched), key=lambda account: float(account["time"]))
    accounts = sorted(run.failures(), key=lambda account: float(account["time"]))
    own = [account for account in accounts if not account["consequence"]]
    if own and not (killed and killed[0]["signal"] in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")):
        account = own[0]
        where = f" after step {account['step']}" if account["step"] else ""
        text = f"rank {account['rank']}{where}: {account['kind']}: {account['message']}"
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
        hint = " (by hand, or by the system for lack of memory)" if name == "SIGKILL" else ""
        return {
            "cause": f"rank {rank} was killed by {name} after step {step}{hint}",
            "rank": rank,
            "signal": name,
            "step": step,
        }
    if accounts:
        account = accounts[0]
        holder = _who_held_up(run, accounts)
        if holder is not None:
            step = _step_of(run, holder)
            text = f"rank {holder} did not come to the exchange after step {step}, and the others gave up waiting"
            return {"cause": text, "rank": holder, "step": step}
        text = f"rank {account['rank']} after step {account['step']}: lost the other ranks: {account['message']}"
        return {"cause": text, "rank": account["rank"], "step": account["step"]}
    codes = ", ".join(
        f"{w.start.rank if w.start.rank is not None else 'launcher'}: {w.process.returncode}" for w in watched
    )
    return {"cause": f"no rank left an account (exit codes {codes}); see {run.folder / 'launcher.log'}"}


def _who_held_up(run: Run, accounts: list[dict[str, Any]]) -> int | None:
    """The one rank that gave no account and was not waiting itself: the others timed out because of it."""
    told = {account["rank"] for account in accounts}
    held = [beat["rank"] for beat in run.rank_statuses() if beat["rank"] not in told and not beat.get("waits", True)]
    return int(held[0]) if len(held) == 1 else None


def _killed(run: Run, watched: list[Watched]) -> Iterator[dict[str, Any]]:
    """Ranks that a signal ended before we ended any: our own children, torchrun's accounts, and the sitters'."""
    for w in watched:
        if w.start.rank is not None and w.ended is not None and w.process.returncode < 0:
            yield {"rank": w.start.rank, "signal": signal.Signals(-w.process.returncode).name, "time": w.ended}
    for path in run.folder.glob("agent-*.json"):
        for account in (read_json(path) or {}).get("failures", []):
            if account["exit_code"] < 0:
                yield {**account, "signal": signal.Signals(-account["exit_code"]).name}
    for path in run.folder.glob("ranks/*/exit.json"):
        ended = read_json(path)
        if ended:
            yield {**ended, "signal": signal.Signals(-ended["exit_code"]).name}


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
