"""Why a run failed: the first cause, found among what each process left behind and how it ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep import shapes
from lockstep.errors import DataError, InputError, LockstepError, RunFailed
from lockstep.launch.base import Watched
from lockstep.launch.hang import Hang, diagnose
from lockstep.measure.callsite import call_site, of_dump
from lockstep.run import Run, folder_problem, read_json

# How gloo says that a rank sent more than another expected, before it aborts.
_TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
# How backends say that nobody came in time; a connection that broke is another thing (backends/group.py has both).
LATE = ("Timed out", "Wait timeout", "Socket Timeout")


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
    reports = sorted(run.failures(), key=lambda report: float(report["time"]))
    own = [report for report in reports if not report["consequence"]]
    launcher = _killed_launcher(run, watched)
    # A launcher whose rank failed ends with an exit code. One that a signal ended was the first to go, and took its ranks with it.
    if launcher is not None and not (own and float(own[0]["time"]) < launcher["time"] - 1.0):
        return {key: value for key, value in launcher.items() if key != "time"}
    killed = sorted(_killed(run, watched), key=lambda report: float(report["time"]))
    if _any_late(reports):  # whoever was waited for in vain is ended by its launcher, in order
        killed = [each for each in killed if each["signal"] != "SIGTERM"]
    if own and not (killed and killed[0]["signal"] in _VIOLENT):
        report = own[0]
        # An error of a collective itself: whoever got it first may be the one who called the right one.
        if _in_collective(report) and (hang := _hang(run, reports)):
            said = f"{hang.text} (rank {report['rank']}: {report['kind']}: {report['message']})"
            return _named(hang, {"cause": said, "step": report["step"], "exit_code": report["exit_code"]})
        where = f" after step {report['step']}" if report["step"] else ""
        kind = f"{report['kind']}: " if report["kind"] else ""
        text = f"rank {report['rank']}{where}: {kind}{report['message']}{_raised_at(report)}"
        return {
            "cause": text,
            "rank": report["rank"],
            "step": report["step"],
            "exit_code": report["exit_code"],
            "message": report["message"],
        }
    if killed and (hang := _aborted(run, reports, killed)):
        return _named(
            hang, {"cause": hang.text, "signal": killed[0]["signal"], "step": _step_of(run, killed[0]["rank"])}
        )
    if killed:
        rank, name = killed[0]["rank"], killed[0]["signal"]
        step = _step_of(run, rank)
        return {
            "cause": f"rank {rank} was killed by {name} after step {step}{_hint(name)}",
            "rank": rank,
            "signal": name,
            "step": step,
        }
    if reports:
        return _lost(run, reports)
    problem = folder_problem(run.folder)
    if problem is not None:
        return {"cause": f"no rank could write a failure report: {problem}"}
    codes = ", ".join(
        f"{f'rank {w.start.rank}' if w.start.rank is not None else w.start.what}: {w.process.returncode}"
        for w in watched
    )
    return {"cause": f"no rank left a failure report (exit codes {codes}); see {run.folder / 'launcher.log'}"}


def _hint(name: str) -> str:
    return " (by hand, or by the system for lack of memory)" if name == "SIGKILL" else ""


def _lost(run: Run, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Nobody says more than that it lost the others: who was it that they lost?"""
    report = reports[0]
    told = {each["rank"] for each in reports}
    silent = [beat for beat in run.rank_statuses() if beat["rank"] not in told]
    # The first to give up closes its connections, which others may report before it has written its own account.
    late = _any_late(reports)
    # A rank that hangs in code of its own still reports, and does not wait; the others gave up waiting for it.
    held = [beat for beat in silent if not beat.get("waits", True)]
    if late and len(held) == 1:
        rank = int(held[0]["rank"])
        step = _step_of(run, rank)
        text = f"rank {rank} did not come to the exchange after step {step}, and the others gave up waiting"
        if hang := _hang(run, reports):
            text += f": {hang.text}"
        return {"cause": text, "rank": rank, "step": step}
    if late and (hang := _hang(run, reports)):
        return _named(hang, {"cause": f"{hang.text}, and gave up", "step": report["step"]})
    text = f"rank {report['rank']} after step {report['step']}: lost the other ranks: {report['message']}"
    if silent and not late:
        ranks = ", ".join(str(beat["rank"]) for beat in silent)
        hosts = ", ".join(sorted({str(beat.get("host")) for beat in silent}))
        who = f"rank {ranks}" if len(silent) == 1 else f"ranks {ranks}"
        text += f"; {who} on {hosts} left no failure report: the process or its host died"
    return {"cause": text, "rank": report["rank"], "step": report["step"]}


def _any_late(reports: list[dict[str, Any]]) -> bool:
    return any(sign in report["message"] for report in reports for sign in LATE)


def _in_collective(report: dict[str, Any]) -> bool:
    return report["kind"] == "RuntimeError" and bool((report.get("site") or {}).get("collective"))


def _hang(
    run: Run,
    reports: list[dict[str, Any]],
    aborted: Mapping[int, dict[str, Any]] = MappingProxyType({}),
    broken: str = "",
) -> Hang | None:
    """What the places of all ranks tell: where those that failed gave up, and where the others were seen last. None unless all are known."""
    sites = {int(beat["rank"]): beat.get("site") for beat in run.rank_statuses()}
    sites |= {int(report["rank"]): report.get("site") for report in reports} | dict(aborted)
    known = {rank: site for rank, site in sites.items() if site}
    return diagnose(known, broken=broken) if len(known) == len(sites) else None


def _aborted(run: Run, reports: list[dict[str, Any]], killed: list[dict[str, Any]]) -> Hang | None:
    """gloo ends a process that got more than it expected, which is the one whose call may be right. Its stack and gloo's words are in its log."""
    sites, words = {}, ""
    for end in killed:
        if end["signal"] in ("SIGABRT", "SIGTERM"):  # its launcher may have ended another one for it
            text = _end_of(run.rank_folder(end["rank"]) / "log.txt")
            sites[int(end["rank"])] = call_site(of_dump(text))
            found = _TOO_LONG.search(text)
            words = f"gloo: {found[1]} bytes came where {found[2]} were expected" if found else words
    if not words:
        return None
    known = {rank: site for rank, site in sites.items() if site.get("collective")}
    return _hang(run, reports, sites, words) or diagnose(known, broken=words)


def _end_of(log: Path, most: int = 1 << 16) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _named(hang: Hang, cause: dict[str, Any]) -> dict[str, Any]:
    return cause if hang.rank is None else {**cause, "rank": hang.rank}


def _raised_at(report: dict[str, Any]) -> str:
    """The line of the user's code, where the error came up there."""
    site = report.get("site") or {}
    return f" ({site['file']}:{site['line']})" if site.get("file") and not site["file"].startswith("lockstep/") else ""


def _killed_launcher(run: Run, watched: list[Watched]) -> dict[str, Any] | None:
    """torchrun, mpirun or srun, where a signal ended it before we ended any."""
    for w in watched:
        if w.start.rank is None and w.ended is not None and w.process.returncode < 0:
            name, step = signal_name(w.process.returncode), _step_of(run, 0)
            cause = f"{w.start.what} (process {w.process.pid}) was killed by {name} after step {step}{_hint(name)}"
            return {"cause": cause, "signal": name, "step": step, "time": w.ended}
    return None


def _killed(run: Run, watched: list[Watched]) -> Iterator[dict[str, Any]]:
    """Ranks that a signal ended before we ended any: our own children, torchrun's reports, and the monitors'."""
    for w in watched:
        if w.start.rank is not None and w.ended is not None and w.process.returncode < 0:
            yield {"rank": w.start.rank, "signal": signal_name(w.process.returncode), "time": w.ended}
    for path in run.folder.glob("agent-*.json"):
        for report in (read_json(path, shapes.Agent) or {}).get("failures", []):
            if report["exit_code"] < 0:
                yield {**report, "signal": signal_name(report["exit_code"])}
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
    from lockstep.measure.records import steps_taken

    return steps_taken(run.rank_folder(rank))
