"""A loop of the user's own in which rank 1 does something else than the others, once: tests/test_hang.py runs it under every launcher.

    lockstep run desync.py ranks=3 -- FAULT FOLDER

FOLDER gets a file when the fault happens, so that the test knows since when there was something to see. The comment at a line's end names the fault
that is expected there.
"""

import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

import lockstep

fault, folder = sys.argv[1], Path(sys.argv[2])
STEP = 12


def happens(s, step: int) -> bool:
    if s.rank != 1 or step != STEP:
        return False
    (folder / "happened").touch()
    return True


def exchange(s, step: int) -> None:
    """What a script may do beside its gradients: two figures over all ranks, and a barrier."""
    first, second = torch.ones(3), torch.ones(5)
    now = happens(s, step)
    if now and fault == "dtype":
        first = first.double()
    if now and fault == "shape":
        first = torch.ones(7)
    if now and fault == "order":
        first, second = second, first
    if now and fault == "collective":
        dist.all_gather([torch.ones(3) for _ in range(s.world)], first)  # at: collective
    elif not (now and fault == "skip"):
        dist.all_reduce(first)  # others: collective shape dtype order skip
    if now and fault == "raise":
        raise ValueError("the planted fault")  # at: raise
    if now and fault == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # at: lock
    if now and fault == "sleep":
        time.sleep(1000)  # at: sleep
    if now and fault == "busy":
        busy()
    dist.all_reduce(second)  # others: order skip lock sleep busy
    if not (now and fault == "barrier"):
        dist.barrier()  # others: barrier


def busy() -> None:
    total = 0
    while True:
        total += 1  # at: busy


def slow(s, step: int) -> None:
    """Rank 1 alone takes its time, in ways that a run may have."""
    if s.rank == 1 and step == STEP and fault == "save":
        save = Slow()
        torch.save({"weights": torch.ones(3)}, save)


class Slow:
    """A disk that takes eight seconds."""

    def write(self, data) -> int:
        if not hasattr(self, "waited"):
            self.waited = True
            time.sleep(9)
        return len(data)

    def flush(self) -> None:
        pass


with lockstep.session() as s:
    torch.manual_seed(1)
    inputs, targets = torch.randn(96, 8), torch.randn(96, 1)
    model = s.wrap(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    taken = 0
    for epoch in range(1, 4):
        for step in s.steps(96, batch=12, epoch=epoch):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(inputs[step.mine]), targets[step.mine], reduction="sum")
            step.backward(loss)
            optimizer.step()
            taken += 1
            if fault == "return" and happens(s, taken):
                break
            slow(s, taken)
            exchange(s, taken)
        else:
            with s.evaluation() as net:
                if fault == "evaluation" and s.rank == 1 and epoch == 2:
                    time.sleep(9)
                net(inputs)
            s.end_epoch()
            continue
        break
