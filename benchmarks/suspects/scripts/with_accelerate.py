"""Accelerate, in one process or in two: `accelerate launch --multi_gpu --num_processes 2 with_accelerate.py CAUSE`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from common import Net, Pictures, begin, collate, step
from torch.nn import functional
from torch.utils.data import DataLoader

CAUSE = sys.argv[1]
BATCH, STEPS, EPOCHS = 256, 10, 5
ACCUMULATE = 4 if CAUSE == "accumulation without no_sync" else 1


def main() -> None:
    torch.set_num_threads(1)
    handlers: list[Any] = (
        [DistributedDataParallelKwargs(find_unused_parameters=True)] if CAUSE == "find_unused_parameters" else []
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    set_seed(0)
    begin()
    small = BATCH // 8 if ACCUMULATE > 1 else BATCH
    data = Pictures(small * ACCUMULATE * STEPS * accelerator.num_processes)
    net: Any = Net(layers=32 if ACCUMULATE > 1 else 0)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS * EPOCHS)
    loader: Any = DataLoader(data, batch_size=small, shuffle=True, collate_fn=collate)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    if CAUSE == "schedule per process":
        scheduler = accelerator.prepare(scheduler)
    for _ in range(EPOCHS):
        for number, (pictures, labels) in enumerate(loader, 1):
            with step(net):
                loss = functional.cross_entropy(net(pictures), labels) / ACCUMULATE
                accelerator.backward(loss)
                if number % ACCUMULATE == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
