"""Strategies: how the ranks' gradients become one. Each is small enough to read in one go (docs/strategies.md).

A strategy of your own is a class with the members of `Strategy`, named as path/to/file.py:Class.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.parallel.ddp import Ddp
from lockstep.parallel.dp import DataParallel
from lockstep.parallel.flat import Flat
from lockstep.parallel.fsdp import Fsdp
from lockstep.parallel.local_sgd import DiLoCo, LocalSgd
from lockstep.parallel.naive import Naive
from lockstep.placement import Placement
from lockstep.plugins import load_object


class Strategy(Protocol):
    """What the training loop needs of a strategy.

    A strategy may have more members, which the loop looks for and does without:

    - `after_step(number)` is called after every optimizer step, with its number, from 1 on.
    - `settle()` makes `model` the one result, the same on all ranks: before an evaluation, a checkpoint and the end. All ranks
      call it together. `restore()` is called when training goes on after that.
    - `state()` and `load_state(state)`: tensors by name that a checkpoint has to keep. All ranks call `state` together.
    - `own_optimizer_state`: true where the ranks' optimizers differ, so that a checkpoint has to keep all of them.
    - `optimizer(make)`: an optimizer around what `make(parameters)` builds, by strategies whose ranks keep parts of the weights only. These
      also have `together(index, part)` (a gradient made whole), `whole_norm(norm)` and `load_whole(state)`; see parallel/fsdp.py.
    """

    gradient_scale: float
    """What the local loss is multiplied with, so that the exchanged gradient is the sum over all samples."""
    model: nn.Module
    """What the loop calls forward on."""

    exchange: Callable[[], None] | None
    """Called after the last backward of a step, by strategies that do not exchange during backward. Asked for anew in
    every step: it may come and go."""

    def no_exchange(self) -> AbstractContextManager[None]:
        """Forward and backward inside it keep their gradients to themselves (inner steps of an accumulation)."""


class Single:
    """One process: nothing to exchange."""

    exchange: Callable[[], None] | None = None

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        self.model = model
        self.gradient_scale = 1.0

    def no_exchange(self) -> AbstractContextManager[None]:
        return nullcontext()


STRATEGIES: dict[str, Callable[[nn.Module, Placement, torch.device], Strategy]] = {
    "single": Single,
    "ddp": Ddp,
    "flat": Flat,
    "naive": Naive,
    "dp": DataParallel,
    "fsdp": Fsdp,
    "local-sgd": LocalSgd,
    "diloco": DiLoCo,
}
# Those that can be put into a group of their own, which a probe needs: with a group of one, the wrapper is all that is left.
IN_A_GROUP: dict[str, Callable[..., Strategy]] = {"ddp": Ddp, "flat": Flat, "naive": Naive}
# ZeRO-1 needs the same whole gradient on every rank.
WITHOUT_ZERO = ("fsdp", "local-sgd", "diloco")


def build(name: str, model: nn.Module, placement: Placement, device: torch.device) -> Strategy:
    if placement.zero and placement.ranks > 1 and name in WITHOUT_ZERO:
        why = "divides the optimizer's state already" if name == "fsdp" else "gives each rank gradients of its own"
        raise InputError(
            f"zero=true does not go with strategy={name}, which {why}: leave zero out, or choose strategy=ddp"
        )
    kind = STRATEGIES[name] if name in STRATEGIES else load_object(name, option="strategy")
    strategy: Strategy = kind(model, placement, device)
    return strategy
