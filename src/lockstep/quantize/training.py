"""Quantization-aware training: fake quantization in every step, and an int8 model after every epoch.

    qat = prepare(model, example, recipe)      after the model is on its device, before its weights are loaded and a strategy wraps it
    qat.start(steps)                           before the first step: how many were taken before (a resumed run)
    qat.after_step(step)                       on all ranks after every optimizer step, with its number from 1 on
    qat.after_epoch(evaluate)                  on all ranks after an epoch's test: makes the int8 model and tests that

The range of a layer's inputs is observed in steps 1, 2, 4, 8, 16 and every 16th from there; between these it stays. The ranks combine what they
observed (one small all-reduce of the largest values), so the range is that of the *global* batch, the same on every rank and on every placement: N ranks train
what one would. PyTorch's own way sends rank 0's ranges to all in every forward pass, which loses what the other ranks saw and costs a message a step.
The range is the mean of the first ten looks, and from there a moving average: its weight follows from the step's number, so a resumed run needs no state for it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.quantize import convert
from lockstep.quantize.fake import fakes, make_fake
from lockstep.quantize.layers import kernels_are_here, use_kernels
from lockstep.quantize.scheme import Scheme
from lockstep.recipe import Recipe
from lockstep.torch_private import ddp_ignore, ddp_ignored

LOOK_EVERY_STEPS = 16
NEWEST_COUNTS = 0.1

# What a recipe's training pretends. Not a machine's choice: the recipe computes the same everywhere.
SCHEME = Scheme()


class Tested(Protocol):
    """What an evaluation returns, as far as it is needed here."""

    @property
    def loss(self) -> float: ...
    @property
    def accuracy(self) -> float: ...


def looks(step: int) -> bool:
    """Whether step number `step` (from 1 on) looks at the ranges: 1, 2, 4, 8, 16, 32, 48, …"""
    return step % LOOK_EVERY_STEPS == 0 or (step < LOOK_EVERY_STEPS and step & (step - 1) == 0)


def looks_until(step: int) -> int:
    """How many of the steps up to this one looked."""
    return sum(looks(s) for s in range(1, min(step, LOOK_EVERY_STEPS) + 1)) + max(0, step // LOOK_EVERY_STEPS - 1)


class Qat:
    """The fake layers of a model in training."""

    def __init__(self, model: nn.Module, example: Tensor, scheme: Scheme) -> None:
        self.model, self.scheme, self._example = model, scheme, example
        self._layers = list(fakes(model).values())
        self.start(0)

    def start(self, steps: int) -> None:
        for layer in self._layers:
            layer.observing, layer.seen = looks(steps + 1), None

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Collective in the steps that look."""
        now, soon = looks(step), looks(step + 1)
        if now:
            self._settle(max(1 / looks_until(step), NEWEST_COUNTS))
        if now != soon:
            for layer in self._layers:
                layer.observing = soon

    def _settle(self, newest: float) -> None:
        nothing = torch.full((2,), float("-inf"), device=self._layers[0].input_range.device)
        seen = torch.stack([nothing if layer.seen is None else layer.seen for layer in self._layers])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(seen, dist.ReduceOp.MAX)
        for layer, (minus_low, high) in zip(self._layers, seen.tolist(), strict=True):
            layer.seen = None
            low = -minus_low
            if low > high:  # no rank came through this layer
                continue
            now = torch.tensor([low, high], device=nothing.device)
            if layer.numbers is None:
                layer.input_range.copy_(now)
            else:
                layer.input_range.lerp_(now, newest)
            layer.settle()

    def after_epoch(self, evaluate: Callable[[nn.Module], Tested]) -> dict[str, Any]:
        """Make the int8 model and test it. All ranks have the same weights and ranges, so they make the same one and share the test."""
        begin = perf_counter()
        int8 = self.int8()
        made = perf_counter()
        tested = evaluate(int8)
        return {
            "int8_loss": tested.loss,
            "int8_accuracy": tested.accuracy,
            "int8_convert_seconds": made - begin,
            "int8_eval_seconds": perf_counter() - made,
        }

    def int8(self) -> nn.Module:
        """The model as it is now, as bytes, on oneDNN's integer kernels."""
        prepared = convert.prepare(self.model, self._example, "qat", self.scheme)
        prepared.keep_ranged()
        convert.leave_out_broken(prepared, self._example)
        model = convert.convert(prepared)
        use_kernels(model)
        return model


def prepare(model: nn.Module, example: Tensor, recipe: Recipe, scheme: Scheme = SCHEME) -> Qat:
    """Give a model fake quantization, in place: the same parameters under the same names, and a range for each layer's input."""
    if not kernels_are_here():
        raise InputError(
            "quantize=qat: this PyTorch was built without oneDNN's int8 kernels, which test its int8 model"
        )
    names = [name for name, layer in model.named_modules() if _can(layer)]
    if not names:
        raise InputError(
            f"quantize=qat: model={recipe.model} has no Conv2d or Linear layer that can be quantized: leave it out"
        )
    for name in names:
        make_fake(model.get_submodule(name), scheme)
    # They are settled here, between all ranks: DDP (and strategy=flat) would send rank 0's to all before every pass.
    ours = [f"{name}.{buffer}" if name else buffer for name in names for buffer in ("input_range", "weight_zeros")]
    ddp_ignore(model, [*ddp_ignored(model), *ours])
    return Qat(model, example, scheme)


def _can(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d | nn.Linear) and not convert.why_not(layer, "qat")
