"""What a rank puts into a checkpoint, and how it goes on from one (training/checkpoint.py has the file).

A checkpoint changes nothing about the run that writes it. Where ranks differ, each one's own weights, buffers, optimizer and
loss scale are kept, so that the same number of ranks goes on with the same bits; another number goes on from their mean.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import seeding
from lockstep.backends import group
from lockstep.backends.ranks import Rank
from lockstep.errors import InputError
from lockstep.recipe import MAY_CHANGE, Recipe, global_terms
from lockstep.run import CHECKPOINTS, Run, Spec, append_line
from lockstep.training import checkpoint
from lockstep.training.checkpoint import Checkpoint, Position
from lockstep.training.context import Context
from lockstep.training.loop import SaveCheckpoint
from lockstep.training.recipe_step import TrainState
from lockstep.training.state import whole_state
from lockstep.training.stopping import Stopping


def find(run: Run, spec: Spec) -> Checkpoint | None:
    """The checkpoint to go on from: this run's own after a restart, else that of the run which is resumed."""
    if _is_restart(spec) and checkpoint.checkpoints_in(run.folder / CHECKPOINTS):
        return checkpoint.load(run.folder)
    return checkpoint.load(Path(spec.options.resume_from)) if spec.options.resume_from else None


def _is_restart(spec: Spec) -> bool:
    """By torchrun, or by Slurm, which has queued the job again."""
    counts = ["TORCHELASTIC_RESTART_COUNT", *(["SLURM_RESTART_COUNT"] if spec.gives_way else [])]
    return any(int(os.environ.get(name, "0")) > 0 for name in counts)


def steps_before(run: Run, spec: Spec, kept: Checkpoint | None) -> int:
    """Steps that were taken before this run's first row: those of the run it was resumed from."""
    if kept is None or spec.options.resume_from is None:
        return 0
    if kept.run != run.folder:
        return kept.position.step
    return checkpoint.load(Path(spec.options.resume_from), lambda text: None).position.step


def check_recipe(kept: Recipe, recipe: Recipe) -> None:
    """How long a run goes on may change; what it computes may not. Keys that the checkpoint does not know have their defaults."""
    kept, recipe = global_terms(kept), global_terms(recipe)
    for key in Recipe.__struct_fields__:
        before, now = getattr(kept, key), getattr(recipe, key)
        if before != now and key not in MAY_CHANGE:
            raise InputError(
                f"--resume: the checkpoint is of another recipe ({key}={before}, now {now}): leave {key} as it was; "
                f"{', '.join(MAY_CHANGE)} and the placement may change"
            )


def load_weights(kept: Checkpoint, model: nn.Module) -> None:
    """Before a strategy divides or wraps the weights."""
    _fitting(kept, "model", lambda: model.load_state_dict(kept.model))


def restore(kept: Checkpoint, state: TrainState, rank: Rank) -> None:
    """All but the weights, and of these what was this rank's alone; after the strategy has made the ranks start alike.

    Ranks that exchange every step must hold the same weights, optimizer and scale, whatever wrote the checkpoint: only buffers
    (the statistics of per-rank batch norm) are then each rank's own.
    """
    model, strategy, optimizer = state.model, state.strategy, state.optimizer
    alone = strategy.ranks_differ
    if len(kept.ranks) == rank.world:
        _fitting(kept, "ranks", lambda: _load_own(model, kept.ranks[rank.rank], weights=alone))
    _fitting(kept, "optimizers", lambda: optimizer.load_state(_of(kept.optimizers, rank, alone)))
    scale = state.precision.scale
    if scale is not None and kept.scales:
        _fitting(kept, "scales", lambda: scale.load_state(_of(kept.scales, rank, alone)))
    if kept.strategy:
        _fitting(kept, "strategy", lambda: strategy.load_state(kept.strategy))
    # Ranks beyond those that were there then start from the seed, as they do in a new run.
    if rank.rank < len(kept.generators):
        _fitting(kept, "generators", lambda: seeding.load_state(kept.generators[rank.rank]))


def _of(kept: list[Any], rank: Rank, alone: bool) -> Any:
    """This rank's, where ranks train alone and there was one for each of as many ranks."""
    return kept[rank.rank if alone and len(kept) == rank.world else 0]


@torch.no_grad()
def _load_own(model: nn.Module, kept: Mapping[str, Tensor], weights: bool) -> None:
    own = model.state_dict(keep_vars=True)
    for name, tensor in kept.items():
        if weights or not isinstance(own[name], nn.Parameter):
            own[name].copy_(tensor)


def _fitting(kept: Checkpoint, what: str, load: Callable[[], Any]) -> None:
    """Load a part; one that does not fit what this recipe has built is named."""
    try:
        load()
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"checkpoint {kept.path}: its {what} does not fit model={kept.recipe.model}: {reason or type(error).__name__}"
        ) from None


def carry_epochs(kept: Checkpoint, run: Run, per_epoch: int) -> None:
    """The epochs before the checkpoint belong to this run's curves too; one that was cut is replaced when it is completed."""
    for record in Run(kept.run).epochs():
        step = record.get("step")
        if isinstance(step, int) and step <= kept.position.step:
            append_line(run.folder / "epochs.jsonl", {"partial": step % per_epoch > 0, **record})


def saver(context: Context, state: TrainState) -> SaveCheckpoint | None:
    """What writes a checkpoint; None where the run keeps none."""
    options, rank = context.options, context.rank
    model, strategy, optimizer, precision = state.model, state.strategy, state.optimizer, state.precision
    if not (options.checkpoint_every or options.checkpoint_steps):
        return None
    files = checkpoint.Keeper(context.run, options.keep_checkpoints)
    alone = strategy.ranks_differ and rank.world > 1

    def save(position: Position, stopping: Stopping, about: dict[str, Any], best: bool) -> None:
        whole = whole_state(model)
        ranks = _where_ranks_differ(model, whole, alone, rank)
        scale = precision.scale.state() if precision.scale else {}
        content = Checkpoint(
            recipe=context.recipe,
            position=position,
            model=whole | _mean(ranks),
            ranks=ranks,
            optimizers=_gathered(optimizer.state(), alone),
            scales=[
                {name: tensor for name, (tensor,) in each.items()}
                for each in _gathered({name: [tensor] for name, tensor in scale.items()}, alone)
                if each
            ],
            strategy=strategy.state(),
            generators=group.gather_tensor(seeding.state()),
            stopping=stopping.standing,
            best_weights=stopping.best_weights(),
        )
        group.first_alone(lambda: files.save(content, about, best))

    return save


def _where_ranks_differ(model: nn.Module, state: dict[str, Tensor], alone: bool, rank: Rank) -> list[dict[str, Tensor]]:
    """Each rank's own tensors: weights too, where ranks train alone, else buffers, such as statistics of each rank's share. Collective."""
    if rank.world == 1:
        return []
    buffers = {name for name, _ in model.named_buffers()}
    names = [name for name in state if alone or name in buffers]
    found: list[dict[str, Tensor]] = [{} for _ in range(rank.world)]
    for name in names:
        every = group.gather_tensor(state[name])
        if any(not _same_bits(every[0], other) for other in every[1:]):
            for own, tensor in zip(found, every, strict=True):
                own[name] = tensor
    return found if found[0] else []


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _mean(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """For another number of ranks: the mean of all; of counters, the first one's."""
    if not ranks:
        return {}
    found = {}
    for name, first in ranks[0].items():
        if first.is_floating_point() or first.is_complex():
            wide = torch.complex128 if first.is_complex() else torch.float64
            found[name] = torch.stack([own[name].to(wide) for own in ranks]).mean(0).to(first.dtype)
        else:
            found[name] = first
    return found


def _gathered(mine: dict[str, list[Tensor]], alone: bool) -> list[dict[str, list[Tensor]]]:
    """What is the same on all ranks once; else every rank's. Collective."""
    if not alone:
        return [mine]
    every = {key: [group.gather_tensor(tensor) for tensor in tensors] for key, tensors in mine.items()}
    return [
        {key: [found[r] for found in tensors] for key, tensors in every.items()} for r in range(dist.get_world_size())
    ]
