"""Who am I? A rank reads its place from its launcher's environment; one small table per launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import InputError


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


# launcher -> the variables that hold rank, world size, local rank, local world size
TABLES: dict[str, tuple[str, str, str, str]] = {
    "single": ("LOCKSTEP_RANK", "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_LOCAL_RANK", "LOCKSTEP_LOCAL_WORLD_SIZE"),
    "spawn": ("LOCKSTEP_RANK", "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_LOCAL_RANK", "LOCKSTEP_LOCAL_WORLD_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}


def environment_for(launcher: str, rank: Rank) -> dict[str, str]:
    """The variables that a launcher of ours sets for one rank."""
    values = (rank.rank, rank.world, rank.local_rank, rank.local_world)
    return dict(zip(TABLES[launcher], map(str, values), strict=True))


def detect(launcher: str, expected_world: int, environment: Mapping[str, str] = os.environ) -> Rank:
    """This worker's rank; a world of another size than planned would compute something else, so it is refused."""
    names = TABLES[launcher]
    if any(name not in environment for name in names):
        if launcher == "single":
            return Rank(0, 1, 0, 1)
        missing = ", ".join(name for name in names if name not in environment)
        raise InputError(f"launcher={launcher}: {missing} not set: start this worker through 'lockstep run'")
    rank = Rank(*(int(environment[name]) for name in names))
    if rank.world != expected_world:
        raise InputError(
            f"launcher={launcher} started {rank.world} ranks, but the run was planned for ranks={expected_world}"
        )
    return rank
