"""The strategy `flat`: all gradients in one buffer, exchanged by one all-reduce after backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lockstep.placement import Placement
from lockstep.strategies.base import Strategy
from lockstep.torch_private import ddp_ignored, foreach_copy_

T = TypeVar("T", bound=torch.Tensor)


class Flat(Strategy):
    """One buffer per type of gradient; after the exchange every `p.grad` is a view into it.

    Nothing overlaps with backward, but there is one message a step and nothing to keep track of: for small models the
    least that an exchange can cost. Like DDP, it starts from rank 0's weights and keeps rank 0's buffers.
    """

    takes_group = True

    def __init__(
        self, model: nn.Module, placement: Placement, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, placement, device)
        self._group = group
        self._buckets: list[Bucket] = []
        self._buffers: list[torch.Tensor] = []
        if placement.ranks == 1:
            return
        self._buckets = [Bucket(parameters, device, group) for parameters in self._divide(trained(model))]
        # What DDP is told to leave alone (statistics that `layers.average_statistics` puts together) is left alone here too.
        own = set(ddp_ignored(model))
        self._buffers = [buffer for name, buffer in model.named_buffers() if name not in own]
        start_together(model, group)

    def _divide(self, parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
        """Which parameters share a bucket."""
        return by_type(parameters)

    def kept_bytes(self) -> int:
        return sum(bucket.kept_bytes for bucket in self._buckets)

    def exchange(self) -> None:
        """Gradients are added up, not averaged, so the loss needs no scale."""
        for bucket in self._buckets:
            bucket.exchange()
        for buffer in self._buffers:
            dist.broadcast(buffer, group=self._group, group_src=0)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def start_together(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """The first rank's weights and buffers on every rank of the group."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def by_type(tensors: Iterable[T]) -> list[list[T]]:
    found: dict[torch.dtype, list[T]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


class Memory:
    """One row that holds tensors of one type end to end, and a view into it for each; `more` numbers follow them."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device, more: int = 0) -> None:
        count = sum(tensor.numel() for tensor in tensors)
        self.row = torch.zeros(count + more, dtype=tensors[0].dtype, device=device)
        self.more = self.row[count:]
        self.views = []
        start = 0
        for tensor in tensors:
            self.views.append(_like(tensor, self.row[start : start + tensor.numel()]))
            start += tensor.numel()


def copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """All of them in one call."""
    foreach_copy_(list(into), list(values))


class Bucket:
    """The gradients of one type, and behind them one number for each: whether this rank has it."""

    def __init__(self, parameters: list[nn.Parameter], device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._parameters, self._group = parameters, group
        self._memory = Memory(parameters, device, more=len(parameters))
        self.kept_bytes = self._memory.row.nbytes

    @torch.no_grad()
    def exchange(self) -> None:
        memory = self._memory
        gradients = [parameter.grad for parameter in self._parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        memory.more.fill_(1)
        if len(present) == len(gradients):
            foreach_copy_(memory.views, present)
            dist.all_reduce(memory.row, group=self._group)
            for parameter, view in zip(self._parameters, memory.views, strict=True):
                parameter.grad = view
            return
        self._exchange_some(gradients)

    def _exchange_some(self, gradients: list[torch.Tensor | None]) -> None:
        """A gradient that no rank has stays away, as it would with one process: the optimizer passes it over."""
        memory = self._memory
        for index, (gradient, view) in enumerate(zip(gradients, memory.views, strict=True)):
            if gradient is None:
                view.zero_()
                memory.more[index] = 0
            else:
                view.copy_(gradient)
        dist.all_reduce(memory.row, group=self._group)
        for parameter, view, given in zip(self._parameters, memory.views, memory.more.tolist(), strict=True):
            parameter.grad = view if given else None


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The memory in the tensor's own order of strides, which the optimizer's fused kernel relies on."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return memory.as_strided(tensor.shape, strides, memory.storage_offset())
