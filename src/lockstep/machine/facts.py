"""What was found out about this machine, kept for each processor, kernel, torch and setting of instruction sets."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from lockstep.files import find_once
from lockstep.machine import trial
from lockstep.machine.cache import cache_folder
from lockstep.machine.cpu import cpu_flags, cpu_model
from lockstep.reading import Damaged, read_shape
from lockstep.run import write_atomic

FORMAT = 2
# What changes the instructions that torch and its libraries use.
VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_CPU_ISA_HINTS",
)
# Names the variables that Lockstep itself has set in a rank, so that a rank knows the machine by the same name as its launcher.
CAPPED = "LOCKSTEP_CAPPED"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of this machine."""

    format: int = FORMAT
    machine: dict[str, str]
    """What they depend on."""
    answers: dict[str, str]
    """Each case's problem as the machine is, or "" for none."""
    cap: dict[str, str] = {}
    """The setting that cures some of them; empty where none is needed, or none helps."""
    capped: dict[str, str] = {}
    """Each case's problem under the cap."""
    seconds: float
    written: float = 0.0

    def effective(self) -> dict[str, str]:
        """The answers for a run, which gets the cap."""
        return self.capped if self.cap else self.answers


def depends_on(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    ours = _set_by_us(environment)
    seen = {name: environment[name] for name in VARIABLES if environment.get(name) and name not in ours}
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:16]
    return {"cpu": cpu_model(), "flags": flags, "kernel": platform.release(), "torch": torch, **seen}


def path(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder `machine` next to the data cache."""
    seen = "|".join(f"{name}={value}" for name, value in sorted(depends_on(environment).items()))
    return cache_folder().parent / "machine" / f"{hashlib.sha256(seen.encode()).hexdigest()[:16]}.json"


def known() -> Facts | None:
    """The stored facts; None where this machine has not been tried yet."""
    try:
        facts = read_shape(path(), Facts)
    except Damaged:
        return None
    return facts if facts and facts.format == FORMAT else None


def get(command: Sequence[str] = trial.CHILD, seconds: float = trial.CHILD_SECONDS) -> Facts:
    """The stored facts, or those that are found out now."""
    where = path()
    return find_once(
        where,
        "trying out this machine",
        known,
        lambda: find(command, seconds),
        lambda facts: write_atomic(where, msgspec.to_builtins(facts)),
    )


def find(command: Sequence[str] = trial.CHILD, seconds: float = trial.CHILD_SECONDS) -> Facts:
    """Try it now."""
    begin = time.monotonic()
    ours = _set_by_us(os.environ)
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    found = trial.answers(environment, command, seconds)
    cap: dict[str, str] = {}
    capped: dict[str, str] = {}
    # A cap that the user has set is the user's decision.
    if trial.failed(found) and not any(environment.get(name) for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")):
        cap, capped = trial.best_cap(found, environment, command, seconds)
    return Facts(
        machine=depends_on(),
        answers=found,
        cap=cap,
        capped=capped if cap else {},
        seconds=time.monotonic() - begin,
        written=time.time(),
    )


def _set_by_us(environment: Mapping[str, str]) -> set[str]:
    return set(environment.get(CAPPED, "").split(","))


def rank_environment() -> dict[str, str]:
    """What a process that computes gets: the cap, where one is known to be needed."""
    facts = known()
    return {**facts.cap, CAPPED: ",".join(facts.cap)} if facts and facts.cap else {}


def start_in_background() -> None:
    """Have it found out, without waiting, where it is not known."""
    if known() is None:
        subprocess.Popen(
            [sys.executable, "-m", "lockstep.machine"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
