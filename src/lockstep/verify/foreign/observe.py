"""One run of the user's command under watch: started with the hooks, ended when every rank has the steps that are asked for."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from lockstep.errors import RunFailed
from lockstep.inside.proof_files import OVER
from lockstep.inside.site.sitecustomize import PROOF
from lockstep.inside.witness import SETTINGS
from lockstep.launch.ending import signals_as_interrupt
from lockstep.reading import read_file
from lockstep.turns import guard
from lockstep.units import counted
from lockstep.verify.foreign import undo
from lockstep.verify.foreign.records import Order, Rank, done, problem, read

LOOK_S = 0.1
# One rank has all its steps, and the others take none any more: they wait for it.
STUCK_S = 30.0
# No rank has all its steps, none takes any, and the command says nothing: as long as PyTorch waits for a collective.
SILENT_S = 1800.0
# How long the guard has to end all that the command has started.
END_S = 10.0
OUTPUT = "output.txt"
# What a launcher raises for its ranks says nothing about why.
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)\b: .*)$", re.MULTILINE)
_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "SignalException")


class Watched(msgspec.Struct, frozen=True):
    """What the witness is asked for (inside/ledger.py)."""

    steps: int
    no_dropout: bool = False
    perturb: float = 0.0
    stretch: tuple[int, int] | None = None
    """A loader that is made for batches of the first size hands out batches of the second."""
    replay: Order | None = None
    """What the loader's sampler is to hand out, instead of what it would."""
    park: bool = True


def observe(label: str, argv: Sequence[str], folder: Path, watched: Watched) -> list[Rank]:
    """Run the command until its ranks have taken their steps. Raises RunFailed, in one line, where it comes to nothing."""
    folder.mkdir(parents=True)
    (folder / SETTINGS).write_text(json.dumps(msgspec.to_builtins(watched)))
    code = _run(argv, folder)
    said = problem(folder)
    if said is not None:
        raise RunFailed(f"verify: {label}: a process could not be watched: {said}")
    if code:
        raise RunFailed(f"verify: {label}: the command ended with exit code {code}: {_last_words(folder)}")
    ranks = read(folder)
    if not any(ranks):
        raise RunFailed(
            f"verify: {label}: no step was seen: the command never called an optimizer of torch.optim in a Python that reads PYTHONPATH"
        )
    return ranks


def _run(argv: Sequence[str], folder: Path) -> int:
    """Its exit code; 0 where we have ended it, because all is there."""
    environment = guard.hooked(PROOF, folder)
    words = [sys.executable, "-P", undo.__file__, str(folder), *argv]
    with (folder / OUTPUT).open("wb") as output, signals_as_interrupt():
        process = subprocess.Popen(
            words, env=environment, start_new_session=True, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
        try:
            return process.returncode if _finished_by_itself(process, folder) else 0
        finally:
            (folder / OVER).touch()
            _end(process)
            problems = undo.undo(folder)
            if problems:
                raise RunFailed(f"verify: a file could not be put back: {'; '.join(problems)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait, however long it takes: it puts back what the command has overwritten. Whoever is in a hurry has to kill us, and it goes on."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        guard.send(process.pid, signal.SIGKILL)
    process.wait()


def _finished_by_itself(process: subprocess.Popen[bytes], folder: Path) -> bool:
    seen = said = 0
    stepped = spoke = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
            return True
        now = time.monotonic()
        complete, world, steps = done(folder)
        if world and complete == world:
            return False
        if steps != seen:
            seen, stepped = steps, now
        if (words := (folder / OUTPUT).stat().st_size) != said:
            said, spoke = words, now
        if complete and now - stepped > STUCK_S:
            return False
        if now - max(stepped, spoke) > SILENT_S:
            raise RunFailed(
                f"verify: for {SILENT_S / 60:g} minutes the command has taken no step and said nothing, after {counted(steps, 'step')} of all "
                f"ranks; its last words: {_last_words(folder)}"
            )


def _last_words(folder: Path) -> str:
    text = (read_file(folder / OUTPUT) or b"").decode(errors="replace")
    errors = [line for line in _ERROR.findall(text) if not any(name in line for name in _OF_LAUNCHERS)]
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]  # no rulers
    refused = [
        line for line in lines if "can't open file" in line or "No module named" in line
    ]  # Python's own, before any script
    return next(iter([*errors, *refused, *lines[-1:]]), "it has said nothing")
