"""How often overfitting is seen where there is none, and missed where there is: simulated curves and real ones."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.explain import overfitting
from lockstep.explain.evidence import Evidence
from test_explain import Folder, curve

NUMBERS = dict(enumerate(["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]))
STUDIES = Path(__file__).parents[1] / "docs/studies"
Curves = np.ndarray[Any, Any]


def noise(rng: np.random.Generator, kind: str, trials: int, epochs: int) -> Curves:
    """With a standard deviation of 1. Of lasting noise a part of each epoch's is still there in the next one."""
    shape = trials, epochs
    if kind == "heavy tails":
        return rng.standard_t(3, shape) / 3**0.5
    if kind == "outliers":
        return rng.standard_normal(shape) + (rng.random(shape) < 0.1) * rng.exponential(3, shape)
    stays = {"normal": 0.0, "lasting 0.3": 0.3, "lasting 0.5": 0.5}[kind]
    found = rng.standard_normal(shape)
    for epoch in range(1, epochs):
        found[:, epoch] = stays * found[:, epoch - 1] + (1 - stays**2) ** 0.5 * found[:, epoch]
    return found


def fall(rng: np.random.Generator, trials: int, epochs: int) -> Curves:
    """From 0.3 to 1.5 above the plateau, by an exponential whose time is 5 to 35 % of the training."""
    times = np.maximum(0.7, rng.uniform(0.05, 0.35, (trials, 1)) * epochs)
    return rng.uniform(0.3, 1.5, (trials, 1)) * np.exp(-np.arange(epochs) / times)


def seen(curves: Curves) -> float:
    return float(np.mean([overfitting.rose(list(each)).sure for each in curves]))


# The noise of a test loss is 1 to 10 % of it; what counts is how it compares with the rise, which does not depend on its size.
NOISES = ("normal", "heavy tails", "outliers", "lasting 0.3", "lasting 0.5")
SHAPES = ("falls, then flat", "falls on slowly", "flat")


# On a curve that is flat from the first epoch, noise that lasts looks like a fall and a rise.
@pytest.mark.parametrize(
    ("shape", "kind"),
    [(shape, kind) for shape in SHAPES for kind in NOISES if (shape, kind) != ("flat", "lasting 0.5")],
)
@pytest.mark.parametrize("lengths", [(5, 8, 11, 14, 17, 20), (25, 35, 50, 75, 100)], ids=["short", "long"])
def test_a_plateau_is_called_overfitting_in_two_of_a_hundred_at_most(
    shape: str, kind: str, lengths: tuple[int, ...]
) -> None:
    rng, trials = np.random.default_rng(6), 300
    rates = []
    for epochs in lengths:
        size = rng.uniform(0.01, 0.1)
        curves = 0.5 * (1 + size * noise(rng, kind, trials, epochs))
        if shape != "flat":
            curves += fall(rng, trials, epochs)
        if shape == "falls on slowly":
            curves -= 0.5 * size * np.linspace(0, 2, epochs)
        rates.append(seen(curves))
    count = trials * len(lengths)
    # 2 % are allowed, and two standard errors of what this many curves can tell.
    assert np.mean(rates) <= 0.02 + 2 * (0.02 * 0.98 / count) ** 0.5, dict(zip(lengths, rates, strict=True))


# Our first CIFAR-10 training, epoch by epoch: test loss falls to 0.65 in epoch 6, and rises to 0.87 in epoch 20.
LOSSES = [1.3029, 1.0161, 0.8532, 0.7616, 0.7080, 0.6537, 0.6677, 0.6744, 0.6939, 0.6850]
LOSSES += [0.6839, 0.7385, 0.8344, 0.8307, 0.9090, 0.7840, 0.8645, 0.8886, 0.8576, 0.8727]
ACCURACIES = [0.5264, 0.6334, 0.6936, 0.7256, 0.7524, 0.7745, 0.7733, 0.7793, 0.7793, 0.7886]
ACCURACIES += [0.7950, 0.7834, 0.7695, 0.7738, 0.7771, 0.7923, 0.7962, 0.7830, 0.7939, 0.7989]


@pytest.mark.parametrize("stays", ["normal", "lasting 0.3", "lasting 0.5"])
def test_what_happened_on_cifar_is_found_in_95_of_a_hundred(stays: str) -> None:
    """The straight line through the real rise, with as much noise as the real curve has around it."""
    losses = np.array(LOSSES)
    epochs = np.arange(20)
    slope, level = np.polyfit(epochs[6:], losses[6:], 1)
    around = losses[6:] - slope * epochs[6:] - level
    smooth = np.where(epochs < 6, losses, slope * epochs + level)
    size = np.interp(epochs, [5, 9], [0.01, float(around.std(ddof=2))])
    trials = 1000
    found = seen(smooth + size * noise(np.random.default_rng(7), stays, trials, 20))
    assert found >= 0.95, found


def test_the_real_curves_are_judged_as_they_look() -> None:
    assert overfitting.rose(LOSSES).sure
    assert overfitting.turning_point(LOSSES) == 5, "epoch 6"
    early = [epochs for epochs in range(5, 9) if overfitting.rose(LOSSES[:epochs]).sure]
    assert not early, "it had hardly turned"
    errors = [1 - accuracy for accuracy in ACCURACIES]
    wrong = [epochs for epochs in range(5, 21) if overfitting.rose(errors[:epochs]).sure]
    assert not wrong, "the share of errors levels off, and does not rise"


def test_the_curves_of_the_studies_are_judged_as_they_look_and_the_page_counts_them(tmp_path: Path) -> None:
    """So what is known of real curves is what the packs have, and docs/explain.md says how many those are."""
    folder, judged, long = Folder(tmp_path), 0, 0
    for file in sorted(STUDIES.glob("*.study.zip")):
        with zipfile.ZipFile(file) as pack:
            names = [name for name in pack.namelist() if name.endswith("epochs.jsonl") and "/ranks/" not in name]
            for name in names:
                epochs = [json.loads(line) for line in pack.read(name).splitlines()]
                run, losses = folder.run(), [each["test_loss"] for each in epochs]
                curve(run, losses, [each["train_loss"] for each in epochs])
                (found,) = overfitting.answer(Evidence(run))
                judged += 1
                if len(epochs) < overfitting.FEWEST_EPOCHS:
                    assert found.verdict.startswith("too few epochs to say"), name
                    continue
                long += 1
                best, noise = min(losses), overfitting.rose(losses).noise
                if since := re.match(r"overfitting since epoch (\d+)", found.verdict):
                    turned = losses[int(since[1]) - 1]
                    assert turned <= best + noise < losses[-1], name
                else:
                    assert found.verdict.startswith("not overfitting"), name
                    assert np.mean(losses[-3:]) - best < 8 * noise, name
    page = " ".join((STUDIES.parent / "explain.md").read_text().split())
    assert f"{NUMBERS.get(long, long)} CIFAR-10 trainings of ours" in page, "say how many real curves there are now"
    assert judged > 100
