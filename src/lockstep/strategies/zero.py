"""ZeRO-1: each rank keeps the optimizer's state of its own part of the parameters, and nothing of the others'.

All ranks have the whole gradient (some strategy has seen to that). Each updates its own parameters with it (`step`), then sends
them to the others (`exchange`). The optimizer works on each parameter by itself, so the result has the bits of the undivided one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.strategies.flat import Memory, by_type, copy
from lockstep.strategies.optimizer import WHICH, Make, State, numbers_of
from lockstep.strategies.sharded import ShardedOptimizer

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)


def zero_optimizer(make: Make, parameters: list[nn.Parameter]) -> ShardedOptimizer:
    """`make` builds the optimizer that is divided. Call it after the ranks have joined."""
    return ShardedOptimizer(make, ByOwner(parameters), parameters)


def divide(sizes: Sequence[int], parts: int) -> list[int]:
    """Which part each item belongs to: the largest first, always to the part that has least so far."""
    owners, loads = [0] * len(sizes), [0] * parts
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


class ByOwner:
    """Each parameter belongs to one rank, which updates it and sends it to the others."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._owners = divide([parameter.numel() for parameter in parameters], self._ranks)
        self._mine = [index for index, owner in enumerate(self._owners) if owner == self._rank]
        self._messages = self._plan_messages() if self._ranks > 1 else []

    def local(self) -> list[nn.Parameter]:
        return [self.parameters[index] for index in self._mine]

    def kept_bytes(self) -> int:
        return sum(memory.row.nbytes for _, _, memory in self._messages)

    def part(self, state: State) -> State:
        place = {index: position for position, index in enumerate(numbers_of(state, len(self.parameters)))}
        present = [index for index in self._mine if index in place]
        # A list may be empty: RMSprop without momentum has no momentum buffers.
        mine = {
            key: [values[place[i]] for i in present] if values else [] for key, values in state.items() if key != WHICH
        }
        if WHICH in state:
            mine[WHICH] = [torch.tensor(self._mine.index(index)) for index in present]
        return mine

    def _plan_messages(self) -> list[tuple[int, list[nn.Parameter], Memory]]:
        """One message for each owner (and type of number): all its weights, end to end."""
        plan = []
        for owner in range(self._ranks):
            owned = [p for p, whose in zip(self.parameters, self._owners, strict=True) if whose == owner]
            plan += [(owner, group, Memory(group, group[0].device)) for group in by_type(owned)]
        return plan

    @torch.no_grad()
    def exchange(self) -> None:
        works: list[Any] = []
        for owner, parameters, memory in self._messages:
            if owner == self._rank:
                copy(memory.views, parameters)
            works.append(dist.broadcast(memory.row, owner, async_op=True))
        for work, (owner, parameters, memory) in zip(works, self._messages, strict=True):
            work.wait()
            if owner != self._rank:
                copy(parameters, memory.views)

    def gather(self, mine: State) -> State:
        if self._ranks == 1:
            return mine
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
        places = numbers_of(mine, len(mine[key]))
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
        like = self.parameters[index].detach()
        like = torch.view_as_real(like) if like.is_complex() else like  # the state is of pairs of real numbers
        dtype = _TYPES[code]
        return torch.empty((), dtype=dtype, device=like.device) if single else torch.empty_like(like, dtype=dtype)


def _sent(tensor: torch.Tensor, owner: int, mine: bool) -> torch.Tensor:
    """The owner's tensor on every rank. It travels in a row of its own, so that it may lie in memory as it likes."""
    row = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    if mine:
        row.view(tensor.shape).copy_(tensor.detach())
    dist.broadcast(row, owner)
    return tensor if mine else tensor.copy_(row.view(tensor.shape))
