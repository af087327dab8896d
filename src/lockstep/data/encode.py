"""The inverse of decoding: resident arrays as the bytes of the published files, to check them again."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.data.catalog import Entry, Part

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def parts_of(entry: Entry, arrays: Mapping[str, Any]) -> Iterator[tuple[Part, bytes]]:
    """Every published part of the set, with the bytes that the arrays give for it."""
    start = {"train": 0, "test": 0}
    for part in entry.parts:
        images, labels = arrays[f"{part.split}-images"], arrays[f"{part.split}-labels"]
        if part.role == "images":
            yield part, as_idx(images[:, 0])
        elif part.role == "labels":
            yield part, as_idx(labels)
        else:
            first = start[part.split]
            stop = start[part.split] = first + part.size // (1 + images[0].size)
            yield part, as_batch(images[first:stop], labels[first:stop])


def as_idx(values: NDArray[np.uint8]) -> bytes:
    """An IDX file of unsigned bytes."""
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def as_batch(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> bytes:
    """A binary CIFAR batch: per image one byte of label, then its planes."""
    import numpy as np

    flat = images.reshape(len(images), math.prod(images.shape[1:]))
    return np.concatenate([labels[:, None], flat], axis=1).tobytes()
