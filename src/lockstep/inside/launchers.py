"""The variables by which launchers tell a process its place: rank, world size, local rank and local world size."""

from __future__ import annotations

import os
from collections.abc import Mapping

OURS = ("LOCKSTEP_RANK", "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_LOCAL_RANK", "LOCKSTEP_LOCAL_WORLD_SIZE")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")

# In the order in which they are believed: a launcher that runs within an allocation of Slurm comes before Slurm.
LAUNCHERS = (("torchrun", TORCHRUN), ("mpirun", OPEN_MPI), ("mpirun", MPICH), ("slurm", SRUN))


def place(environment: Mapping[str, str] = os.environ) -> tuple[str, int, int] | None:
    """The launcher, and this process's rank and world size; None where no launcher has said so."""
    for launcher, (rank, world, *_) in LAUNCHERS:
        values = environment.get(rank, ""), environment.get(world, "")
        if all(value.isdigit() for value in values):
            return launcher, int(values[0]), int(values[1])
    return None
