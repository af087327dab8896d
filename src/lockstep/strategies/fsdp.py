"""The strategy `fsdp`: PyTorch's `fully_shard` (FSDP2). Each rank keeps its part of every weight, gradient and optimizer state.

A unit's weights are put together just before it computes and let go afterwards; its gradients are added up and divided
at once. With `fsdp.replicas` ranks form groups that each divide the whole model, and only gradients go from group to group (HSDP).
The optimizer works on this rank's parts alone, which are ordinary tensors here, so that it needs to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.strategies.base import Strategy
from lockstep.strategies.flat import start_together, trained
from lockstep.strategies.optimizer import Make, State, numbers_of
from lockstep.strategies.sharded import ShardedOptimizer
from lockstep.strategies.units import Alike, check, units


class Fsdp(Strategy):
    """Ranks average, as DDP does; we want the sum, hence the scale."""

    divides_weights = True
    works_with_zero = False
    takes_group = True

    def __init__(
        self, model: nn.Module, placement: Placement, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, placement, device)
        check(model)
        self._group = group
        start_together(model, group)
        # With several passes a step, weights stay whole from the first to the last: ranks may differ in how many passes they
        # make of a partial batch, and could not gather weights together in each.
        self._gather_once = placement.micro_batch is not None or placement.accumulation not in (None, 1)
        mesh = _mesh(device, 1 if group else placement.fsdp.replicas, group)
        self._alike = Alike([*units(model), model], self._gather_once, group)
        self._sharded = _shard(model, mesh)
        self.model = Called(model)
        self._sharded.set_reshard_after_forward(not self._gather_once)
        self.gradient_scale = float(dist.get_world_size(group))
        self._rows = ByRows(trained(model), mesh)

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
        self._alike.ends(self._rows.take_gradients())

    def optimizer(self, make: Make) -> ShardedOptimizer:
        return ShardedOptimizer(make, self._rows, self._rows.parts)

    def consolidate(self) -> None:
        """Put all weights together, so that ranks can evaluate without waiting for each other; rank 0's statistics count."""
        self._alike.check()
        self._sharded.set_reshard_after_forward(False)
        for module in _sharded_modules(self.bare):
            module.unshard()
        for buffer in self.bare.buffers():
            dist.broadcast(buffer, group=self._group, group_src=0)

    def resume_training(self) -> None:
        for module in _sharded_modules(self.bare):
            module.reshard()
        self._sharded.set_reshard_after_forward(not self._gather_once)

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        squares = norm.square()
        dist.all_reduce(squares, group=self._rows.group)
        return squares.sqrt()

    def whole(self, index: int, part: torch.Tensor) -> torch.Tensor:
        return self._rows.whole(index, part)

    @torch.no_grad()
    def load_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Each rank takes its parts of whole weights, and the buffers as they are."""
        self.resume_training()
        for name, tensor in self.bare.state_dict().items():
            if hasattr(tensor, "to_local"):
                _local(tensor).copy_(self._rows.of(state[name]))
            else:
                tensor.copy_(state[name])


class Called(nn.Module):
    """The model as the loop calls it, with one line for what PyTorch says of weights that were not gathered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        try:
            return self.module(*inputs, **named)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
        raise InputError(
            "strategy=fsdp: forward uses the weights of a layer without calling the layer, which would gather them: "
            "call the layer, or choose strategy=ddp"
        )


class ByRows:
    """Each parameter is divided along its first dimension; each rank of a group has some rows of all of them."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Any) -> None:
        self._whole = parameters
        self.parts = [nn.Parameter(_local(parameter).detach()) for parameter in parameters]
        last = mesh.ndim - 1  # the dimension of the mesh along which weights are divided
        self.group: dist.ProcessGroup = mesh.get_group(last)
        self._place, self._places = mesh.get_local_rank(last), mesh.size(last)

    def take_gradients(self) -> tuple[bool, ...]:
        """Hand the divided gradients over to the parts, which are what the optimizer updates; returns which there are."""
        for parameter, part in zip(self._whole, self.parts, strict=True):
            part.grad = None if parameter.grad is None else _local(parameter.grad)
            parameter.grad = None
        return tuple(part.grad is not None for part in self.parts)

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
        return _each(state, lambda index, whole: self.of(whole))

    def whole(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """A tensor that is divided as parameter `index` is, whole on every rank. Collective."""
        from torch.distributed.tensor import DTensor

        like: Any = self._whole[index]
        shape = like.shape + part.shape[like.dim() :]  # an optimizer has pairs of real numbers for complex ones
        stride = torch.empty(shape, device="meta").stride()
        divided = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
        )
        whole: torch.Tensor = divided.full_tensor()
        return whole

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows. PyTorch divides the first dimension into equal parts; the last ones may be shorter, or empty."""
        rows = -(-whole.shape[0] // self._places)
        first = min(rows * self._place, whole.shape[0])
        return whole[first : first + rows]


def _each(state: State, change: Callable[[int, torch.Tensor], torch.Tensor]) -> State:
    """Change what belongs to a parameter's elements; single numbers, such as a count of steps, stay."""
    return {
        key: [
            change(index, value) if value.dim() else value
            for index, value in zip(numbers_of(state, len(values)), values, strict=True)
        ]
        for key, values in state.items()
    }


def _mesh(device: torch.device, replicas: int, group: dist.ProcessGroup | None) -> Any:
    """The ranks as PyTorch's mesh: one row of all, or a row for each replica. Neighbours share a row, which is most often a host."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if group is not None:
        return DeviceMesh.from_group(group, device.type)
    ranks = dist.get_world_size()
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _shard(model: nn.Module, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # PyTorch does not divide channels-last weights
    for unit in units(model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _local(divided: Any) -> torch.Tensor:
    part: torch.Tensor = divided.to_local()
    return part


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))
