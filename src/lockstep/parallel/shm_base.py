"""What torch's ProcessGroup keeps in registered backends, of which a group written in Python has none."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store

from lockstep.parallel.untraced import untraced

# torch's stubs give the collectives overloads and names of arguments that its own calls do not use, and that no subclass
# in Python has; so the type checker is told nothing about the base class.
_Base: Any = ProcessGroup


@untraced
class PythonGroup(_Base):  # type: ignore[misc]
    """Rank, size, names and devices of a group, for torch.distributed, its C++ side and DDP."""

    backend_name = "python"

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self._group_name, self._group_desc = "undefined", "undefined"

    def getBackendName(self) -> str:
        return self.backend_name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def name(self) -> str:
        return self.backend_name

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        return self._group_name

    def getGroupDesc(self) -> str:
        return self._group_desc

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def _set_sequence_number_for_group(self) -> None:
        """Operations are numbered by the segment itself."""


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """A gloo group that torch.distributed does not list."""
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    backend = ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return group
