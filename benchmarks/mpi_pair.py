"""All-reduce of 17,064 bytes (the MNIST net's gradients) between two ranks: the backend `mpi` against mpi4py itself.

`measure_pair()` starts both ranks with mpirun. In every round each way makes the same number of calls, one way after the
other in turns, so that what else the machine does falls on both. mpi4py's blocking call on a buffer that was described
once, before the clock starts, is the least that Python can pay for MPI.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import parse_line, run

BYTES = 17_064
ROUNDS = 21
CALLS = 1_000


def measure_pair(rounds: int = ROUNDS, calls: int = CALLS, size: int = BYTES, mpi: str = "auto") -> dict[str, Any]:
    """Microseconds per call of both ways, round by round, their medians, and the median of the rounds' ratios."""
    from lockstep.launch import mpirun
    from lockstep.placement import Placement

    placement = Placement(launcher="mpirun", backend="mpi", ranks=2, threads=1, device="cpu", mpi=mpi)  # type: ignore[arg-type]
    chosen = mpirun.choose(placement)
    settings = mpirun.library_environment(chosen, placement)
    settings |= {name: os.environ.get(name, value) for name, value in mpirun.fast_settings(chosen).items()}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        words = [str(Path(folder) / "rendezvous"), str(rounds), str(calls), str(size)]
        worker = [sys.executable, "-m", "benchmarks.mpi_pair", *words]
        given = ["env", *(f"{name}={value}" for name, value in settings.items())]
        result = parse_line(run([*given, *mpirun.command(chosen, placement), *worker], threads=1))
    ours, raw = result["ours_us"], result["raw_us"]
    result["mpi"] = f"{chosen.kind} {'.'.join(map(str, chosen.version))}"
    result["ours_median_us"], result["raw_median_us"] = statistics.median(ours), statistics.median(raw)
    result["ratio"] = statistics.median(a / b for a, b in zip(ours, raw, strict=True))
    return result


def rank_main(rendezvous: str, rounds: int, calls: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    from lockstep.backends.mpi import group as mpi_group
    from lockstep.process import pin

    name = mpi_group.register()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    pin(world.rank, world.size, 1)
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, world.size)
    dist.init_process_group(name, store=store, rank=world.rank, world_size=world.size)
    given, tensor = torch.full((size // 4,), float(world.rank + 1)), torch.empty(size // 4)
    buffer = [MPI.memory.fromaddress(tensor.data_ptr(), size), size // 4, MPI.FLOAT]

    def raw() -> None:
        world.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)

    def ours() -> None:
        dist.all_reduce(tensor)

    def timed(call: Callable[[], None]) -> tuple[float, float]:
        tensor.copy_(given)
        call()
        assert tensor.eq(3.0).all(), "1 + 2 = 3 in every place"
        tensor.zero_()
        world.Barrier()
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        took = time.perf_counter() - begin, time.process_time() - busy
        return took[0] / calls * 1e6, took[1] / calls * 1e6

    times: dict[str, list[float]] = {"ours_us": [], "raw_us": [], "ours_cpu_us": [], "raw_cpu_us": []}
    for way in (ours, raw):  # warm-up
        timed(way)
    for number in range(rounds):
        for way in (ours, raw) if number % 2 else (raw, ours):
            wall, cpu = timed(way)
            times[f"{way.__name__}_us"].append(wall)
            times[f"{way.__name__}_cpu_us"].append(cpu)
    dist.barrier()
    if world.rank == 0:
        print(json.dumps({"bytes": size, "rounds": rounds, "calls": calls, **times}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_main(sys.argv[1], *(int(word) for word in sys.argv[2:]))
    else:
        print(json.dumps(measure_pair(), indent=1))
