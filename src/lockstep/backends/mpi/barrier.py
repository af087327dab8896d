"""A barrier that says which ranks have not come (backends/monitored.py): messages to rank 0, and its answers when all have come."""

from __future__ import annotations

import time

import torch
from mpi4py import MPI

from lockstep.backends.mpi.buffers import moved
from lockstep.backends.mpi.work import sleep_until

LEAST_TAG_LIMIT = 32767
"""What MPI grants at least."""


def monitored_barrier(communicator: MPI.Intracomm, number: int, limit_s: float, wait_all_ranks: bool) -> None:
    """`number` is another one for each barrier, so that a message which nobody took is not taken for one of the next. The words of its errors
    are those of gloo."""
    until = time.monotonic() + limit_s
    tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or LEAST_TAG_LIMIT) - number % 1024
    rank, size, nothing = communicator.rank, communicator.size, torch.empty(0)

    def came(other: int) -> bool:
        request = communicator.Irecv(moved(nothing), other, tag)
        try:
            sleep_until(request.Test, max(until - time.monotonic(), 0.0), "monitored_barrier")
        except RuntimeError:
            request.Cancel()
            return False
        return True

    if rank:
        communicator.Isend(moved(nothing), 0, tag).Wait()
        if not came(0):
            raise RuntimeError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                "send/recv from rank 0. Please check rank 0 logs for faulty rank."
            )
        return
    if limit_s <= 0:
        raise RuntimeError("Rank 0 timed out in monitoredBarrier after 0 ms.")
    missing: list[int] = []
    for other in range(1, size):
        if not came(other):
            missing.append(other)
            if not wait_all_ranks:
                break
    if missing:
        words = f"Rank{'s' * wait_all_ranks} {', '.join(map(str, missing))}"
        raise RuntimeError(f"[Rank 0]: {words} failed to pass monitoredBarrier in {limit_s * 1000:g} ms")
    for other in range(1, size):
        communicator.Isend(moved(nothing), other, tag).Wait()
