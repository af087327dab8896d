"""A transformer on tokens in a loop of one's own, with AdamW: many parameters, and gradients that come evenly."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parts import PASSES, STEPS, WORLD, stepped


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
    net = Language()
    model = DistributedDataParallel(net) if WORLD > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(STEPS):
        for number in range(1, PASSES + 1):
            tokens = torch.randint(0, 256, (8, 65))
            with nullcontext() if number == PASSES or WORLD == 1 else model.no_sync():
                scores = model(tokens[:, :-1])
                (nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()) / PASSES).backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped()


if __name__ == "__main__":
    main()
