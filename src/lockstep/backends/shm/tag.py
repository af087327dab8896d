"""What an operation is, as one number that each rank posts with it: ranks that mean different ones are told so."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.backends.shm.reduce import OPERATIONS
from lockstep.backends.signature import TYPE_NUMBERS

BARRIER, REDUCE, BROADCAST, GATHER, SCATTER = range(1, 6)
_NAMES = {BARRIER: "barrier", REDUCE: "reduce", BROADCAST: "broadcast", GATHER: "gather", SCATTER: "reduce_scatter"}
_TYPES = {number: str(dtype).removeprefix("torch.") for dtype, number in TYPE_NUMBERS.items()}


def tag_of(kind: int, operation: int, dtype: torch.dtype, count: int, root: int) -> int:
    """`root` counts from 1, and 0 stands for all."""
    return kind | operation << 4 | TYPE_NUMBERS[dtype] << 8 | root << 16 | count << 32


def described(tag: int, names: Sequence[int]) -> str:
    """In words, with `names` for the ranks of this host."""
    kind, operation, dtype, root, count = tag & 0xF, tag >> 4 & 0xF, tag >> 8 & 0xFF, tag >> 16 & 0xFFFF, tag >> 32
    if kind == BARRIER:
        return "barrier"
    name = _NAMES[kind] if root or kind not in (REDUCE, GATHER) else f"all_{_NAMES[kind]}"
    reduction = f" ({OPERATIONS[operation].name})" if kind in (REDUCE, SCATTER) else ""
    return f"{name}{reduction} of {count} {_TYPES[dtype]}" + (f" with root {names[root - 1]}" if root else "")
