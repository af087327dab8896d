"""`python gloo_delays.py RANK RANKS FILE QUESTIONS`: seconds of gloo's collectives, as rank 0 sees them; QUESTIONS are [[collective, bytes], …]."""

from __future__ import annotations

import json
import statistics
import sys
from time import monotonic, sleep

import torch
import torch.distributed as dist

TIMES = 3
# Longer than it takes to tell all ranks when to begin.
SOON_S = 0.3


def main() -> None:
    rank, ranks, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    found = []
    for collective, size in json.loads(sys.argv[4]):
        took = []
        for _ in range(1 + TIMES):
            # All hosts have this machine's clock, so that all begin at the same time: a barrier would let some begin earlier.
            begin = torch.tensor([monotonic() + SOON_S], dtype=torch.float64)
            dist.broadcast(begin, 0)
            sleep(max(0.0, begin.item() - monotonic()))
            exchange(collective, size, ranks)
            end = torch.tensor([monotonic()], dtype=torch.float64)
            dist.all_reduce(end, dist.ReduceOp.MAX)
            took.append((end - begin).item())
        found.append(statistics.median(took[1:]))
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()


def exchange(collective: str, size: int, ranks: int) -> None:
    numbers = torch.ones(size // 4)
    if collective == "all_reduce":
        dist.all_reduce(numbers)
    elif collective == "broadcast":
        dist.broadcast(numbers, 0)
    elif collective == "all_gather":
        dist.all_gather_into_tensor(numbers, numbers[: len(numbers) // ranks].clone())
    else:
        dist.reduce_scatter_tensor(torch.empty(len(numbers) // ranks), numbers)


if __name__ == "__main__":
    main()
