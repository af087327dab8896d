"""An optimizer that is divided over the ranks: one class for ZeRO, which divides the list of parameters, and FSDP, which divides each of them."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from lockstep.strategies.optimizer import Make, Optimizer, State


class Sharding(Protocol):
    """How parameters and their optimizer states are divided over the ranks."""

    def local(self) -> list[nn.Parameter]:
        """What this rank updates."""

    def gather(self, state: State) -> State:
        """The whole state, as an undivided optimizer has it, from every rank's part. Collective."""

    def part(self, state: State) -> State:
        """This rank's part of a whole state."""

    def exchange(self) -> None:
        """Send what this rank has updated to the others."""

    def kept_bytes(self) -> int:
        """What it holds on this rank for that."""


class ShardedOptimizer(Optimizer):
    """Each rank keeps the optimizer state of its own part only. Checkpoints hold the whole state, so any number of ranks can go on from one."""

    def __init__(self, make: Make, sharding: Sharding, parameters: list[nn.Parameter]) -> None:
        """`parameters`: whose gradients are clipped, penalized and dropped on this rank."""
        self.parameters, self._sharding = parameters, sharding
        self.inner = make(sharding.local())

    @property
    def lr(self) -> float:
        return self.inner.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.inner.lr = value

    @property
    def momentum(self) -> float:
        return self.inner.momentum

    @momentum.setter
    def momentum(self, value: float) -> None:
        self.inner.momentum = value

    def step(self) -> None:
        # A small part may have no gradient at all, and the fused kernels take no empty lists.
        if any(parameter.grad is not None for parameter in self.inner.parameters):
            self.inner.step()

    def exchange(self) -> None:
        self._sharding.exchange()

    def state(self) -> State:
        return self._sharding.gather(self.inner.state())

    def kept_bytes(self) -> int:
        return self.inner.kept_bytes() + self._sharding.kept_bytes()

    def load_state(self, state: State) -> None:
        self.inner.load_state(self._sharding.part(state))
