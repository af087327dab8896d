"""A plain PyTorch training loop. examples/own_loop.py is the same loop with Lockstep around it.

python examples/own_loop_plain.py --epochs 3
"""

import argparse

import torch
from own_data import stripes
from own_model import Net
from torch.nn import functional


def evaluate(model, images, labels):
    with torch.no_grad():
        scores = model(images)
        return functional.cross_entropy(scores, labels, reduction="sum").item(), (
            scores.argmax(1) == labels
        ).sum().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    words = parser.parse_args()
    torch.manual_seed(7)
    data = {name: torch.from_numpy(array) for name, array in stripes().items()}
    images, test_images = data["train_images"] / 127.5 - 1, data["test_images"] / 127.5 - 1
    labels, test_labels = data["train_labels"], data["test_labels"]
    model = Net(width=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(1, words.epochs + 1):
        for chosen in torch.randperm(len(labels)).split(words.batch):
            x, y = images[chosen], labels[chosen]
            scores = model(x)
            loss = functional.cross_entropy(scores, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss, correct = evaluate(model, test_images, test_labels)
        print(f"epoch {epoch}: test loss {loss / len(test_labels):.4f}, test accuracy {correct / len(test_labels):.2%}")


main()
