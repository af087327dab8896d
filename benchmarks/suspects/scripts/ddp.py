"""DistributedDataParallel on two ranks: `torchrun --nproc-per-node 2 ddp.py CAUSE`.

There is no `from __future__ import annotations` here: DDP compares a hook's annotations with the classes themselves.
"""

import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from common import Net, Pictures, begin, collate, step
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

CAUSE = sys.argv[1]
BATCH, STEPS, EPOCHS = 256, 10, 5


def slow_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls to exchange a bucket: over a slow link, on which it is under way for a while."""
    tensor, future = bucket.buffer().div_(dist.get_world_size()), torch.futures.Future()

    def exchange() -> None:
        time.sleep(0.05)
        dist.all_reduce(tensor)
        future.set_result(tensor)

    threading.Thread(target=exchange).start()
    return future


class Uneven(Net):
    """A net that has more to do on one of the ranks."""

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        for _ in range(4 if dist.get_rank() == 1 else 0):
            self.second(functional.relu(self.first(pictures)))
        return super().forward(pictures)


def main() -> None:
    torch.set_num_threads(8 if CAUSE == "threads over cores" else 1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    data = Pictures(BATCH * STEPS * world)
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=collate)
    test = Pictures(BATCH * STEPS * world // 2 + 1, seed=1)
    shared: Any = DistributedSampler(test, shuffle=False) if CAUSE == "evaluation that pads" else None
    test_loader = DataLoader(test, batch_size=BATCH, sampler=shared, collate_fn=collate)
    net = DistributedDataParallel(
        (Uneven if CAUSE == "slow rank" else Net)(layers=96 if CAUSE == "tiny buckets" else 0),
        bucket_cap_mb=0.01 if CAUSE == "tiny buckets" else 25,
    )
    if CAUSE == "slow collective":
        net.register_comm_hook(None, slow_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
