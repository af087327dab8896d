"""`single` and `spawn`: one process per rank on this host, started by us."""

from __future__ import annotations

from pathlib import Path

from lockstep.launch.base import Start, default_environment, thread_environment, worker_argv
from lockstep.parallel.ranks import Rank, environment_for
from lockstep.run import Spec


def starts(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    world, placement = spec.plan.ranks, spec.placement
    return [
        Start(
            argv=worker_argv(folder),
            environment=environment_for(Rank(rank, world, rank, world)) | thread_environment(placement),
            defaults=default_environment(placement),
            rank=rank,
        )
        for rank in range(world)
    ]
