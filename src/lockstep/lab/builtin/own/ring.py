"""Task all-reduce: add up a tensor over all ranks, in place, with messages between two ranks alone.

You may use dist.get_rank, dist.get_world_size, dist.isend, dist.irecv, dist.send and dist.recv. A ring is a good way:
divide the tensor into one part per rank; in world - 1 rounds every rank sends one part to the next rank and adds what it
gets to its own; in world - 1 more rounds the finished parts go round.
"""

import torch
import torch.distributed as dist


def all_reduce(tensor: torch.Tensor) -> None:
    """Afterwards `tensor` holds, on every rank, the sum of what all ranks passed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # Yours. torch.tensor_split(tensor, world) gives views; some are empty if there are fewer numbers than ranks.
    raise NotImplementedError(f"all_reduce in ring.py is yours to write (rank {rank} of {world})")
