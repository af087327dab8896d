"""Who am I? A rank reads its place from its launcher's environment; one small table per launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import InputError
from lockstep.inside.launchers import MPICH, OPEN_MPI, OURS, SRUN, TORCHRUN
from lockstep.placement import Placement


@dataclass(frozen=True)
class Rank:
    """One worker's place in the world."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


# The variables that hold a rank's place, by launcher. mpirun has two families of them.
TABLES: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "single": (OURS,),
    "spawn": (OURS,),
    "torchrun": (TORCHRUN,),
    "mpirun": (OPEN_MPI, MPICH),
    "slurm": (SRUN,),
    "ray": (OURS,),
}


# A launcher of the user's own may start ranks by any of them; what it sets itself comes first.
ANY = (OURS, TORCHRUN, OPEN_MPI, MPICH, SRUN)


def environment_for(rank: Rank) -> dict[str, str]:
    """The variables that we set for a rank that we start ourselves."""
    values = (rank.rank, rank.world, rank.local_rank, rank.local_world)
    return dict(zip(OURS, map(str, values), strict=True))


def detect(placement: Placement, environment: Mapping[str, str] = os.environ) -> Rank:
    """This worker's rank; a world of another size than planned would compute something else, so it is refused."""
    by = placement.slurm.ranks_by if placement.launcher == "slurm" else "srun"
    tables = TABLES.get(placement.launcher if by == "srun" else by, ANY)
    for names in tables:
        if all(name in environment for name in names):
            rank = Rank(*(int(environment[name]) for name in names))
            break
    else:
        if placement.launcher == "single":
            return Rank(0, 1, 0, 1)
        expected = " or ".join(", ".join(names) for names in tables)
        raise InputError(f"launcher={placement.launcher}: {expected} not set: start this worker through 'lockstep run'")
    if rank.world != placement.ranks:
        raise InputError(
            f"launcher={placement.launcher} started {rank.world} ranks, but the run was planned for ranks={placement.ranks}"
        )
    return rank
