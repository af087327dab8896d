"""A barrier that says which ranks have not come, for backends other than gloo.

torch.distributed.monitored_barrier asks for the name gloo before it asks the group, so a group that can do it is refused.
Here it is asked.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

_torchs_own = distributed_c10d.monitored_barrier
_able: set[str] = set()


def allow(backend: str) -> None:
    """The groups of this backend have the method `monitored_barrier`, as those of gloo."""
    _able.add(backend)
    dist.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    if dist.get_rank(group) < 0 or dist.get_backend(group) not in _able:
        _torchs_own(group, timeout, wait_all_ranks)
        return
    if timeout is None:
        timeout = dist.default_pg_timeout
    elif not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    chosen: Any = group or dist.group.WORLD  # torch's stubs do not list the method
    chosen.monitored_barrier(timeout, wait_all_ranks)
