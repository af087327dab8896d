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

from lockstep.placement import Placement
from lockstep.strategies.base import Strategy
from lockstep.strategies.flat import start_together, trained
from lockstep.strategies.optimizer import Make, State, numbers_of
from lockstep.strategies.sharded import ShardedOptimizer


class Fsdp(Strategy):
    """Ranks average, as DDP does; we want the sum, hence the scale."""

    divides_weights = True
    works_with_zero = False
    takes_group = True

    def __init__(
        self, model: nn.Module, placement: Placement, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, placement, device)
        self._group = group
        start_together(model, group)
        # With several passes a step, weights stay whole from the first to the last: ranks may differ in how many passes they
        # make of a partial batch, and could not gather weights together in each.
        self._gather_once = placement.micro_batch is not None or placement.accumulation not in (None, 1)
        self._sharded = _shard(model, device, group)
        self._sharded.set_reshard_after_forward(not self._gather_once)
        self.gradient_scale = float(dist.get_world_size(group))
        self._rows = ByRows(trained(model))

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        self._sharded.set_requires_gradient_sync(False)
        self._sharded.set_reshard_after_backward(False)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)
            self._sharded.set_reshard_after_backward(True)

    def exchange(self) -> None:
        """Backward has exchanged the gradients; give each part its own."""
        self._rows.take_gradients()

    def optimizer(self, make: Make) -> ShardedOptimizer:
        return ShardedOptimizer(make, self._rows, self._rows.parts)

    def consolidate(self) -> None:
        """Put all weights together, so that ranks can evaluate without waiting for each other; rank 0's statistics count."""
        self._sharded.set_reshard_after_forward(False)
        for module in _sharded_modules(self.model):
            module.unshard()
        for buffer in self.model.buffers():
            dist.broadcast(buffer, group=self._group, group_src=0)

    def resume_training(self) -> None:
        for module in _sharded_modules(self.model):
            module.reshard()
        self._sharded.set_reshard_after_forward(not self._gather_once)

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        squares = norm.square()
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt()

    def whole(self, index: int, part: torch.Tensor) -> torch.Tensor:
        return self._rows.whole(index, part)

    @torch.no_grad()
    def load_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Each rank takes its parts of whole weights, and the buffers as they are."""
        self.resume_training()
        for name, tensor in self.model.state_dict().items():
            if hasattr(tensor, "to_local"):
                _local(tensor).copy_(_rows_of(state[name]))
            else:
                tensor.copy_(state[name])


class ByRows:
    """Each parameter is divided along its first dimension; each rank has some rows of all of them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._whole = parameters
        self.parts = [nn.Parameter(_local(parameter).detach()) for parameter in parameters]

    def take_gradients(self) -> None:
        """Hand the divided gradients over to the parts, which are what the optimizer updates."""
        for parameter, part in zip(self._whole, self.parts, strict=True):
            part.grad = None if parameter.grad is None else _local(parameter.grad)
            parameter.grad = None

    def local(self) -> list[nn.Parameter]:
        return self.parts

    def exchange(self) -> None:
        """Nothing: each rank needs only its own rows until the next forward puts them together."""

    def kept_bytes(self) -> int:
        """The parts are the parameters' own memory."""
        return 0

    def gather(self, state: State) -> State:
        return _each(state, self.whole)

    def part(self, state: State) -> State:
        return _each(state, self._rows_of)

    def whole(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """A tensor that is divided as parameter `index` is, whole on every rank. Collective."""
        from torch.distributed.tensor import DTensor

        like: Any = self._whole[index]
        shape, stride = like.shape, like.stride()
        divided = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
        )
        whole: torch.Tensor = divided.full_tensor()
        return whole

    def _rows_of(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        part = _rows_of(whole)
        assert part.shape == self.parts[index].shape
        return part


def _each(state: State, change: Callable[[int, torch.Tensor], torch.Tensor]) -> State:
    """Change what belongs to a parameter's elements; single numbers, such as a count of steps, stay."""
    return {
        key: [
            change(index, value) if value.dim() else value
            for index, value in zip(numbers_of(state, len(values)), values, strict=True)
        ]
        for key, values in state.items()
    }


def _shard(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> Any:
    """Each child by itself, so that only one is whole at a time; the model as one where children share weights."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # PyTorch does not divide channels-last weights
    mesh = (
        init_device_mesh(device.type, (dist.get_world_size(),))
        if group is None
        else DeviceMesh.from_group(group, device.type)
    )
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
