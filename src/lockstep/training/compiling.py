"""`compile=true`: torch.compile, with the time it takes measured apart from training."""

from __future__ import annotations

import shutil
from time import perf_counter
from typing import Any

import torch
from torch import nn

from lockstep.data import DataSet
from lockstep.errors import InputError, RunFailed
from lockstep.models import layers
from lockstep.parallel.ranks import Rank
from lockstep.placement import Placement, Plan, micro_shares, share_of
from lockstep.training.precision import Precision


def compile_model(
    model: nn.Module, precision: Precision, placement: Placement, plan: Plan, data: DataSet, rank: Rank
) -> float:
    """Compile in place, for every batch size that will come, on blank images; returns the seconds."""
    device = next(model.parameters()).device
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        raise InputError("compile=true needs a C++ compiler on the CPU: install g++, or leave it out")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    begin, graphs = perf_counter(), _graphs()
    _compile_in_place(model)
    for size in _train_sizes(plan, rank):
        _forward(model, size, precision, placement, data, device).sum().backward()  # type: ignore[no-untyped-call]
    model.eval()
    with torch.inference_mode():
        for size in _test_sizes(plan, placement, rank):
            _forward(model, size, precision, placement, data, device)
    model.train()
    seconds = perf_counter() - begin
    if _graphs() == graphs:
        raise RunFailed("compile=true compiled nothing of this model: leave it out")
    for parameter in model.parameters():
        parameter.grad = None
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
    start, stop = share_of(plan.test_samples, rank.rank, rank.world)
    return list(
        dict.fromkeys(min(placement.eval_batch, stop - low) for low in range(start, stop, placement.eval_batch))
    )


def _forward(
    model: nn.Module, size: int, precision: Precision, placement: Placement, data: DataSet, device: torch.device
) -> torch.Tensor:
    images = torch.zeros(size, *data.shape, device=device)
    if placement.memory_format == "channels_last":
        images = images.contiguous(memory_format=torch.channels_last)
    layers.bind(torch.zeros(size, dtype=torch.int64, device=device), size)
    with precision.context():
        return precision.scores(model(precision.images(images)))


def _compile_in_place(model: nn.Module) -> None:
    """As `model.compile()`, which passes over a model whose own forward is PyTorch's (a Sequential) without a word: the compiler
    skips PyTorch's files. A function of ours around the call is compiled, and all that it calls."""
    inner = model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call)


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
