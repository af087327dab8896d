"""Lightning Fabric: a loop of one's own with Fabric's set-up of net, optimizer and loader."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
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
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    net = build_net(options)
    net, optimizer = fabric.setup(net, build_adam(net, options))
    loader = fabric.setup_dataloaders(build_loader(images, labels, options))
    loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    net.train()
    with Stopwatch() as watch:
        for inputs, targets in loader:
            outputs = net(inputs)
            loss = functional.cross_entropy(outputs, targets)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            loss_sum += loss.detach() * len(targets)
            correct += (outputs.argmax(1) == targets).sum()
        mean_loss, accuracy = loss_sum.item() / len(images), correct.item() / len(images)
    return Epoch(watch.seconds, watch.cpu_seconds, mean_loss, accuracy)


if __name__ == "__main__":
    main(train, ["lightning"])
