"""A training loop of one's own with a planted cause: `lockstep run loop.py ranks=2 -- --cause 'slow loader' --size 0.1 --step 0.04 --out FOLDER`.

What was planted goes to FOLDER/planted-<rank>.json: the seconds that the loop itself spent on it, and which steps had it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from plants import Plant
from torch.nn import functional
from work import BATCH, EPOCHS, SAMPLES, Net, pictures

import lockstep


def main(s: lockstep.Session, plant: Plant, out: Path) -> None:
    images, labels = pictures()
    model = s.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1, EPOCHS + 1):
        for step in s.steps(SAMPLES, batch=BATCH, epoch=epoch):
            plant.step()
            x, y = images[step.mine], labels[step.mine]
            plant.pause("data")
            step.lap("data")
            scores = model(x)
            loss = functional.cross_entropy(scores, y, reduction="sum")
            optimizer.zero_grad()
            step.backward(loss)
            optimizer.step()
            step.log(correct=(scores.argmax(1) == y).sum())
            plant.pause("log")
            if plant.evaluates:
                with s.evaluation():
                    plant.pause("evaluate")
        s.end_epoch()
    (out / f"planted-{s.rank}.json").write_text(json.dumps({"spent": plant.spent, "on": plant.on}))
    plant.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cause", default="nothing")
    parser.add_argument("--size", type=float, default=0.0)
    parser.add_argument("--step", type=float, default=0.04, help="seconds of a step without the cause")
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    with lockstep.session() as session:
        planted = Plant(words.cause, words.size, words.step, session.rank, words.out, words.turns)
        main(session, planted, words.out)
