"""Which samples the next forward pass is about: a layer sees activations, and not which samples they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class _Bound:
    keys: Tensor | None = None
    real: int | None = None
    calls: dict[int, int] = field(default_factory=dict)
    """How often each dropout layer was called in this pass: a layer that is used twice has other masks the second time."""


bound = _Bound()


def bind(keys: Tensor | None, real: int | None) -> None:
    """State the samples of the next forward pass, and how many of them count (None: all).

    A rank without samples in a short last batch takes part with a dummy sample that does not count (real = 0).
    """
    bound.keys, bound.real = keys, real
    bound.calls.clear()
