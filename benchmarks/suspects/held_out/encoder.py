"""A small transformer encoder in DDP: `torchrun --nproc-per-node 2 encoder.py CAUSE`."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CAUSE = sys.argv[1]
BATCH, LENGTH, STEPS, EPOCHS = 24, 32, 12, 4


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(64, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)).mean(1))


def tokens(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 50, (count, LENGTH), generator=generator)
    return TensorDataset(numbers, numbers.sum(1) % 4)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(7)
    train, test = tokens(BATCH * STEPS * world, 0), tokens(BATCH * STEPS, 1)
    sampler: DistributedSampler[object] = DistributedSampler(train, world, rank, shuffle=True)
    loader = DataLoader(train, BATCH, sampler=sampler)
    share = None if CAUSE == "everyone validates everything" else DistributedSampler(test, world, rank, shuffle=False)
    validation = DataLoader(test, BATCH, sampler=share)
    more = {"bucket_cap_mb": 0.02} if CAUSE == "a bucket for each layer" else {}
    deep = CAUSE == "a bucket for each layer"
    model = DistributedDataParallel(
        Encoder(12 if deep else 3),
        find_unused_parameters=CAUSE == "find_unused to be sure",
        gradient_as_bucket_view=True,
        **more,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(EPOCHS):
        if CAUSE != "an order for all epochs":
            sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            if CAUSE == "rank 0 looks at its inputs" and rank == 0:
                for _ in range(3):
                    torch.linalg.svd(torch.randn(220, 220))
            loss.backward()
            optimizer.step()
        model.eval()
        if CAUSE in ("everyone validates everything",):
            with torch.inference_mode():
                for inputs, labels in validation:
                    nn.functional.cross_entropy(model(inputs), labels)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
