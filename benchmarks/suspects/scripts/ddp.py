"""DistributedDataParallel on two ranks: `torchrun --nproc-per-node 2 ddp.py CAUSE`.

There is no `from __future__ import annotations` here: DDP compares a hook's annotations with the classes themselves.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Net, Pictures, begin, collate, step
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

CAUSE = sys.argv[1]
BATCH, STEPS, EPOCHS = 256, 12, 5
DISTURB = Path(__file__).parents[2] / "planted" / "disturb.py"


def slow_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls to exchange a bucket: over a slow link."""
    time.sleep(0.02)
    tensor = bucket.buffer().div_(dist.get_world_size())
    work: Any = dist.all_reduce(tensor, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def main() -> None:
    torch.set_num_threads(8 if CAUSE == "threads over cores" else 1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Pictures(BATCH * STEPS * world)
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=collate)
    test = Pictures(BATCH * STEPS * world // 2 + 1, seed=1)
    shared: Any = DistributedSampler(test, shuffle=False) if CAUSE == "evaluation that pads" else None
    test_loader = DataLoader(test, batch_size=BATCH, sampler=shared, collate_fn=collate)
    net = DistributedDataParallel(
        Net(layers=96 if CAUSE == "tiny buckets" else 0), bucket_cap_mb=0.01 if CAUSE == "tiny buckets" else 25
    )
    if CAUSE == "slow collective":
        net.register_comm_hook(None, slow_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    switch, disturbing = Path(tempfile.mkdtemp()) / "switch", None
    if CAUSE == "slow rank" and rank == 1:
        switch.write_text("1")
        disturbing = subprocess.Popen(
            [sys.executable, "-S", str(DISTURB), "stop", str(os.getpid()), "0.4", str(switch)]
        )
    begin()
    for epoch in range(EPOCHS):
        if CAUSE != "no set_epoch":
            sampler.set_epoch(epoch)
        for pictures, labels in loader:
            with step(net):
                optimizer.zero_grad()
                loss = functional.cross_entropy(net(pictures), labels)
                loss.backward()
                optimizer.step()
        if CAUSE in ("evaluation that pads", "evaluation on every rank"):
            net.eval()
            with torch.no_grad():
                for pictures, labels in test_loader:
                    functional.cross_entropy(net.module(pictures), labels)
            net.train()
    if disturbing is not None:
        switch.write_text("x")
        disturbing.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
