"""What the training step and the strategies need of an optimizer. training/optimizers.py has the recipes' own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

State = dict[str, list[torch.Tensor]]
"""An optimizer's state: under each name one tensor for each parameter, in the order of the parameters."""
WHICH = "which"
"""Where only some parameters have a state yet, their numbers stand under this name."""


def numbers_of(state: State, count: int) -> Sequence[int]:
    """The numbers of the parameters that have a state: those listed, or all of `count`."""
    return [int(number) for number in state[WHICH]] if WHICH in state else range(count)


class Optimizer(ABC):
    """The base class of optimizers."""

    parameters: list[nn.Parameter]
    lr: float
    momentum: float
    """SGD's and RMSprop's momentum, or Adam's beta1: what a one-cycle schedule moves beside the learning rate."""

    @abstractmethod
    def step(self) -> None:
        """Update the parameters from their gradients."""

    def exchange(self) -> None:  # noqa: B027 (most have nothing to do here)
        """After `step`: send what this rank has updated to the others. An optimizer that is not divided has nothing to send."""

    @abstractmethod
    def state(self) -> State:
        """What a checkpoint must keep to go on from here. Collective where the optimizer is divided over the ranks."""

    def kept_bytes(self) -> int:
        """What of it this rank holds."""
        return sum(tensor.nbytes for tensors in self.state().values() for tensor in tensors)

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        """Go on from what `state` gave. By default into the tensors that it gives now."""
        for name, tensors in self.state().items():
            for tensor, value in zip(tensors, state[name], strict=True):
                tensor.copy_(value)


Make = Callable[[list[nn.Parameter]], Optimizer]
