"""What a strategy is: how the gradients of all ranks become one update.

One step, as the training loop takes it:

    with strategy.no_exchange():      forward and backward of every micro batch but the last
    forward, backward                 the last micro batch; DDP and FSDP exchange during this backward
    strategy.exchange()               flat and naive exchange here
    optimizer.step(), .exchange()     update; ZeRO sends the updated weights
    strategy.after_step(number)       local-sgd averages the weights every N steps

A strategy of your own subclasses `Strategy`, overrides what it needs, and is named as path/to/file.py:Class. Public names
are hooks: a name that is none of them is refused with the nearest one, since the loop would never call it.
"""

from __future__ import annotations

import difflib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.strategies.optimizer import Make, Optimizer


class Watcher(Protocol):
    """Who wants to know when buckets are exchanged."""

    active: bool
    only_bucket: int
    """Bytes of the only bucket, where there is one: it is full with the last gradient, and its exchange is what follows backward."""

    def bucket(self, index: int, size: int, begin: int, launched: int, end: int) -> None:
        """Nanoseconds: when the bucket was full, when its exchange was under way, when it was over."""


class Strategy:
    """The base class. Its defaults are those of one process: nothing is exchanged."""

    gradient_scale: float = 1.0
    """What the local loss is multiplied by, so that the exchanged gradient is the sum over all samples (DDP averages over ranks)."""
    ranks_differ: ClassVar[bool] = False
    """Whether ranks hold different weights and optimizer states between two steps, so that a checkpoint must keep all of them."""
    divides_weights: ClassVar[bool] = False
    """Whether a rank keeps only its part of each weight and gradient."""
    works_with_zero: ClassVar[bool] = True
    """Whether every rank gets the same whole gradient, which ZeRO needs."""
    takes_group: ClassVar[bool] = False
    """Whether the constructor takes a process group as its last argument. In a group of one, only the wrapper's cost is left to measure."""

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        self.bare = model
        """The user's model, without a wrapper."""
        self.model: nn.Module = model
        """What the loop calls forward on."""
        self.placement = placement

    @classmethod
    def whole_steps(cls, placement: Placement) -> int:
        """After how many steps all that it does has been done once: only a multiple of them can be timed."""
        return 1

    # The step, in the order of the calls

    def no_exchange(self) -> AbstractContextManager[None]:
        """Around forward and backward of every micro batch but the last: gradients only accumulate."""
        return nullcontext()

    def exchange(self) -> None:
        """After the last backward of a step: exchange the gradients, if backward has not done so."""

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of the whole gradient, from that of the gradients this rank has. All ranks call it together."""
        return norm

    def after_step(self, number: int) -> None:
        """After the optimizer's step `number`, counted from 1."""

    # The optimizer

    def optimizer(self, make: Make) -> Optimizer:
        """The optimizer of what this rank updates; `make(parameters)` builds the recipe's."""
        parameters = [parameter for parameter in self.bare.parameters() if parameter.requires_grad]
        if self.placement.zero and self.placement.ranks > 1:
            from lockstep.strategies.zero import zero_optimizer

            return zero_optimizer(make, parameters)
        return make(parameters)

    # One model: evaluation, checkpoints, the end

    def consolidate(self) -> None:
        """Make the model whole and the same on all ranks: before an evaluation, a checkpoint and the end. All ranks call it together."""

    def resume_training(self) -> None:
        """Training goes on after `consolidate`."""

    def load_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Take over whole weights and buffers."""
        self.bare.load_state_dict(state)

    def whole(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """A tensor that is divided as parameter `index` of the optimizer is, put together. All ranks call it together."""
        return part

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps beside weights and optimizer. All ranks call it together."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what `state` gave, perhaps under another strategy or another number of ranks."""

    # What is measured

    def kept_bytes(self) -> int:
        """What it holds on this rank from step to step, beside the weights, to exchange them or their gradients."""
        return 0

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` about every bucket's exchange. Called before the first step."""

    def figures(self) -> dict[str, Any]:
        """What the strategy has counted itself, for the rank's summary."""
        return {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in vars(cls):
            if name.startswith("_") or hasattr(Strategy, name) or name in _OF_INSTANCES:
                continue
            near = difflib.get_close_matches(name, [*_hooks(), *_OF_INSTANCES], 1, 0.5)
            hint = f", did you mean '{near[0]}'" if near else f"; the hooks are {', '.join(_hooks())}"
            raise InputError(
                f"strategy {cls.__name__}: '{name}' is not a hook{hint}? A helper's name starts with an underscore"
            )


_OF_INSTANCES = ("bare", "model", "placement")


def _hooks() -> list[str]:
    return [name for name in vars(Strategy) if not name.startswith("_")]
