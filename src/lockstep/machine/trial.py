"""Runs the child process that tries the cases, and searches for an instruction-set cap under which they work."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from lockstep.machine.child import EXTERNAL_SIGNALS
from lockstep.text import last_line

CHILD = (sys.executable, "-m", "lockstep.machine.child")
# Importing torch takes 2 s on an idle machine; each case has a limit of its own (child.py).
CHILD_SECONDS = 600.0
EVERYTHING = "everything"
# From the highest instruction set to the lowest: the first one that works keeps the most speed.
CAPS = tuple(
    {"ONEDNN_MAX_CPU_ISA": name}
    for name in ("AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE_VNNI", "AVX512_CORE", "AVX2")
)

Answers = dict[str, str]
"""Each case's problem, as the end of a sentence that starts with its name; "" for none."""


class NotKnown(Exception):
    """In one line, why the child gave no answer."""


def answers(environment: Mapping[str, str], command: Sequence[str] = CHILD, seconds: float = CHILD_SECONDS) -> Answers:
    """What one child found out."""
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {EVERYTHING: f"does not end within {seconds:g} s"}
    except OSError as error:
        raise NotKnown(f"{command[0]}: {error.strerror or error}") from None
    if done.returncode < 0 and -done.returncode not in EXTERNAL_SIGNALS:
        # torch itself could not be imported: that, too, is an answer.
        return {EVERYTHING: f"ends with {signal.Signals(-done.returncode).name}"}
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if done.returncode or not isinstance(found, dict):
        said = last_line(done.stderr) or f"exit code {done.returncode}"
        raise NotKnown(f"the child that tries this machine failed: {said}")
    return {str(name): str(problem) for name, problem in found.items()}


def failed(found: Answers) -> list[str]:
    """The cases that have a problem."""
    return [name for name, problem in found.items() if problem]


def best_cap(
    found: Answers, environment: Mapping[str, str], command: Sequence[str] = CHILD, seconds: float = CHILD_SECONDS
) -> tuple[dict[str, str], Answers]:
    """The cap under which most cases work (of equals, the highest) and the answers under it; no cap where none helps."""
    best: tuple[dict[str, str], Answers] = ({}, found)
    for cap in CAPS:
        if not failed(best[1]):
            break
        again = answers({**environment, **cap}, command, seconds)
        if len(failed(again)) < len(failed(best[1])):
            best = (cap, again)
    return best
