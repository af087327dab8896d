"""Strategies: how the gradients of all ranks become one update (docs/strategies.md). One file each.

May import backends/ and the files at the top. Its door is `Strategy` (base.py) and `build`.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.plugins import load_object
from lockstep.strategies.base import Strategy
from lockstep.strategies.ddp import Ddp
from lockstep.strategies.dp import DataParallel
from lockstep.strategies.flat import Flat
from lockstep.strategies.fsdp import Fsdp
from lockstep.strategies.local_sgd import DiLoCo, LocalSgd
from lockstep.strategies.naive import Naive

__all__ = ["STRATEGIES", "Strategy", "build", "kind_of"]

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "ddp": Ddp,
    "flat": Flat,
    "naive": Naive,
    "dp": DataParallel,
    "fsdp": Fsdp,
    "local-sgd": LocalSgd,
    "diloco": DiLoCo,
}


def kind_of(name: str) -> type[Strategy]:
    """The strategy of a name: one of ours, or a user's class."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    kind: object = load_object(name, option="strategy")
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise InputError(f"strategy={name}: not a subclass of lockstep.strategies.Strategy (docs/strategies.md)")
    return kind


def build(name: str, model: nn.Module, placement: Placement, device: torch.device) -> Strategy:
    """The strategy on this rank. Collective where there are several ranks."""
    kind = kind_of(name)
    if placement.zero and placement.ranks > 1 and not kind.works_with_zero:
        why = (
            "divides the optimizer's state already" if kind.divides_weights else "gives each rank gradients of its own"
        )
        raise InputError(
            f"zero=true does not go with strategy={name}, which {why}: leave zero out, or choose strategy=ddp"
        )
    return kind(model, placement, device)
