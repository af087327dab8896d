"""Accelerate: a loop of one's own with `prepare` and `accelerator.backward`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.nn import functional

from benchmarks.peers.common import (
    Epoch,
    Images,
    Labels,
    Options,
    Stopwatch,
    build_adam,
    build_loader,
    build_net,
    main,
)


def train(images: Images, labels: Labels, options: Options) -> Epoch:
    """One epoch; loss and hits are summed in tensors and read once at its end."""
    accelerator = Accelerator(cpu=True)
    net = build_net(options)
    net, optimizer, loader = accelerator.prepare(net, build_adam(net, options), build_loader(images, labels, options))
    loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    net.train()
    with Stopwatch() as watch:
        for inputs, targets in loader:
            outputs = net(inputs)
            loss = functional.cross_entropy(outputs, targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            loss_sum += loss.detach() * len(targets)
            correct += (outputs.argmax(1) == targets).sum()
        mean_loss, accuracy = loss_sum.item() / len(images), correct.item() / len(images)
    return Epoch(watch.seconds, watch.cpu_seconds, mean_loss, accuracy)


if __name__ == "__main__":
    main(train, ["accelerate"])
