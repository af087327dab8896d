"""The loop of loop.py in plain PyTorch, as TraceML's documentation has it: `traceml run traced.py --nproc-per-node 2 --args --cause …`.

Batches come from a DataLoader, which is where TraceML looks for the loader's time; evaluation and logging follow the step within the loop.

There is no `from __future__ import annotations` here: DDP compares a hook's annotations with the classes themselves.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import traceml_ai as traceml
from plants import Plant
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from work import BATCH, EPOCHS, STEPS_PER_EPOCH, Net, pictures


class Batches(Dataset[Any]):
    """Whole batches: what a step takes on one rank."""

    def __init__(self, plant: Plant, rank: int, world: int) -> None:
        self._plant, self._share = plant, BATCH // world
        self._images, self._labels = pictures()
        self._first = rank * self._share

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number >= len(self):
            raise IndexError
        first = self._first + number * BATCH
        mine = torch.arange(first, first + self._share)
        self._plant.pause("data")
        return self._images[mine], self._labels[mine]


def slow_hook(plant: Plant, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls to exchange a bucket."""
    plant.pause("exchange")
    tensor = bucket.buffer().div_(dist.get_world_size())
    work: Any = dist.all_reduce(tensor, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def epochs(loader: DataLoader[Any]) -> Iterator[Any]:
    for _ in range(EPOCHS):
        yield from loader


def main(words: argparse.Namespace) -> None:
    torch.set_num_threads(words.threads)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if words.threads == 1:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    traceml.init(mode="auto")
    plant = Plant(words.cause, words.size, words.step, rank, words.out)
    model = DistributedDataParallel(Net(), bucket_cap_mb=words.bucket_mb)
    if words.cause == "slow collective":
        model.register_comm_hook(plant, slow_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for x, y in epochs(DataLoader(Batches(plant, rank, world), batch_size=None)):
        plant.step()
        with traceml.trace_step(model):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            plant.pause("log")
            if plant.evaluates:
                plant.pause("evaluate")
    took = time.perf_counter() - begin
    (words.out / f"planted-{rank}.json").write_text(json.dumps({"spent": plant.spent, "seconds": took}))
    plant.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cause", default="nothing")
    parser.add_argument("--size", type=float, default=0.0)
    parser.add_argument("--step", type=float, default=0.04)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--out", type=Path, required=True)
    main(parser.parse_args())
