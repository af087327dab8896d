"""`single` and `spawn`: one process per rank, started by us on this host, or on emulated ones."""

from __future__ import annotations

from pathlib import Path

from lockstep.backends.ranks import Rank, environment_for
from lockstep.launch.base import Start, default_environment, thread_environment, worker_argv
from lockstep.placement import ranks_per_host
from lockstep.run import Spec


def starts(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    placement = spec.placement
    world, local = placement.ranks, ranks_per_host(placement)
    return [
        Start(
            argv=worker_argv(folder),
            environment=environment_for(Rank(rank, world, rank % local, local)) | thread_environment(placement),
            defaults=default_environment(placement),
            rank=rank,
        )
        for rank in range(world)
    ]
