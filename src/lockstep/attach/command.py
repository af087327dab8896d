"""One attached command from its start to its end: a run folder first, then the command, then what its ranks have recorded."""

from __future__ import annotations

import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.attach import seen
from lockstep.errors import RunFailed
from lockstep.inside.site.sitecustomize import RUN
from lockstep.launch.cause import signal_name
from lockstep.launch.ending import FolderWatch, recorded_end, signals_as_interrupt
from lockstep.machine import starving
from lockstep.measure.environment import machine, version_of
from lockstep.placement import Placement
from lockstep.plan import Plan
from lockstep.recipe import Recipe
from lockstep.run import Options, Run, Spec, check_name, runs_root, write_atomic
from lockstep.text import file_part
from lockstep.turns import guard

# How long a command has to end by itself after Ctrl-C: it may write a checkpoint.
GRACE_S = 10.0
LOOK_S = 0.5
UNKNOWN = "not known"


class CommandFailed(RunFailed):
    """The command's own exit code is passed on."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code


def attach(
    argv: Sequence[str],
    runs: Path | None = None,
    name: str | None = None,
    batch: int | None = None,
    planned: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Run the command to its end. Returns its run; raises what ended it otherwise, with what was measured in the folder.

    `planned` is told of the folder before the command starts.
    """
    guard.check("attach", argv[0])
    run = _plan(argv, runs, name, batch)
    planned(run)
    try:
        code = _watch(run, argv)
    finally:
        run.release_reserve()
    if code:
        cause = _cause(run, code)
        run.write_final_status("failed", **cause)
        raise CommandFailed(f"the command failed: {cause['cause']}; what was measured is in {run.folder}", code)
    run.write_done()
    return run


def _watch(run: Run, argv: Sequence[str]) -> int:
    """Start it and follow it to its end: its exit code. Whatever else ends it is written down and raised."""
    watch, meter = FolderWatch(run), starving.Meter(first=True)
    started: list[subprocess.Popen[bytes]] = []
    with signals_as_interrupt() as received:

        def end() -> dict[str, Any]:
            for process in started:
                _end(process, received[-1] if received else signal.SIGINT)
            seen.conclude(run, meter.read())
            return {}

        with recorded_end(run, watch, end):
            run.write_status("starting", supervisor_pid=os.getpid(), host=platform.node())
            started.append(_start(run, argv))
            _follow(run, started[0], watch)
            seen.conclude(run, meter.read())
    return started[0].returncode


def _plan(argv: Sequence[str], runs: Path | None, name: str | None, batch: int | None) -> Run:
    """The folder, as planned. What the command computes, and on how many ranks, is known to itself so far."""
    if name is not None:
        check_name("--name ", name, "run")
    script = script_of(argv)
    safe = file_part(script.removesuffix(".py"), 40)
    identity = name or f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}-attach-{secrets.token_hex(2)}"
    spec = Spec(
        id=identity,
        created=time.time(),
        lockstep=str(version_of("lockstep")),
        recipe=Recipe(model=script, data=UNKNOWN, global_batch=batch or 1),
        placement=Placement(launcher="single", device="cpu", strategy="single", pin=False),
        plan=Plan(
            ranks=1,
            global_batch=batch or 0,
            micro_batch=0,
            accumulation=0,
            train_samples=0,
            test_samples=0,
            steps_per_epoch=0,
            last_batch=batch or 0,
            total_steps=0,
        ),
        options=Options(attached=list(argv), save_model=False),
        data_origin=UNKNOWN,
        command=[list(argv)],
    )
    run = Run.create(runs_root(runs).absolute(), spec)
    # Its Python may be another one than ours, with other packages.
    ours = machine()
    write_atomic(run.folder / "environment.json", {key: ours[key] for key in ours if key not in seen.VERSIONS})
    return run


def script_of(argv: Sequence[str]) -> str:
    """What a command is known by: the script, or the module, that it runs; else the program."""
    for before, word in zip(("", *argv), argv, strict=False):
        if word.endswith(".py"):
            return Path(word).name
        if before == "-m" and not word.startswith("torch.distributed"):
            return word
    return Path(argv[0]).name


def _start(run: Run, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Its output is the user's own. A session of its own: Ctrl-C reaches us, and we pass it on once."""
    # The option means nothing to Python: it names the run, so that the dashboard knows whom to ask to stop it.
    words = [sys.executable, "-P", "-X", str(run.folder), guard.__file__, *argv]
    return subprocess.Popen(words, env=guard.hooked(RUN, run.folder), start_new_session=True)


def _follow(run: Run, process: subprocess.Popen[bytes], watch: FolderWatch) -> None:
    """Until it has ended; what its ranks have told meanwhile is put into the folder, for whoever looks on."""
    told: object = None
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
            return
        if (problem := watch.problem()) is not None:
            raise problem
        told = seen.announce(run, told)


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    """All of it gets the signal that we got, as from a terminal, and time to end by itself; what is left then is killed by the guard."""
    if process.poll() is None:
        guard.send(process.pid, signal.Signals(number))
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(GRACE_S)
    if process.poll() is None:
        process.terminate()
        process.wait()


def _cause(run: Run, code: int) -> dict[str, Any]:
    """What a rank has told of its own end; else what the exit code says."""
    reports = sorted(run.failures(), key=lambda report: float(report["time"]))
    if reports:
        report = reports[0]
        where = f" after step {report['step']}" if report.get("step") else ""
        text = f"rank {report['rank']}{where}: {report['kind']}: {report['message']}"
        return {"cause": f"{text} (exit code {code})", "rank": report["rank"], "step": report.get("step")}
    killed = f", which {signal_name(128 - code)} has" if code > 128 and code - 128 in _SIGNALS else ""
    return {"cause": f"it ended with exit code {code}{killed}, and its own output says why"}


_SIGNALS = {int(number) for number in signal.Signals}
