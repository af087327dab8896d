"""`compile=true`: torch.compile, with the time it takes measured apart from training."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import nn

from lockstep.backends.ranks import Rank
from lockstep.data.batches import Batches
from lockstep.data.inputs import mapped
from lockstep.errors import InputError, RunFailed
from lockstep.machine import inductor
from lockstep.models import layers
from lockstep.models.calling import call
from lockstep.placement import Placement
from lockstep.plan import Plan, micro_shares
from lockstep.torch_private import compile_in_place, compiled_graphs
from lockstep.training.loss import tensors_in
from lockstep.training.precision import Precision


def compile_model(
    model: nn.Module, precision: Precision, placement: Placement, plan: Plan, batches: Batches, rank: Rank
) -> float:
    """Compile in place, for every batch size that will come, on the first samples; returns the seconds."""
    device = next(model.parameters()).device
    if device.type == "cpu" and not inductor.has_compiler():
        raise InputError("compile=true needs a C++ compiler on the CPU: install g++, or leave it out")
    inductor.choose_folder()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    begin, graphs = perf_counter(), compiled_graphs()
    compile_in_place(model)
    for size in _train_sizes(plan, rank):
        _total(_forward(model, size, precision, batches)).backward()  # type: ignore[no-untyped-call]
    model.eval()
    with torch.inference_mode():
        for size in _test_sizes(plan, placement, rank):
            _forward(model, size, precision, batches)
    model.train()
    seconds = perf_counter() - begin
    if compiled_graphs() == graphs:
        raise RunFailed("compile=true compiled nothing of this model: leave it out")
    model.zero_grad()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    torch.set_rng_state(state)
    return seconds


def _train_sizes(plan: Plan, rank: Rank) -> list[int]:
    shares = [
        (low, high)
        for count in (plan.global_batch, plan.last_batch)
        for low, high in micro_shares(count, rank.rank, plan)
    ]
    return list(dict.fromkeys(max(1, high - low) for low, high in shares))


def _test_sizes(plan: Plan, placement: Placement, rank: Rank) -> list[int]:
    start, stop = plan.part(plan.test_samples, rank.rank)
    return list(
        dict.fromkeys(min(placement.eval_batch, stop - low) for low in range(start, stop, placement.eval_batch))
    )


def _forward(model: nn.Module, size: int, precision: Precision, batches: Batches) -> Any:
    """Batches as they will come, of a size that the set may not have: the first samples, again and again."""
    device = next(model.parameters()).device
    inputs, _ = batches.take(0, min(size, batches.count))
    if size > batches.count:
        inputs = mapped(inputs, lambda one: one.repeat(-(-size // batches.count), *(1 for _ in one.shape[1:]))[:size])
    layers.bind(torch.zeros(size, dtype=torch.int64, device=device), size)
    with precision.context():
        return precision.scores(call(model, precision.images(inputs)))


def _total(output: Any) -> torch.Tensor:
    """Everything that a model answers and learns by, added up."""
    return torch.stack([one.sum() for one in tensors_in(output) if one.requires_grad]).sum()
