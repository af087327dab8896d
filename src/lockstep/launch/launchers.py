"""Which processes a run starts: the table of launchers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.launch import mpirun, spawn, torchrun
from lockstep.launch.base import Start
from lockstep.launch.emulated import launcher as emulated
from lockstep.launch.emulated import network as emulate
from lockstep.launch.slurm import launcher as slurm
from lockstep.launch.waiting import PASSIVE
from lockstep.run import Spec

LAUNCHERS = {
    "single": spawn.starts,
    "spawn": spawn.starts,
    "torchrun": torchrun.starts,
    "mpirun": mpirun.starts,
    "slurm": slurm.starts,
}


def starts_of(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    """The processes that one host starts; for emulated hosts, those of all of them as they are planned."""
    if spec.placement.emulated:
        return emulated.starts(spec, folder, emulate.planned(spec.placement))
    found = LAUNCHERS[spec.placement.launcher](spec, folder, host_index)
    return (
        [replace(start, environment=start.environment | PASSIVE) for start in found]
        if spec.options.sleep_to_wait
        else found
    )
