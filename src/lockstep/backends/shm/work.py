"""What a collective of the shm backend gives back, and what it makes of the tensors that it is given."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from lockstep.backends.python_group import Tensors
from lockstep.torch_private import untraced


@untraced
class Received(Work):
    """A receipt that gloo makes into contiguous memory, put into place when it is there."""

    def __init__(self, work: Work, buffer: torch.Tensor, tensor: torch.Tensor) -> None:
        super().__init__()
        self._work, self._buffer, self._tensor = work, buffer, tensor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._work.wait(timeout) if timeout else self._work.wait()
        self._tensor.copy_(self._buffer)
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def source_rank(self) -> int:
        return self._work.source_rank()

    _source_rank = source_rank


def listed(tensors: Any) -> Tensors:
    if type(tensors) is list:  # nearly always; asking whether something is a Tensor takes longer
        return tensors
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as one row where it is contiguous, a copy where not; without a gradient's history."""
    if not tensor.is_cpu:
        raise RuntimeError(f"backend shm exchanges CPU tensors, not {tensor.device.type}: choose backend=nccl")
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.contiguous().view(-1)


def put_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def bytes_of(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def parts_of(flat: torch.Tensor, count: int) -> Tensors:
    """Equal parts of a flat tensor, in order."""
    if flat.numel() % count:
        raise ValueError(f"{flat.numel()} elements do not divide by {count} ranks")
    return list(flat.view(count, flat.numel() // count).unbind())


def rows_of(tensor: torch.Tensor, splits: list[int] | None, count: int) -> Tensors:
    """The parts of a tensor by its first dimension."""
    if splits:
        return list(torch.split(tensor, splits))
    if tensor.shape[0] % count:
        raise ValueError(f"a first dimension of {tensor.shape[0]} does not divide by {count} ranks")
    return list(torch.split(tensor, tensor.shape[0] // count)) if tensor.shape[0] else [tensor] * count
