"""The loop of examples/own_loop_plain.py with Lockstep around it: any number of ranks, timed and recorded.

lockstep run examples/own_loop.py ranks=2 -- --epochs 3
python examples/own_loop.py --epochs 3
"""

import argparse

import torch
from own_data import stripes
from own_model import Net
from torch.nn import functional

import lockstep


def evaluate(model, images, labels):
    with torch.no_grad():
        scores = model(images)
        return functional.cross_entropy(scores, labels, reduction="sum").item(), (
            scores.argmax(1) == labels
        ).sum().item()


def main(s):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    words = parser.parse_args()
    torch.manual_seed(7)
    data = {name: torch.from_numpy(array) for name, array in stripes().items()}
    images, test_images = data["train_images"] / 127.5 - 1, data["test_images"] / 127.5 - 1
    labels, test_labels = data["train_labels"], data["test_labels"]
    model = s.wrap(Net(width=4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(1, words.epochs + 1):
        for step in s.steps(len(labels), batch=words.batch, epoch=epoch, seed=7):
            x, y = images[step.mine], labels[step.mine]
            step.lap("data")
            scores = model(x)
            loss = functional.cross_entropy(scores, y, reduction="sum")
            optimizer.zero_grad()
            step.backward(loss)
            optimizer.step()
            step.log(correct=(scores.argmax(1) == y).sum())
        mine = s.part(len(test_labels))
        with s.evaluation() as net:
            loss, correct = evaluate(net, test_images[mine], test_labels[mine])
        result = s.end_epoch(loss_sum=loss, correct=correct, samples=mine.stop - mine.start)
        s.print(f"epoch {epoch}: test loss {result['test_loss']:.4f}, test accuracy {result['test_accuracy']:.2%}")


with lockstep.session() as s:
    main(s)
