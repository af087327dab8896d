"""A plain loop in one process: `python plain.py CAUSE`. With the cause "nothing" it is as it should be."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any

import torch
from common import Net, Pictures, begin, collate, step
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

CAUSE = sys.argv[1]
BATCH = 16 if CAUSE == "per-parameter update" else 128
STEPS = 6 if CAUSE == "workers anew" else 12
EPOCHS = 12 if CAUSE == "workers anew" else 5
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10000))"


class Slow(Pictures):
    """Pictures that have to be decoded."""

    def __getitems__(self, indices: list[int]) -> Any:
        time.sleep(0.015)
        return super().__getitems__(indices)


def read_one_by_one(scores: torch.Tensor, labels: torch.Tensor) -> list[list[int]]:
    """For each class, at which place each picture's label was guessed."""
    places = [[0] * 10 for _ in range(10)]
    for guesses, label in zip(scores.argsort(1, descending=True), labels, strict=True):
        for place, guess in enumerate(guesses):
            if guess == label:
                places[int(label)][place] += 1
    return places


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = (Slow if CAUSE == "slow loader" else Pictures)(BATCH * STEPS)
    workers: dict[str, Any] = {"num_workers": 2} if CAUSE == "workers anew" else {}
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate, **workers)
    test = DataLoader(Pictures(BATCH * STEPS // 2, seed=1), batch_size=BATCH, collate_fn=collate)
    net: nn.Module = Net(layers=96 if CAUSE == "per-parameter update" else 0)
    if CAUSE == "double precision":
        data.images, net = data.images.double(), net.double()
    if CAUSE == "DataParallel":
        net = nn.DataParallel(net)
    optimizer = (torch.optim.Adam if CAUSE == "per-parameter update" else torch.optim.SGD)(net.parameters(), lr=0.01)
    neighbour = None
    if CAUSE == "busy neighbour":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        neighbour = subprocess.Popen([sys.executable, "-S", "-c", SPIN])
    writer = None
    if CAUSE == "histograms every step":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(tempfile.mkdtemp())
    begin()
    number = 0
    with torch.profiler.profile() if CAUSE == "profiler left on" else nullcontext():
        for _ in range(EPOCHS):
            for pictures, labels in loader:
                number += 1
                with step(net):
                    optimizer.zero_grad()
                    scores = net(pictures)
                    loss = functional.cross_entropy(scores, labels)
                    loss.backward()
                    optimizer.step()
                    if CAUSE == "values read one by one":
                        read_one_by_one(scores, labels)
                    if CAUSE == "gc.collect every step":
                        gc.collect()
                    if writer is not None:
                        writer.add_scalar("loss", loss, number)
                        writer.add_histogram("pictures", pictures, number)
                        for name, parameter in net.named_parameters():
                            writer.add_histogram(name, parameter, number)
            if CAUSE == "evaluation with gradients":
                net.eval()
                for pictures, labels in test:
                    functional.cross_entropy(net(pictures), labels)
                net.train()
    if neighbour is not None:
        neighbour.kill()
        neighbour.wait()


if __name__ == "__main__":
    main()
