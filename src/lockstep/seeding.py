"""The three generators that a user's code may draw from: Python's, numpy's and torch's. Seeded, kept and put back together.

What Lockstep itself draws needs none of them: see keyed.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

# Python's and numpy's generators are both 624 words and a position, and may hold one normal number for the next call.
_STATE = np.dtype([("words", "<u4", 624), ("position", "<u4"), ("held", "<u4"), ("normal", "<f8")])


def seed_all(*parts: int) -> None:
    """Start all three from these numbers, for example from (seed, rank). torch gets a single seed as it is."""
    mixed = np.random.SeedSequence(parts)
    seed = parts[0] if len(parts) == 1 and parts[0] < 2**63 else int(mixed.generate_state(1, np.uint64)[0]) >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(mixed.generate_state(4))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Everything inside draws from `seed`; what is outside goes on as if nothing had been drawn."""
    before = state()
    try:
        seed_all(seed)
        yield
    finally:
        load_state(before)


def state() -> Tensor:
    """All three as bytes of one length, so that ranks can exchange them."""
    held = np.zeros(2, _STATE)
    _, python, normal = random.getstate()
    held[0] = (python[:624], python[624], normal is not None, normal or 0.0)
    _, words, position, has_normal, next_normal = np.random.get_state(legacy=True)
    held[1] = (words, position, has_normal, next_normal)
    return torch.cat((torch.get_rng_state(), torch.from_numpy(held.view(np.uint8))))


def load_state(kept: Tensor) -> None:
    """What `state` gave. Checkpoints of version 0.1 hold torch's part alone: then the others stay as they are."""
    own = len(torch.get_rng_state())
    torch.set_rng_state(kept[:own])
    if len(kept) == own:
        return
    python, numpy = kept[own:].numpy().view(_STATE)
    words = (*(int(word) for word in python["words"]), int(python["position"]))
    random.setstate((3, words, float(python["normal"]) if python["held"] else None))
    np.random.set_state(("MT19937", numpy["words"], int(numpy["position"]), int(numpy["held"]), float(numpy["normal"])))


def changed(before: Tensor) -> list[str]:
    """Which generators were drawn from since `before`."""
    now, own, each = state(), len(torch.get_rng_state()), _STATE.itemsize
    parts = {
        "torch's generator": slice(0, own),
        "Python's random": slice(own, own + each),
        "numpy.random": slice(own + each, own + 2 * each),
    }
    return [name for name, part in parts.items() if not torch.equal(before[part], now[part])]
