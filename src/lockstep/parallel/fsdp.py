"""The strategy `fsdp`: PyTorch's `fully_shard`. Each rank keeps its part of every weight, gradient and optimizer state.

A layer's weights are put together just before it computes and let go afterwards; its gradients are added up and divided
at once. The optimizer works on this rank's parts alone, which are ordinary tensors here, so that it needs to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import InputError
from lockstep.parallel.flat import start_together, trained
from lockstep.parallel.zero import WHICH, Make, State
from lockstep.placement import Placement


class Fsdp:
    """Ranks average, as DDP does; we want the sum, hence the scale."""

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        if placement.ranks == 1:
            raise InputError(
                "strategy=fsdp divides the weights over ranks, and there is one: add ranks=2, or leave strategy out"
            )
        start_together(model)
        # With several passes a step, weights stay whole from the first to the last: ranks may differ in how many passes they
        # make of a partial batch, and could not gather weights together in each.
        self._gather_once = placement.micro_batch is not None or placement.accumulation not in (None, 1)
        self.model = _shard(model, placement.ranks, device)
        self.model.set_reshard_after_forward(not self._gather_once)
        self.gradient_scale = float(placement.ranks)
        self._whole = trained(model)
        self.parts = [nn.Parameter(_local(parameter).detach()) for parameter in self._whole]
        self.exchange: Callable[[], None] | None = self._hand_over

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        self.model.set_reshard_after_backward(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)
            self.model.set_reshard_after_backward(True)

    def optimizer(self, make: Make) -> Sharded:
        """An optimizer of this rank's parts."""
        return Sharded(make, self)

    def settle(self) -> None:
        """Put all weights together, so that ranks can evaluate without waiting for each other; rank 0's statistics count."""
        self.model.set_reshard_after_forward(False)
        for module in _sharded_modules(self.model):
            module.unshard()
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def restore(self) -> None:
        for module in _sharded_modules(self.model):
            module.reshard()
        self.model.set_reshard_after_forward(not self._gather_once)

    def whole_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients, from that of this rank's parts. All ranks call it together."""
        squares = norm.square()
        dist.all_reduce(squares)
        return squares.sqrt()

    def together(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """A tensor that is divided as parameter `index` is, whole on every rank. All ranks call it together."""
        from torch.distributed.tensor import DTensor

        like: Any = self._whole[index]
        shape, stride = like.shape, like.stride()
        divided = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
        )
        whole: torch.Tensor = divided.full_tensor()
        return whole

    def part_of(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that is to be divided as parameter `index` is."""
        part = _rows_of(whole)
        assert part.shape == self.parts[index].shape
        return part

    @torch.no_grad()
    def load_whole(self, state: dict[str, torch.Tensor]) -> None:
        """Each rank takes its parts of whole weights, and the buffers as they are."""
        self.restore()
        for name, tensor in self.model.state_dict().items():
            if hasattr(tensor, "to_local"):
                _local(tensor).copy_(_rows_of(state[name]))
            else:
                tensor.copy_(state[name])

    def _hand_over(self) -> None:
        """Backward has exchanged the gradients; give each part its own."""
        for parameter, part in zip(self._whole, self.parts, strict=True):
            part.grad = None if parameter.grad is None else _local(parameter.grad)
            parameter.grad = None


class Sharded:
    """An optimizer over this rank's parts of all parameters; its state goes into a checkpoint whole."""

    def __init__(self, make: Make, fsdp: Fsdp) -> None:
        self.parameters, self._fsdp = fsdp.parts, fsdp
        self._own = make(fsdp.parts)

    @property
    def lr(self) -> float:
        return self._own.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._own.lr = value

    @property
    def inertia(self) -> float:
        return self._own.inertia

    @inertia.setter
    def inertia(self, value: float) -> None:
        self._own.inertia = value

    def step(self) -> None:
        self._own.step()

    def state(self) -> State:
        """As an undivided optimizer has it, on every rank. All ranks call it together."""
        return _each(self._own.state(), self._fsdp.together)

    def load_state(self, state: State) -> None:
        self._own.load_state(_each(state, self._fsdp.part_of))


def _each(state: State, change: Callable[[int, torch.Tensor], torch.Tensor]) -> State:
    """Change what belongs to a parameter's elements; single numbers, such as a count of steps, stay."""
    numbers = [int(number) for number in state[WHICH]] if WHICH in state else None
    return {
        key: [
            change(numbers[at] if numbers else at, value) if value.dim() else value for at, value in enumerate(values)
        ]
        for key, values in state.items()
    }


def _shard(model: nn.Module, ranks: int, device: torch.device) -> Any:
    """Each child by itself, so that only one is whole at a time; the model as one where children share weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # PyTorch does not divide channels-last weights
    mesh = init_device_mesh(device.type, (ranks,))
    named = sum(len(list(child.parameters())) for child in model.children())
    if named == len({id(p) for child in model.children() for p in child.parameters()}):
        for child in model.children():
            if next(child.parameters(), None) is not None:
                fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _rows_of(whole: torch.Tensor) -> torch.Tensor:
    """PyTorch divides the first dimension into equal parts; the last ones may be shorter, or empty."""
    rows = -(-whole.shape[0] // dist.get_world_size())
    first = min(rows * dist.get_rank(), whole.shape[0])
    return whole[first : first + rows]


def _local(divided: Any) -> torch.Tensor:
    part: torch.Tensor = divided.to_local()
    return part


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))
