"""How often overfitting is seen where there is none, and missed where there is: simulated curves and real ones."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.explain import overfitting
from lockstep.explain.evidence import Evidence
from test_explain import Folder, curve

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


def cifar() -> list[dict[str, Any]]:
    """The epochs of our first CIFAR-10 training: test loss falls to 0.65 in epoch 6, and rises to 0.87 in epoch 20."""
    with zipfile.ZipFile(STUDIES / "cifar.study.zip") as pack:
        (name,) = (name for name in pack.namelist() if name.endswith("-1fead0c32d4c/epochs.jsonl"))
        return [json.loads(line) for line in pack.read(name).splitlines()]


@pytest.mark.parametrize("stays", ["normal", "lasting 0.3", "lasting 0.5"])
def test_what_happened_on_cifar_is_found_in_95_of_a_hundred(stays: str) -> None:
    """The straight line through the real rise, with as much noise as the real curve has around it."""
    losses = np.array([epoch["test_loss"] for epoch in cifar()])
    epochs = np.arange(20)
    slope, level = np.polyfit(epochs[6:], losses[6:], 1)
    around = losses[6:] - slope * epochs[6:] - level
    smooth = np.where(epochs < 6, losses, slope * epochs + level)
    size = np.interp(epochs, [5, 9], [0.01, float(around.std(ddof=2))])
    trials = 1000
    found = seen(smooth + size * noise(np.random.default_rng(7), stays, trials, 20))
    assert found >= 0.95, found


def test_the_real_curves_are_judged_as_they_look() -> None:
    losses = [epoch["test_loss"] for epoch in cifar()]
    assert overfitting.rose(losses).sure
    assert overfitting.turning_point(losses) == 5, "epoch 6"
    early = [epochs for epochs in range(5, 9) if overfitting.rose(losses[:epochs]).sure]
    assert not early, "it had hardly turned"
    accuracies = [1 - epoch["test_accuracy"] for epoch in cifar()]
    wrong = [epochs for epochs in range(5, 21) if overfitting.rose(accuracies[:epochs]).sure]
    assert not wrong, "the share of errors levels off, and does not rise"


def test_the_studies_have_two_curves_that_are_long_enough(tmp_path: Path) -> None:
    """So the rate of false alarms on real curves is that of the simulation and of two trainings, and docs/explain.md says so."""
    folder, judged, long = Folder(tmp_path), 0, 0
    for file in sorted(STUDIES.glob("*.study.zip")):
        with zipfile.ZipFile(file) as pack:
            names = [name for name in pack.namelist() if name.endswith("epochs.jsonl") and "/ranks/" not in name]
            for name in names:
                epochs = [json.loads(line) for line in pack.read(name).splitlines()]
                run = folder.run()
                curve(run, [each["test_loss"] for each in epochs], [each["train_loss"] for each in epochs])
                (found,) = overfitting.answer(Evidence(run))
                judged += 1
                expected = "too few epochs to say"
                if len(epochs) == 20:  # each since the epoch with the least test loss
                    expected = f"overfitting since epoch {9 if 'batch-32-each' in name else 6}"
                    long += 1
                assert found.verdict.startswith(expected), name
    assert long == 2
    assert judged > 100
