"""A loop of one's own, in DDP where there are several ranks."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from parts import BATCH, PASSES, STEPS, WORLD, convnet, pictures, stepped


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
    data = pictures()
    net = convnet()
    model = DistributedDataParallel(net) if WORLD > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data) if WORLD > 1 else None)
    taken = 0
    while taken < STEPS:
        for number, (inputs, labels) in enumerate(loader, 1):
            last = number % PASSES == 0
            with nullcontext() if last or WORLD == 1 else model.no_sync():
                (nn.functional.cross_entropy(model(inputs), labels) / PASSES).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                stepped()
                taken += 1
                if taken == STEPS:
                    break


if __name__ == "__main__":
    main()
