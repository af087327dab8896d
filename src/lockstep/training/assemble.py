"""One rank's training, put together: data, model, number format, strategy, optimizer, checkpoint, trainer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep import models, seeding
from lockstep.data import DataSet, fit, open_data
from lockstep.data.arrays import open_batches
from lockstep.data.batches import Batches
from lockstep.data.inputs import Inputs, leaves
from lockstep.models import cautions, layers, memory
from lockstep.models.calling import call
from lockstep.recipe import Recipe
from lockstep.run import MODEL_NOTES, Run, Spec, write_atomic
from lockstep.training import compiling, fused, optimizers, resuming, trial
from lockstep.training.balance import balance_of
from lockstep.training.checkpoint import Position
from lockstep.training.context import Context
from lockstep.training.loop import Loader, Trainer
from lockstep.training.loss import Loss
from lockstep.training.loss_trial import check_loss, check_metrics
from lockstep.training.member import Member
from lockstep.training.precision import Precision
from lockstep.training.recipe_step import RecipeStep, TrainState
from lockstep.training.stopping import Stopping

if TYPE_CHECKING:
    from lockstep.quantize.training import Qat


# How many images a user's model is tried on: a number that is hardly any other dimension's.
_TRIED = 11


def assemble(context: Context) -> Trainer:
    """Everything but the training itself. Collective where there are several ranks."""
    run, spec, rank, device = context.run, context.spec, context.rank, context.device
    recipe, plan = spec.recipe, spec.plan
    data = open_set(run, spec)
    loader = Loader(train_batches(spec, data, device), test_batches(spec, data, device))
    precision = Precision(recipe, device)
    model = build_model(recipe, spec, data, device, precision)
    check_loss(recipe, model, loader.test)
    check_metrics(recipe, model, loader.test)
    loss = Loss(recipe, data.class_weights)
    placement, tried = trial.settle(recipe, spec.placement, model, loader.train, precision, loss)
    if rank.is_first:
        _note_model(run, recipe, model, loader.test, precision, tried + fit.remarks(recipe, data))
    # From here on each rank draws numbers of its own, where a model draws any.
    seeding.seed_all(recipe.seed, rank.rank)
    qat = quantizer(recipe, model, loader.test)
    checkpoint = resuming.find(run, spec)
    position = checkpoint.position if checkpoint else Position()
    if checkpoint:
        resuming.check_recipe(checkpoint.recipe, recipe)
        resuming.load_weights(checkpoint, model)
    member = Member(context)
    rows = None if spec.options.turns else plan.total_steps
    member.join(rows, position, resuming.steps_before(run, spec, checkpoint))
    compiled = (
        compiling.compile_model(model, precision, spec.placement, plan, loader.train, rank) if recipe.compile else 0.0
    )
    strategy = member.adopt(model, placement)
    optimizer = strategy.optimizer(partial(optimizers.build, recipe.optimizer))
    state = TrainState(model, strategy, optimizer, precision, loss)
    loader.train.keyed = loader.train.keyed or layers.needs_keys(model)
    balance = balance_of(context, plan, member.recorder)
    step = RecipeStep(recipe, plan, rank, state, loader.train, member.recorder, position.step, balance)
    if spec.options.proof:
        from lockstep.training.witness import Witness

        step.witness = Witness(context, state)
    if qat:
        qat.start(position.step)
    stopping = Stopping(recipe.early_stopping)
    if checkpoint:
        stopping = Stopping(
            recipe.early_stopping, checkpoint.stopping, checkpoint.best_weights, checkpoint.recipe.early_stopping
        )
        resuming.restore(checkpoint, state, rank)
        if rank.is_first and checkpoint.run != run.folder:
            resuming.carry_epochs(checkpoint, run, plan.steps_per_epoch)
    save = resuming.saver(context, state)
    return Trainer(member, state, step, loader, stopping, position.step, save, qat, compiled)


def open_set(run: Run, spec: Spec) -> DataSet:
    return open_data(spec.recipe.data, spec.options.data_root, scratch=run.folder / "data", quiet=True)


def train_batches(spec: Spec, data: DataSet, device: torch.device) -> Batches:
    return open_batches(data, "train", spec.recipe, device, _memory_format(spec))


def test_batches(spec: Spec, data: DataSet, device: torch.device) -> Batches:
    return open_batches(data, "test", spec.recipe, device, _memory_format(spec))


def _memory_format(spec: Spec) -> torch.memory_format:
    return torch.channels_last if spec.placement.memory_format == "channels_last" else torch.contiguous_format


def build_model(recipe: Recipe, spec: Spec, data: DataSet, device: torch.device, precision: Precision) -> nn.Module:
    model = build_fitting(recipe, data)
    model = fused.applied(recipe, model, device)
    return precision.prepare(memory.arrange(model.to(device=device), _memory_format(spec)))


def build_fitting(recipe: Recipe, data: DataSet) -> nn.Module:
    """The recipe's model, tried on two samples."""
    two = open_batches(data, "train", recipe, torch.device("cpu"), torch.contiguous_format)
    inputs, targets = two.take(0, min(2, two.count))
    if data.is_images:
        inputs = torch.zeros_like(leaves(inputs)[0])
    model = models.build(recipe, inputs)
    models.check_fits(model, recipe, inputs, data.classes, targets)
    return model


def _note_model(
    run: Run, recipe: Recipe, model: nn.Module, batches: Batches, precision: Precision, more: list[str]
) -> None:
    """Write down what was changed about a user's own model, and what about it ranks may compute otherwise than one process."""
    unused = fused.remarks(recipe, model) + more
    if recipe.model in models.CATALOGUE:
        if unused:
            write_atomic(run.folder / MODEL_NOTES, {"remarks": unused, "cautions": []})
        return

    def forward(net: nn.Module, images: Inputs) -> None:
        with precision.context():
            call(net, precision.images(images))

    found = cautions.cautions(model, batches.take(0, min(_TRIED, batches.count))[0], forward)
    write_atomic(run.folder / MODEL_NOTES, {"remarks": cautions.remarks(model) + unused, "cautions": found})


def quantizer(recipe: Recipe, model: nn.Module, batches: Batches) -> Qat | None:
    """Fake quantization in the model, where the recipe asks for it; what it needs is imported only then."""
    if recipe.quantize == "off":
        return None
    from lockstep.quantize import training

    return training.prepare(model, leaves(batches.take(0, 2)[0])[0], recipe)
