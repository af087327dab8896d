"""Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from parts import BATCH, PASSES, STEPS, convnet, pictures, stepped


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES)
    net: Any = convnet(24)
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=1e-3)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(pictures(), BATCH, shuffle=True))
    taken = 0
    while taken < STEPS:
        for inputs, labels in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.cross_entropy(net(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                stepped()
                taken += 1
                if taken == STEPS:
                    break
    accelerator.end_training()


if __name__ == "__main__":
    main()
