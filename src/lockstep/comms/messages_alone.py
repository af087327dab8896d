"""A rank whose collectives are taken away: what it runs has to do with messages between two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep.measure.callsite import COLLECTIVES

# A barrier moves nothing, and everybody needs it.
ALLOWED = {"barrier", "monitored_barrier", "new_group", "recv", "send"}


def refuse_collectives() -> None:
    """From now on the collectives of torch.distributed raise. Before the user's code is imported, which may take them by name."""
    for name in COLLECTIVES - ALLOWED:
        for module in (dist, distributed_c10d):
            if hasattr(module, name):
                setattr(module, name, _refused(name))


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"dist.{name} is a collective: use messages between two ranks (send, recv, isend, irecv)")

    return refuse
