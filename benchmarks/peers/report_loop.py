"""The loop as the reports wrote it: per-sample transforms, no loader workers, `.item()` at every step."""

from __future__ import annotations

from torch import nn
from torch.utils.data import DataLoader

from benchmarks.peers.common import (
    BATCH,
    Epoch,
    Images,
    Labels,
    Options,
    Pictures,
    Stopwatch,
    build_adam,
    build_net,
    main,
)


def train(images: Images, labels: Labels, options: Options) -> Epoch:
    """One epoch; the running sums are Python numbers, so every step waits for its loss."""
    loader = DataLoader(Pictures(images, labels), batch_size=BATCH, shuffle=False, num_workers=0)
    net = build_net(options)
    criterion = nn.CrossEntropyLoss()
    optimizer = build_adam(net, options)
    running_loss, correct, seen = 0.0, 0, 0
    net.train()
    with Stopwatch() as watch:
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()

            running_loss += loss.item() * targets.size(0)
            _, predicted = outputs.max(1)
            seen += targets.size(0)
            correct += predicted.eq(targets).sum().item()
    return Epoch(watch.seconds, watch.cpu_seconds, running_loss / seen, correct / seen)


if __name__ == "__main__":
    main(train, ["pillow"])
