"""Putting the ranks' numbers together, always in the order of ranks: every rank gets the same bits, and so does every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp

Combine = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""Writes the combination of the parts into a tensor that may be one of neither."""


@dataclass(frozen=True)
class Operation:
    name: str
    function: Callable[..., torch.Tensor]
    average: bool = False
    """Whether the outcome is divided by the number of ranks."""


# By the operation's number, which is the hash of the ReduceOp of the options and of the enumeration alike. The options
# hold an object that is neither equal to the enumeration's in a dict nor cheap to compare.
OPERATIONS: dict[int, Operation] = {
    hash(ReduceOp.SUM): Operation("sum", torch.add),
    hash(ReduceOp.AVG): Operation("avg", torch.add, average=True),
    hash(ReduceOp.PRODUCT): Operation("product", torch.mul),
    hash(ReduceOp.MIN): Operation("min", torch.minimum),
    hash(ReduceOp.MAX): Operation("max", torch.maximum),
    hash(ReduceOp.BAND): Operation("band", torch.bitwise_and),
    hash(ReduceOp.BOR): Operation("bor", torch.bitwise_or),
    hash(ReduceOp.BXOR): Operation("bxor", torch.bitwise_xor),
}
SUM = hash(ReduceOp.SUM)
if len(OPERATIONS) != 8:
    raise ImportError("this version of torch does not number its ReduceOps by their hash")


def operation_of(op: object) -> int:
    """The key of OPERATIONS for a ReduceOp."""
    number = hash(op)
    if number not in OPERATIONS:
        raise RuntimeError(f"backend shm has no reduction {op}: use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")
    return number


def combiner(number: int, dtype: torch.dtype, parts: int) -> Combine:
    """How `parts` tensors of a type become one. Types shorter than 32 bits are added up in float32 and rounded once."""
    operation = OPERATIONS[number]
    function, average = operation.function, operation.average
    if average and dtype is torch.bool:
        raise RuntimeError("backend shm has no average of bool: use SUM, which is 'or'")

    def short(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        total = tensors[0].to(torch.float32)
        for tensor in tensors[1:]:
            function(total, tensor.to(torch.float32), out=total)
        out.copy_(total.div_(parts) if average else total)

    def plain(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if parts == 1:
            out.copy_(tensors[0])
        else:
            function(tensors[0], tensors[1], out=out)
        for tensor in tensors[2:]:
            function(out, tensor, out=out)
        if average:
            divide(out, parts)

    def pair(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        function(tensors[0], tensors[1], out=out)

    if dtype.is_floating_point and dtype.itemsize < 4 and (parts != 2 or average or dtype.itemsize < 2):
        return short
    # The sum of two short numbers is rounded once by itself.
    return pair if parts == 2 and not average else plain


def wider(dtype: torch.dtype) -> torch.dtype:
    """The type for a sum over hosts: gloo does not know int16 and bool, and rounds short floats after every addition."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return torch.int32 if dtype in (torch.int16, torch.bool) else dtype


def divide(total: torch.Tensor, parts: int) -> None:
    """A sum becomes an average; of integers the whole part, as they have no other."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(parts)
    else:
        total.div_(parts, rounding_mode="trunc")
