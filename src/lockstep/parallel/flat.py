"""The strategy `flat`: all gradients in one buffer, exchanged by one all-reduce after backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from lockstep.placement import Placement


class Flat:
    """One buffer per type of gradient; after the exchange every `p.grad` is a view into it.

    Nothing overlaps with backward, but there is one message a step and nothing to keep track of: for small models the
    least that an exchange can cost. Like DDP, it starts from rank 0's weights and keeps rank 0's buffers.
    """

    exchange: Callable[[], None] | None = None

    def __init__(
        self, model: nn.Module, placement: Placement, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self.model, self._group = model, group
        self.gradient_scale = 1.0  # the ranks' gradients are added up, not averaged
        if placement.ranks == 1:
            return
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                by_type.setdefault(parameter.dtype, []).append(parameter)
        self._buckets = [_Bucket(parameters, device, group) for parameters in by_type.values()]
        self._buffers = list(model.buffers())
        for tensor in (*model.parameters(), *self._buffers):
            dist.broadcast(tensor.detach(), 0, group)
        self.exchange = self._exchange

    def no_exchange(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _exchange(self) -> None:
        for bucket in self._buckets:
            bucket.exchange()
        for buffer in self._buffers:
            dist.broadcast(buffer, 0, self._group)


class _Bucket:
    """The gradients of one type, end to end, and behind them one number for each: whether this rank has it."""

    def __init__(self, parameters: list[nn.Parameter], device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._parameters, self._group = parameters, group
        count = sum(parameter.numel() for parameter in parameters)
        self._memory = torch.zeros(count + len(parameters), dtype=parameters[0].dtype, device=device)
        self._given = self._memory[count:]
        self._views = []
        start = 0
        for parameter in parameters:
            self._views.append(_like(parameter, self._memory[start : start + parameter.numel()]))
            start += parameter.numel()

    @torch.no_grad()
    def exchange(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        self._given.fill_(1)
        if len(present) == len(gradients):
            torch._foreach_copy_(self._views, present)
            dist.all_reduce(self._memory, group=self._group)
            for parameter, view in zip(self._parameters, self._views, strict=True):
                parameter.grad = view
            return
        self._exchange_some(gradients)

    def _exchange_some(self, gradients: list[torch.Tensor | None]) -> None:
        """A gradient that no rank has stays away, as it would with one process: the optimizer passes it over."""
        for index, (gradient, view) in enumerate(zip(gradients, self._views, strict=True)):
            if gradient is None:
                view.zero_()
                self._given[index] = 0
            else:
                view.copy_(gradient)
        dist.all_reduce(self._memory, group=self._group)
        for parameter, view, given in zip(self._parameters, self._views, self._given.tolist(), strict=True):
            parameter.grad = view if given else None


def _like(parameter: nn.Parameter, memory: torch.Tensor) -> torch.Tensor:
    """The memory in the parameter's own order of strides, which the optimizer's fused kernel relies on."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return memory.as_strided(parameter.shape, strides, memory.storage_offset())
