"""Which number formats work here, in one line each: for runs, `doctor` and the environment record."""

from __future__ import annotations

import os
import shutil
import subprocess

from lockstep.errors import InputError
from lockstep.machine import facts, trial
from lockstep.machine.cpu import INSTRUCTIONS, allowed_flags
from lockstep.machine.facts import Facts
from lockstep.placement import Placement, elsewhere

FORMATS = ("fp32", "bf16", "fp16", "int8")


def problem(kind: str, known: Facts) -> str | None:
    """What is wrong with a format on this machine, cap included; None where it works."""
    found = known.effective()
    for name in (trial.EVERYTHING, *found):
        if found.get(name) and name.split()[0] in (trial.EVERYTHING, kind):
            return f"{name} {found[name]} on this machine"
    return None


def check(option: str, kind: str, instead: str) -> None:
    """Refuse a format that does not work here, in the user's own terms. Waits for the trial where there was none."""
    try:
        known = facts.get()
    except trial.NotKnown as error:
        raise InputError(f"{option}: whether {kind} works here could not be tried: {error}") from None
    wrong = problem(kind, known)
    if wrong:
        tried = " under any ONEDNN_MAX_CPU_ISA" if not _set_by_user(known) else ""
        raise InputError(f"{option}: {wrong}{tried}: {instead}")


def _set_by_user(known: Facts) -> bool:
    return any(name in known.machine for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"))


def cap_line(known: Facts | None) -> str | None:
    """What the ranks get and why, in one line; None where nothing is capped."""
    if known is None or not known.cap:
        return None
    setting = " ".join(f"{name}={value}" for name, value in known.cap.items())
    name = trial.failed(known.answers)[0]
    return f"{setting} is set for the ranks: without it {name} {known.answers[name]} on this machine"


def works_line(known: Facts) -> str:
    """All formats, the answer first."""
    good = [kind for kind in FORMATS if problem(kind, known) is None]
    return f"{', '.join(good) or 'no number format'} {'work' if len(good) > 1 else 'works'} here (tried in child processes)"


def cpu_support() -> dict[str, list[str]]:
    """Which instructions this CPU has for each number format, those that a cap takes away left out. Without any, the format is
    computed through fp32, which costs time."""
    flags = allowed_flags({**os.environ, **facts.rank_environment()})
    return {kind: [name for flag, name in names.items() if flag in flags] for kind, names in INSTRUCTIONS.items()}


def precision_line(precision: str, placement: Placement) -> str:
    """One line on what a 16-bit format is on this hardware."""
    kind = precision.removeprefix("pure-")
    if elsewhere(placement):
        return f"precision {precision}: each node tries what it supports before it trains"
    if placement.device == "cuda":
        capability = cuda_capability() or "unknown"
        least = {"bf16": "8.0", "fp16": "7.0"}[kind]
        return f"precision {precision}: CUDA capability {capability} (tensor cores for {kind} from {least} on)"
    known = facts.known()
    state = "not tried yet" if known is None else problem(kind, known) or "works here (tried)"
    found = cpu_support()[kind]
    if found:
        return f"precision {precision}: {state}; this CPU has {', '.join(found)}"
    missing = " nor ".join(INSTRUCTIONS[kind].values())
    return (
        f"precision {precision}: {state}; without {missing} {kind} is computed through fp32, and will be slower than it"
    )


def cuda_capability() -> str | None:
    """The first GPU's compute capability, from its driver's own tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    words = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.split("\n")[0].strip() or None
