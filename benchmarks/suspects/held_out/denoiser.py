"""A small convolutional autoencoder with Accelerate on two processes: `accelerate launch --num_processes 2 denoiser.py CAUSE`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAUSE = sys.argv[1]
BATCH, STEPS, EPOCHS = 16, 12, 3
PASSES = 6 if CAUSE == "six backward passes for an update" else 1


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(11)
    blocks = 14 if PASSES > 1 else 3
    middle = [part for _ in range(blocks) for part in (nn.Conv2d(24, 24, 3, padding=1), nn.SiLU())]
    net: Any = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1, stride=2), *middle, nn.ConvTranspose2d(24, 3, 2, stride=2))
    optimizer: Any = torch.optim.RMSprop(net.parameters(), lr=1e-4)
    size = 4 if PASSES > 1 else BATCH
    pictures = torch.rand(size * STEPS * PASSES * accelerator.num_processes, 3, 16, 16)
    loader: Any = DataLoader(TensorDataset(pictures), batch_size=size, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(EPOCHS):
        for number, (clean,) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(net(clean + 0.1 * torch.randn_like(clean)), clean) / PASSES
            accelerator.backward(loss)
            if number % PASSES == 0:
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
