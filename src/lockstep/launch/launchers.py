"""Which processes a run starts: the table of launchers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.errors import InputError
from lockstep.launch import mpirun, spawn, torchrun
from lockstep.launch.base import Start
from lockstep.launch.emulated import launcher as emulated
from lockstep.launch.emulated import network as emulate
from lockstep.launch.ray import launcher as ray
from lockstep.launch.slurm import launcher as slurm
from lockstep.launch.waiting import PASSIVE
from lockstep.plugins import load_object, one_line
from lockstep.run import Spec

LAUNCHERS = {
    "single": spawn.starts,
    "spawn": spawn.starts,
    "torchrun": torchrun.starts,
    "mpirun": mpirun.starts,
    "slurm": slurm.starts,
    "ray": ray.starts,
}


def starts_of(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    """The processes that one host starts; for emulated hosts, those of all of them as they are planned."""
    if spec.placement.emulated:
        return emulated.starts(spec, folder, emulate.planned(spec.placement))
    name = spec.placement.launcher
    own = name not in LAUNCHERS
    found = _own(name, spec, folder, host_index) if own else LAUNCHERS[name](spec, folder, host_index)
    return (
        [replace(start, environment=start.environment | PASSIVE) for start in found]
        if spec.options.sleep_to_wait
        else found
    )


def _own(name: str, spec: Spec, folder: Path, host_index: int) -> list[Start]:
    """What a launcher of the user's own says, or one that another package offers (docs/extending.md)."""
    made = load_object(name, option="launcher")
    try:
        starts = made(spec, folder, host_index)
    except Exception as error:  # a user's code may raise anything
        raise InputError(f"launcher={name}: {one_line(error)}") from error
    if not isinstance(starts, list) or not starts or not all(isinstance(start, Start) for start in starts):
        raise InputError(f"launcher={name}: expected a list of lockstep.launch.base.Start, one for each process")
    return starts
