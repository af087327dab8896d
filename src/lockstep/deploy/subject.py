"""A finished run as the subject of quantization: its model with its weights, and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from lockstep.data import DataSet
from lockstep.data.batches import Batches, sample_order
from lockstep.data.inputs import leaves
from lockstep.errors import InputError
from lockstep.quantize import training
from lockstep.run import Run, Spec
from lockstep.training.assemble import build_fitting, open_set, test_batches, train_batches
from lockstep.training.loss import Loss

CPU = torch.device("cpu")
# Calibration images are passed in batches of N.
CALIBRATION_BATCH = 128


@dataclass
class Subject:
    run: Run
    spec: Spec
    model: nn.Module
    """As it was trained: with fake layers, where the recipe says quantize=qat."""
    qat: training.Qat | None
    data: DataSet
    train: Batches
    test: Batches

    @property
    def example(self) -> Tensor:
        return leaves(self.test.take(0, 2)[0])[0]

    def calibration(self, count: int) -> Iterator[Tensor]:
        """The first N training images, in the order of the first epoch, without augmentation."""
        self.visit_train()
        for low in range(0, count, CALIBRATION_BATCH):
            yield leaves(self.train.take(low, min(low + CALIBRATION_BATCH, count))[0])[0]

    def visit_train(self, epoch: int = 1) -> None:
        recipe = self.spec.recipe
        self.train.visit(sample_order(recipe, epoch, self.spec.plan.train_samples) if recipe.shuffle else None, epoch)


def load(run: Run, data_root: Path | str | None = None) -> Subject:
    """The run's model as it ended; one line says what to do where there is none."""
    spec = run.spec()
    if spec.options.own_loop:
        raise InputError(
            f"run {run.id} is a training loop of your own: Lockstep does not know its model; "
            "name it in a recipe (model=path/to/file.py:callable) and train that"
        )
    path = run.folder / "model.pt"
    if not path.is_file():
        raise InputError(_without_weights(run))
    if data_root is not None:
        options = msgspec.structs.replace(spec.options, data_root=str(data_root))
        spec = msgspec.structs.replace(spec, options=options)
    data = open_set(run, spec)
    if spec.recipe.loss != "cross-entropy" or not data.is_images or data.train_labels.ndim > 1:
        raise InputError(
            f"run {run.id}: quantize is for image classifiers (images in bytes, loss=cross-entropy), not for loss={spec.recipe.loss} on data={spec.recipe.data}"
        )
    model = build_fitting(spec.recipe, data)
    train, test = train_batches(spec, data, CPU), test_batches(spec, data, CPU)
    qat = None
    if spec.recipe.quantize == "qat":
        qat = training.prepare(model, leaves(test.take(0, 2)[0])[0], spec.recipe)
    _load_weights(model, path, run)
    return Subject(run, spec, model.eval(), qat, data, train, test)


def _without_weights(run: Run) -> str:
    state = run.status()["state"]
    if state in ("planned", "starting", "running"):
        return f"run {run.id} is {state} and has no model.pt yet: wait for its end"
    if run.has_checkpoint:
        return f"run {run.id} is {state} and has no model.pt, but checkpoints: end it with 'lockstep run --resume {run.id}'"
    return f"run {run.id} ({state}) has no model.pt: train it again with 'lockstep run', which keeps the weights at the end"


def _load_weights(model: nn.Module, path: Path, run: Run) -> None:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        model.load_state_dict(state)
    except Exception as error:  # torch raises many kinds for files that are not its own
        reason = str(error).strip().splitlines()[-1].strip() if str(error) else type(error).__name__
        raise InputError(f"run {run.id}: its model.pt does not fit its recipe's model: {reason}") from None


@dataclass
class Answers:
    """What a model said to every test image."""

    classes: Tensor
    loss: float
    accuracy: float
    samples: int

    def agreement(self, other: Answers) -> float:
        return float((self.classes == other.classes).double().mean())


@torch.no_grad()
def ask(model: Callable[[Tensor], Tensor], subject: Subject) -> Answers:
    """Every test image of the run, in batches of its eval_batch."""
    samples, batch = subject.spec.plan.test_samples, subject.spec.placement.eval_batch
    classes, correct, loss = [], 0, 0.0
    loss_of = Loss(subject.spec.recipe, subject.data.class_weights)
    for low in range(0, samples, batch):
        images, labels = subject.test.take(low, min(low + batch, samples))
        scores = model(leaves(images)[0])
        found = scores.argmax(1)
        classes.append(found)
        correct += int((found == labels).sum())
        loss += float(loss_of.plain(scores, labels))
    return Answers(torch.cat(classes), loss / (subject.test.units(0, samples) or 1.0), correct / samples, samples)
