"""Tensors made small enough to write down: their bits as a digest, and their values as a sketch that adds up as they do.

A sketch has at most `size` numbers. A tensor that has no more is its own sketch; a larger one is cut into rows of that length, which are added up
with random signs. That is linear: the sketch of a sum is the sum of the sketches, so what an exchange does to gradients can be checked on it.
Only torch is used, and none of its global random numbers.
"""

from __future__ import annotations

import sys
from ctypes import string_at
from hashlib import blake2b
from typing import Any

# Rows of a large tensor are added up in parts, so that no copy in float64 is larger than this many entries.
PART = 1 << 22
DIGEST = 8  # bytes


def _torch() -> Any:
    return sys.modules["torch"]


def plain(tensor: Any) -> Any:
    """Dense, real and without a graph, wherever it is. Of a sharded tensor, what this rank has."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout != _torch().strided:
        tensor = tensor.to_dense()
    return _torch().view_as_real(tensor) if tensor.is_complex() else tensor


def content(tensor: Any) -> bytes:
    """The bytes of a tensor. numpy may not be there."""
    held = plain(tensor).cpu().contiguous()
    return string_at(held.data_ptr(), held.numel() * held.element_size()) if held.numel() else b""


def digest(tensor: Any) -> str:
    return blake2b(content(tensor), digest_size=DIGEST).hexdigest()


def rows(tensor: Any) -> list[str]:
    """A digest of each row."""
    data, count = content(tensor), len(tensor)
    size = len(data) // count if count else 0
    return [blake2b(data[at * size : (at + 1) * size], digest_size=DIGEST).hexdigest() for at in range(count)]


class Part:
    """Which part of a divided tensor this rank has: from where on, of how many entries in all, and how many ranks have the same part."""

    def __init__(self, offset: int, total: int, copies: int) -> None:
        self.offset, self.total, self.copies = offset, total, copies


def part_of(tensor: Any) -> Part | None:
    """Of a DTensor whose rows are divided once, as `fully_shard` does it, and else replicated; None for every other one."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    if mesh is None or not tensor.dim():
        return None
    place, offset, copies, divided = mesh.get_coordinate(), 0, 1, 0
    columns = tensor.numel() // (len(tensor) or 1)
    for dimension, placement in enumerate(placements):
        if placement.is_replicate():
            copies *= mesh.size(dimension)
        elif placement.is_shard(0) and type(placement).__name__ == "Shard":
            divided += 1
            rows = -(-len(tensor) // mesh.size(dimension))  # as torch.chunk divides them
            offset = min(place[dimension] * rows, len(tensor)) * columns
        else:
            return None
    return Part(offset, tensor.numel(), copies) if divided < 2 else None


def sketch(tensor: Any, size: int) -> tuple[Any, Any]:
    """The sketch of a tensor in float64, and that of its absolute values without signs, which bounds the rounding of sums.

    Of a divided tensor this rank's part of it: those of all ranks add up to the sketch of the whole.
    """
    torch = _torch()
    flat = plain(tensor).reshape(-1)
    part = part_of(tensor) or Part(0, flat.numel(), 1)
    if part.total <= size:
        values = torch.zeros(part.total, dtype=torch.float64)
        values[part.offset : part.offset + flat.numel()] = flat.to("cpu", torch.float64) / part.copies
        return values, values.abs()
    count = -(-part.total // size)
    signs = torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(part.total))
    signs = signs.to(torch.float64) * 2 - 1
    values, sizes = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    step = max(1, PART // size)
    for first in range(part.offset // size, count, step):
        begin = max(0, first * size - part.offset)
        rows = flat[begin : max(begin, (first + step) * size - part.offset)].to("cpu", torch.float64) / part.copies
        if not rows.numel():
            break
        before = max(0, part.offset - first * size)
        missing = -(before + rows.numel()) % size
        rows = torch.cat((rows.new_zeros(before), rows, rows.new_zeros(missing))).view(-1, size)
        values += signs[first : first + len(rows)] @ rows
        sizes += rows.abs().sum(0)
    return values, sizes


def coarse(tensor: Any) -> str:
    """The 16-bit format that holds these numbers without loss; "" if none does."""
    torch = _torch()
    values = plain(tensor)
    if not values.any():
        return ""
    for name in ("bfloat16", "float16"):
        if torch.equal(values.to(getattr(torch, name)).to(values.dtype), values):
            return name
    return ""


def tensors(value: Any, depth: int = 0) -> list[Any]:
    """The tensors in what a model or a loader is given: nested in tuples, lists and dicts, or the fields of an object that holds them."""
    torch = _torch()
    if isinstance(value, torch.Tensor):
        return [value]
    if depth > 3:
        return []
    if isinstance(value, dict) or hasattr(value, "items"):
        return [found for _, each in value.items() for found in tensors(each, depth + 1)]
    if isinstance(value, (list, tuple)):
        return [found for each in value for found in tensors(each, depth + 1)]
    return []


def samples(value: Any) -> tuple[list[str], list[str]]:
    """Digests of a batch, sample by sample: of its largest tensor, and of all that comes with it (labels)."""
    found = [tensor for tensor in tensors(value) if tensor.dim() and len(tensor)]
    if not found:
        return [], []
    largest = max(found, key=lambda tensor: tensor.numel() // len(tensor) * tensor.element_size())
    others = [rows(tensor) for tensor in found if tensor is not largest and len(tensor) == len(largest)]
    return rows(largest), ["".join(each) for each in zip(*others)]  # noqa: B905  # Python 3.9 has no strict
