"""One rank's training, put together: data, model, number format, strategy, optimizer, checkpoint, trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep import models, seeding
from lockstep.data import DataSet, open_data
from lockstep.data.batches import Batches
from lockstep.measure.recorder import Recorder
from lockstep.models import cautions, layers, memory
from lockstep.parallel import group, strategies, zero
from lockstep.parallel.ranks import Rank
from lockstep.parallel.strategies import Strategy
from lockstep.recipe import Recipe
from lockstep.run import MODEL_NOTES, Run, Spec, write_atomic
from lockstep.training import compiling, optimizers, resuming
from lockstep.training.checkpoint import Position
from lockstep.training.loop import Trainer
from lockstep.training.optimizers import Optimizer
from lockstep.training.precision import Precision
from lockstep.training.step import Stepper
from lockstep.training.stopping import Stopping

if TYPE_CHECKING:
    from lockstep.quantize.training import Qat


# How many images a user's model is tried on: a number that is hardly any other dimension's.
_TRIED = 11


@dataclass
class Assembly:
    """What a rank trains with."""

    model: nn.Module
    stepper: Stepper
    train: Batches
    trainer: Trainer
    compile_seconds: float


def assemble(run: Run, spec: Spec, rank: Rank, device: torch.device) -> Assembly:
    """Everything but the training itself. Collective where there are several ranks."""
    recipe, placement, plan = spec.recipe, spec.placement, spec.plan
    data = open_set(run, spec)
    train, test = train_batches(spec, data, device), test_batches(spec, data, device)
    precision = Precision(recipe, device)
    model = build_model(recipe, spec, data, device, precision)
    if rank.is_first:
        _note_model(run, recipe, model, test, precision)
    # From here on each rank draws numbers of its own, where a model draws any.
    seeding.seed_all(recipe.seed, rank.rank)
    qat = quantizer(recipe, model, test)
    kept = resuming.find(run, spec)
    position = kept.position if kept else Position()
    if kept:
        resuming.check_recipe(kept.recipe, recipe)
        resuming.load_weights(kept, model)
    before = resuming.steps_before(run, spec, kept)
    recorder = Recorder(run, rank.rank, plan.total_steps, device, position.step - before, before, spec)
    if rank.world > 1:
        group.join(placement, rank, run.folder)
    compile_seconds = compiling.compile_model(model, precision, placement, plan, data, rank) if recipe.compile else 0.0
    strategy = strategies.build(placement.strategy, model, placement, device)
    watch: Callable[[Any], None] | None = getattr(strategy, "watch", None)
    if recorder.trace is not None and watch is not None:
        watch(recorder.trace)
    train.keyed = train.keyed or layers.needs_keys(model)
    optimizer = build_optimizer(spec, model, strategy)
    stepper = Stepper(
        recipe, strategy, optimizer, train, plan, rank, recorder.clock, recorder.log, precision, position.step
    )
    if spec.options.proof:
        from lockstep.training.witness import Witness

        stepper.witness = Witness(run, spec, rank, model, strategy, optimizer, precision)
    if qat:
        qat.start(position.step)
    stopping = Stopping(recipe.early_stopping)
    if kept:
        stopping = Stopping(recipe.early_stopping, kept.stopping, kept.best_weights, kept.recipe.early_stopping)
        resuming.restore(kept, model, optimizer, precision, strategy, rank)
        if rank.is_first and kept.run != run.folder:
            resuming.carry_epochs(kept, run, plan.steps_per_epoch)
    keep = resuming.keeper(run, spec, rank, model, optimizer, precision, strategy)
    trainer = Trainer(
        run, spec, rank, model, strategy, stepper, train, test, recorder, precision, stopping, position, keep, qat
    )
    return Assembly(model, stepper, train, trainer, compile_seconds)


def open_set(run: Run, spec: Spec) -> DataSet:
    root = Path(spec.options.data_root) if spec.options.data_root else None
    return open_data(spec.recipe.data, root, scratch=run.folder / "data", quiet=True)


def train_batches(spec: Spec, data: DataSet, device: torch.device) -> Batches:
    return Batches(data.train_images, data.train_labels, data, spec.recipe, device, _memory_format(spec))


def test_batches(spec: Spec, data: DataSet, device: torch.device) -> Batches:
    return Batches(data.test_images, data.test_labels, data, spec.recipe, device, _memory_format(spec))


def _memory_format(spec: Spec) -> torch.memory_format:
    return torch.channels_last if spec.placement.memory_format == "channels_last" else torch.contiguous_format


def build_model(recipe: Recipe, spec: Spec, data: DataSet, device: torch.device, precision: Precision) -> nn.Module:
    model = models.build(recipe, data.shape)
    models.check_fits(model, recipe, data.shape, data.classes)
    if recipe.fused:
        from lockstep.kernels import fuse

        model = fuse(model)
    return precision.prepare(memory.arrange(model.to(device=device), _memory_format(spec)))


def _note_model(run: Run, recipe: Recipe, model: nn.Module, batches: Batches, precision: Precision) -> None:
    """Write down what was changed about a user's own model, and what about it ranks may compute otherwise than one process."""
    unused = _fused_in_vain(model) if recipe.fused else []
    if recipe.model in models.CATALOGUE:
        if unused:
            write_atomic(run.folder / MODEL_NOTES, {"remarks": unused, "cautions": []})
        return

    def forward(net: nn.Module, images: torch.Tensor) -> None:
        with precision.context():
            net(precision.images(images))

    found = cautions.cautions(model, batches.take(0, min(_TRIED, batches.count))[0], forward)
    write_atomic(run.folder / MODEL_NOTES, {"remarks": cautions.remarks(model) + unused, "cautions": found})


def _fused_in_vain(model: nn.Module) -> list[str]:
    from lockstep.kernels import FusedConvReLU

    fused = [module for module in model.modules() if isinstance(module, FusedConvReLU)]
    if not fused:
        return ["warning: fused=true has no effect: the model has no Conv2d with a ReLU behind it (docs/kernels.md)"]
    if all(module.weight.device.type != "cpu" for module in fused):
        return ["warning: fused=true has no effect: the fused kernels are for the CPU"]
    return []


def quantizer(recipe: Recipe, model: nn.Module, batches: Batches) -> Qat | None:
    """Fake quantization in the model, where the recipe asks for it; what it needs is imported only then."""
    if recipe.quantize == "off":
        return None
    from lockstep.quantize import training

    return training.prepare(model, batches.take(0, 2)[0], recipe)


def build_optimizer(spec: Spec, model: nn.Module, strategy: Strategy) -> Optimizer:
    make = partial(optimizers.build, spec.recipe.optimizer)
    own: Callable[[Any], Optimizer] | None = getattr(strategy, "optimizer", None)
    if own is not None:  # a strategy that has divided the weights
        return own(make)
    if spec.placement.zero and spec.placement.ranks > 1:
        return zero.build(make, list(model.parameters()))
    return make(model.parameters())
