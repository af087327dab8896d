"""What ranks must agree on when they call a collective, as numbers that are the same in every process."""

from __future__ import annotations

import torch

TYPE_NUMBERS = {
    dtype: number
    for number, dtype in enumerate(
        sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
    )
}
KINDS = {
    name: number
    for number, name in enumerate(
        (
            "all_gather",
            "all_reduce",
            "all_to_all",
            "barrier",
            "broadcast",
            "gather",
            "reduce",
            "reduce_scatter",
            "scatter",
        )
    )
}


def signature(what: str, dtype: torch.dtype, count: int, operation: int = 0, root: int = 0) -> int:
    """31 bits of all of it. Two calls that differ have the same bits once in two thousand million."""
    return hash((KINDS[what], TYPE_NUMBERS[dtype], count, operation, root)) & 0x7FFFFFFF
