"""ZeRO-1: each rank keeps the optimizer's state of its own part of the parameters, and nothing of the others'.

All ranks have the whole gradient (some strategy has seen to that). Each updates its own parameters with it (`step`), then sends
them to the others (`exchange`). The optimizer works on each parameter by itself, so the result has the bits of the undivided one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lockstep.parallel.flat import Memory, by_type, copy

State = dict[str, list[torch.Tensor]]
# Optimizers that have state for some parameters only list their numbers under this name.
WHICH = "which"
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)


class Optimizer(Protocol):
    """What is divided: the members of `training.optimizers.Optimizer`, which this room must not import."""

    lr: float
    inertia: float

    def step(self) -> None: ...
    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


Make = Callable[[list[nn.Parameter]], Optimizer]


def build(make: Make, parameters: Sequence[nn.Parameter]) -> Zero:
    """`make` builds the optimizer that is divided. Call it after the ranks have joined."""
    return Zero(make, [parameter for parameter in parameters if parameter.requires_grad])


def divide(sizes: Sequence[int], parts: int) -> list[int]:
    """Which part each item belongs to: the largest first, always to the part that has least so far."""
    owners, loads = [0] * len(sizes), [0] * parts
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


class Zero:
    """An optimizer that is divided over the ranks; it has the members of `training.optimizers.Optimizer`."""

    def __init__(self, make: Make, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._owners = divide([parameter.numel() for parameter in parameters], self._ranks)
        self._mine = [index for index, owner in enumerate(self._owners) if owner == self._rank]
        self.own = make([parameters[index] for index in self._mine])
        """This rank's part."""
        self._messages = self._plan_messages() if self._ranks > 1 else []

    @property
    def lr(self) -> float:
        return self.own.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.own.lr = value

    @property
    def inertia(self) -> float:
        return self.own.inertia

    @inertia.setter
    def inertia(self, value: float) -> None:
        self.own.inertia = value

    def step(self) -> None:
        # Of a small part it may well be that nothing has a gradient, and the fused kernels take no empty lists.
        if any(self.parameters[index].grad is not None for index in self._mine):
            self.own.step()

    def exchange(self) -> None:
        """What belongs to every step, after it: each rank sends the weights that it has updated to the others."""
        if self._messages:
            self._send_weights()

    def state(self) -> State:
        """The whole state, as the undivided optimizer has it, on every rank. All ranks must call it together."""
        return self._gather(self.own.state()) if self._ranks > 1 else self.own.state()

    def load_state(self, state: State) -> None:
        """Keep this rank's part of a whole state, whoever made it."""
        listed = [int(number) for number in state[WHICH]] if WHICH in state else range(len(self.parameters))
        place = {index: position for position, index in enumerate(listed)}
        present = [index for index in self._mine if index in place]
        # A list may be empty: RMSprop without momentum has no speeds.
        mine = {
            key: [values[place[i]] for i in present] if values else [] for key, values in state.items() if key != WHICH
        }
        if WHICH in state:
            mine[WHICH] = [torch.tensor(self._mine.index(index)) for index in present]
        self.own.load_state(mine)

    def _plan_messages(self) -> list[tuple[int, list[nn.Parameter], Memory]]:
        """One message for each owner (and type of number): all its weights, end to end."""
        plan = []
        for owner in range(self._ranks):
            owned = [p for p, whose in zip(self.parameters, self._owners, strict=True) if whose == owner]
            plan += [(owner, group, Memory(group, group[0].device)) for group in by_type(owned)]
        return plan

    @torch.no_grad()
    def _send_weights(self) -> None:
        works: list[Any] = []
        for owner, parameters, memory in self._messages:
            if owner == self._rank:
                copy(memory.views, parameters)
            works.append(dist.broadcast(memory.row, owner, async_op=True))
        for work, (owner, parameters, memory) in zip(works, self._messages, strict=True):
            work.wait()
            if owner != self._rank:
                copy(parameters, memory.views)

    def _gather(self, mine: State) -> State:
        keys = sorted(key for key in mine if key != WHICH)
        kinds = self._kinds(mine, keys)
        whole: dict[str, dict[int, torch.Tensor]] = {key: {} for key in keys}
        own = {key: self._by_parameter(mine, key) for key in keys}
        for index, owner in enumerate(self._owners):
            for position, key in enumerate(keys):
                kind = int(kinds[position, index])
                if kind:
                    mine_too = owner == self._rank
                    tensor = own[key][index] if mine_too else self._empty(kind, index)
                    whole[key][index] = _sent(tensor, owner, mine_too)
        found: State = {key: [values[index] for index in sorted(values)] for key, values in whole.items()}
        if WHICH in mine:
            some = sorted({index for values in whole.values() for index in values})
            found[WHICH] = [torch.tensor(index) for index in some]
        return found

    def _by_parameter(self, mine: State, key: str) -> dict[int, torch.Tensor]:
        """This rank's tensors of one key by the number of their parameter in the whole list."""
        places = [int(number) for number in mine[WHICH]] if WHICH in mine else range(len(mine[key]))
        return {self._mine[place]: tensor for place, tensor in zip(places, mine[key], strict=True)}

    def _kinds(self, mine: State, keys: list[str]) -> torch.Tensor:
        """What each parameter has under each key, over all ranks: nothing (0), or its type and whether it is one number."""
        kinds = torch.zeros(len(keys), len(self.parameters), dtype=torch.int64, device=self.parameters[0].device)
        for position, key in enumerate(keys):
            for index, tensor in self._by_parameter(mine, key).items():
                kinds[position, index] = 1 + 2 * _TYPES.index(tensor.dtype) + (tensor.dim() == 0)
        dist.all_reduce(kinds)
        return kinds.cpu()

    def _empty(self, kind: int, index: int) -> torch.Tensor:
        code, single = divmod(kind - 1, 2)
        like = self.parameters[index]
        dtype = _TYPES[code]
        return (
            torch.empty((), dtype=dtype, device=like.device) if single else torch.empty_like(like, dtype=dtype).detach()
        )


def _sent(tensor: torch.Tensor, owner: int, mine: bool) -> torch.Tensor:
    """The owner's tensor on every rank. It travels in a row of its own, so that it may lie in memory as it likes."""
    row = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    if mine:
        row.view(tensor.shape).copy_(tensor.detach())
    dist.broadcast(row, owner)
    return tensor if mine else tensor.copy_(row.view(tensor.shape))
