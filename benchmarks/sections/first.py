"""The twelve commands that a newcomer types first, each as a whole process: cold (the first time, with none of Lockstep's caches) and warm (again)."""

from __future__ import annotations

import shlex
import tempfile
import time
from pathlib import Path

from benchmarks import ours
from benchmarks.processes import ContenderFailed, run
from benchmarks.record import Measurement, Section
from benchmarks.sections.start import children_cpu
from benchmarks.settings import Settings

# In the order of the README and the tutorial: the later ones look at the run of the sixth.
COMMANDS = (
    "lockstep --help",
    "lockstep --version",
    "lockstep doctor",
    "lockstep recipes",
    "lockstep data list",
    "lockstep run data=embedded epochs=2",
    "lockstep show last",
    "lockstep runs",
    "lockstep explain last",
    "lockstep verify data=embedded ranks=2",
    "lockstep report last -o report.html",
    "lockstep race 'ranks=1 threads=2' 'ranks=2 threads=1' --all data=embedded --budget 15s",
)
# Cold is the first time in a session, so each session gives one value of it.
SESSIONS = 3


def measure(settings: Settings) -> Section:
    """Sessions in fresh folders: all twelve cold, then all twelve warm."""
    section = Section("first", "The twelve commands that a newcomer types first", "command", "milliseconds", [])
    for session in range(1, 1 + (1 if settings.quick else SESSIONS)):
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
            for state in ("cold", "warm"):
                for number, command in enumerate(COMMANDS, 1):
                    try:
                        section.measurements.append(
                            _timed(f"{number:02d} {command}, {state}", command, Path(folder), session, section)
                        )
                    except ContenderFailed as error:
                        section.refuse(f"{command} failed, {state}: {error}")
    section.notes += [
        "From before the process exists until it is gone. Cold: the first time in a session that has no cache of Lockstep's (XDG_CACHE_HOME is "
        "an empty folder); the system has read its files before, so a disk is not timed. Warm: the same session again.",
        "A race takes as long as it needs to settle, here at most 15 s.",
    ]
    return section


def _timed(name: str, command: str, folder: Path, session: int, section: Section) -> Measurement:
    words = [ours.executable() if word == "lockstep" else word for word in shlex.split(command)]
    caches = {"XDG_CACHE_HOME": str(folder / "cache"), "LOCKSTEP_RUNS": str(folder / "runs"), "LOCKSTEP_DATA": ""}
    cpu, wall = children_cpu(), time.perf_counter()
    run(words, more=caches, where=folder)
    return Measurement(
        len(section.measurements) + 1, session, name, 1, time.perf_counter() - wall, children_cpu() - cpu
    )
