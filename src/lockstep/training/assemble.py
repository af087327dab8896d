"""One rank's training, put together: data, model, number format, strategy, optimizer, checkpoint, trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from lockstep import models
from lockstep.data import DataSet, open_data
from lockstep.data.batches import Batches
from lockstep.errors import InputError
from lockstep.measure.recorder import Recorder
from lockstep.models import layers
from lockstep.parallel import group, strategies, zero
from lockstep.parallel.ranks import Rank
from lockstep.parallel.strategies import Strategy
from lockstep.recipe import MAY_CHANGE, Recipe
from lockstep.run import CHECKPOINTS, Run, Spec, append_line
from lockstep.training import checkpoint, compiling, optimizers
from lockstep.training.checkpoint import Position
from lockstep.training.loop import Keep, Trainer
from lockstep.training.optimizers import Optimizer
from lockstep.training.precision import Precision
from lockstep.training.state import whole_state
from lockstep.training.step import Stepper
from lockstep.training.stopping import Stopping

if TYPE_CHECKING:
    from lockstep.quantize.training import Qat


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
    qat = quantizer(recipe, model, test)
    kept = _kept(run, spec)
    position = kept["position"] if kept else Position()
    if kept:
        _check_recipe(kept["recipe"], recipe)
        model.load_state_dict(kept["model"])  # before a strategy divides or wraps the weights
    before = position.steps if kept and kept["from"] != str(run.folder) else _steps_before(run)
    recorder = Recorder(run, rank.rank, plan.total_steps, device, position.steps - before, before, spec)
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
        recipe, strategy, optimizer, train, plan, rank, recorder.clock, recorder.log, precision, position.steps
    )
    if spec.options.proof:
        from lockstep.training.witness import Witness

        stepper.witness = Witness(run, spec, rank, model, strategy, optimizer, precision)
    if qat:
        qat.start(position.steps)
    stopping = Stopping(recipe.early_stopping, kept["stopping"] if kept else None)
    if kept:
        _restore(kept, optimizer, precision, strategy, stopping, rank)
        if rank.is_first and kept["from"] != str(run.folder):
            _carry_epochs(Path(kept["from"]), run, position)
    keep = _keeper(run, spec, rank, model, optimizer, precision, strategy)
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
    model = models.build(recipe)
    models.check_fits(model, recipe, data.shape, data.classes)
    if recipe.fused:
        from lockstep.kernels import fuse

        model = fuse(model)
    model = precision.prepare(model.to(device=device, memory_format=_memory_format(spec)))  # type: ignore[call-overload]
    torch.manual_seed(recipe.seed)
    return model


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


def _kept(run: Run, spec: Spec) -> dict[str, Any] | None:
    """The checkpoint to go on from: this run's own after a restart, else that of the run which is resumed."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    own = run.folder / CHECKPOINTS
    if again and checkpoint.checkpoints_in(own):
        return {**checkpoint.load(run.folder), "from": str(run.folder)}
    if spec.options.resume_from:
        return {**checkpoint.load(Path(spec.options.resume_from)), "from": spec.options.resume_from}
    return None


def _steps_before(run: Run) -> int:
    """Steps that were taken before this run's first row: those of the run it was resumed from."""
    source = run.spec().options.resume_from
    return int(checkpoint.load(Path(source), lambda text: None)["position"].steps) if source else 0


def _check_recipe(kept: dict[str, Any], recipe: Recipe) -> None:
    now = msgspec.to_builtins(recipe)
    # The global batch is compared; how it was stated does not matter.
    free = (*MAY_CHANGE, "batch_per_rank")
    changed = [key for key in now if key not in free and kept.get(key) != now[key]]
    if changed:
        key = changed[0]
        raise InputError(
            f"--resume: the checkpoint is of another recipe ({key}={kept.get(key)}, now {now[key]}): leave {key} as it was; "
            "epochs, max_steps, early_stopping and the placement may change"
        )


def _restore(
    kept: dict[str, Any], optimizer: Optimizer, precision: Precision, strategy: Any, stopping: Stopping, rank: Rank
) -> None:
    states = kept["optimizers"]
    optimizer.load_state(states[rank.rank if len(states) == rank.world else 0])
    if precision.scale and kept["scale"]:
        precision.scale.load_state(kept["scale"])
    if kept["strategy"] and hasattr(strategy, "load_state"):
        strategy.load_state(kept["strategy"])
    stopping.load_best_weights(kept["best_weights"])
    # Ranks beyond those that were there then start from the seed, as they do in a new run.
    if rank.rank < len(kept["generators"]):
        torch.set_rng_state(kept["generators"][rank.rank])


def _carry_epochs(source: Path, run: Run, position: Position) -> None:
    """The epochs before the checkpoint belong to this run's curves too."""
    for record in Run(source).epochs():
        if record["epoch"] <= position.epoch:
            append_line(run.folder / "epochs.jsonl", record)


def _keeper(
    run: Run, spec: Spec, rank: Rank, model: nn.Module, optimizer: Optimizer, precision: Precision, strategy: Any
) -> Keep | None:
    options = spec.options
    if not (options.checkpoint_every or options.checkpoint_steps):
        return None
    keeper = checkpoint.Keeper(run, options.keep_checkpoints)
    recipe = msgspec.to_builtins(spec.recipe)
    own_state: Callable[[], dict[str, Any]] | None = getattr(strategy, "state", None)

    def keep(position: Position, stopping: Stopping, about: dict[str, Any], best: bool) -> None:
        content = {
            "recipe": recipe,
            "model": whole_state(model),
            "optimizers": _optimizer_states(optimizer, strategy, rank),
            "scale": precision.scale.state() if precision.scale else {},
            "strategy": own_state() if own_state else {},
            "generators": _generators(rank),
            "stopping": stopping.state(),
            "best_weights": stopping.best_weights(),
        }
        if rank.is_first:
            keeper.save(content, position, about, best)

    return keep


def _optimizer_states(optimizer: Optimizer, strategy: Any, rank: Rank) -> list[dict[str, list[torch.Tensor]]]:
    """The optimizer's state: one for all ranks, but for strategies whose ranks train alone. Collective."""
    mine = optimizer.state()
    if rank.world == 1 or not getattr(strategy, "own_optimizer_state", False):
        return [mine]
    every = {key: [_of_every_rank(tensor, rank) for tensor in tensors] for key, tensors in mine.items()}
    return [{key: [found[r] for found in tensors] for key, tensors in every.items()} for r in range(rank.world)]


def _generators(rank: Rank) -> list[torch.Tensor]:
    """The state of every rank's generator, for models that draw from it. Collective."""
    return _of_every_rank(torch.get_rng_state(), rank)


def _of_every_rank(mine: torch.Tensor, rank: Rank) -> list[torch.Tensor]:
    if rank.world == 1:
        return [mine]
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    found = [torch.empty(mine.shape, dtype=mine.dtype, device=device) for _ in range(rank.world)]
    dist.all_gather(found, mine.to(device).contiguous())
    return [tensor.cpu() for tensor in found]
