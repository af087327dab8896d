"""Tensors as MPI sees them: an address, a count and a type, without a copy where the memory allows it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI

R = dist.ReduceOp

# What MPI can add up by itself. Half precision has no type there and is reduced in float32; bool is reduced as bytes.
REDUCIBLE: dict[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
REDUCED_AS = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.uint8}
# Moving needs no meaning, only a size.
MOVED: dict[int, MPI.Datatype] = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}

# The keys are ReduceOp objects, since torch's enumeration does not compare equal to them both ways round.
OPERATIONS: dict[Any, MPI.Op] = {
    R(R.SUM): MPI.SUM,
    R(R.AVG): MPI.SUM,
    R(R.PRODUCT): MPI.PROD,
    R(R.MIN): MPI.MIN,
    R(R.MAX): MPI.MAX,
    R(R.BAND): MPI.BAND,
    R(R.BOR): MPI.BOR,
    R(R.BXOR): MPI.BXOR,
}
# On truth values a sum is "any" and a product "all".
TRUTH: dict[Any, MPI.Op] = {R(R.SUM): MPI.MAX, R(R.PRODUCT): MPI.MIN}

Buffer = tuple[Any, Any, MPI.Datatype]
memory_at = MPI.memory.fromaddress


class Reduction(NamedTuple):
    """An operation on one kind of tensor, as MPI carries it out."""

    operation: MPI.Op
    average: bool


SUM = R.SUM
PLAIN_SUM = Reduction(MPI.SUM, average=False)


def reduction(operation: Any, dtype: torch.dtype) -> Reduction:
    """Raises where the operation means nothing for this kind of number."""
    if operation == SUM and dtype in REDUCIBLE:  # nearly always; looking it up below takes 5 µs
        return PLAIN_SUM
    found = OPERATIONS.get(operation)
    if found is None:
        raise ValueError(
            f"backend=mpi cannot reduce by {operation}: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR work"
        )
    average, bitwise = found is MPI.SUM and operation == R.AVG, found in (MPI.BAND, MPI.BOR, MPI.BXOR)
    if dtype not in REDUCIBLE and dtype not in REDUCED_AS:
        raise TypeError(f"backend=mpi cannot reduce tensors of {dtype}")
    if average and not dtype.is_floating_point:
        raise TypeError(f"backend=mpi: the average of {dtype} is no {dtype}: use SUM and divide")
    if bitwise and dtype.is_floating_point:
        raise TypeError(f"backend=mpi: {operation} works on integers, not on {dtype}")
    return Reduction(TRUTH.get(operation, found) if dtype is torch.bool else found, average)


def reducible(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where MPI can reduce it in place, else a copy that it can."""
    kind = REDUCED_AS.get(tensor.dtype)
    return (tensor if kind is None else tensor.to(kind)).contiguous()


def reduced(tensor: torch.Tensor, parts: int = 1) -> Buffer:
    """The buffer of a contiguous tensor whose numbers MPI is to reduce. MPI counts the part of one rank."""
    return memory_at(tensor.data_ptr(), tensor.nbytes), tensor.numel() // parts, REDUCIBLE[tensor.dtype]


def moved(tensor: torch.Tensor, parts: int = 1) -> Buffer:
    """The buffer of a contiguous tensor that is only moved. MPI counts the part of one rank."""
    return memory_at(tensor.data_ptr(), tensor.nbytes), tensor.numel() // parts, MOVED[tensor.element_size()]


def moved_unevenly(tensor: torch.Tensor, counts: list[int]) -> Buffer:
    return memory_at(tensor.data_ptr(), tensor.nbytes), counts, MOVED[tensor.element_size()]


def rows_to_counts(tensor: torch.Tensor, rows: list[int], ranks: int, what: str) -> list[int]:
    """Elements for each rank, from the rows that all_to_all_single is told, or equal parts where it is told nothing."""
    if not rows:
        if tensor.shape[0] % ranks:
            raise ValueError(f"{what}: {tensor.shape[0]} rows do not divide over {ranks} ranks")
        return [tensor.numel() // ranks] * ranks
    if len(rows) != ranks or sum(rows) != tensor.shape[0]:
        raise ValueError(f"{what}: split sizes {rows} do not fit {tensor.shape[0]} rows and {ranks} ranks")
    row = tensor.shape[1:].numel()
    return [count * row for count in rows]


def room_for(output: torch.Tensor) -> torch.Tensor:
    """Where MPI writes: the output itself, or contiguous room beside it."""
    return output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)


def spread(room: torch.Tensor, targets: list[torch.Tensor]) -> None:
    for target, row in zip(targets, room, strict=True):
        target.copy_(row)


def size_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def check_fits(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"backend=mpi: {what}: one tensor of the same size and type for each rank is needed")
