"""A process group written in Python: what torch's ProcessGroup keeps in registered backends, of which such a group has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep.backends import monitored
from lockstep.torch_private import Store, untraced

Tensors = list[torch.Tensor]

# torch's stubs give the collectives overloads and names of arguments that its own calls do not use, and that no subclass
# in Python has; so the type checker is told nothing about the base class.
_Base: Any = dist.ProcessGroup


@untraced
class PythonGroup(_Base):  # type: ignore[misc]
    """Rank, size, names and devices of a group, for torch.distributed, its C++ side and DDP."""

    backend_name = "python"

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self._group_name = self._group_desc = "undefined"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def name(self) -> str:
        return self.backend_name

    getBackendName = name

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

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def _set_sequence_number_for_group(self) -> None:
        """Groups in Python number their operations themselves."""

    def _get_sequence_number_for_group(self) -> int:
        return self.begun()

    def begun(self) -> int:
        """How many operations this rank has begun; 0 where a group does not count them."""
        return 0


def register(name: str, create: Callable[..., PythonGroup]) -> str:
    """Make a backend known to torch, once. Returns its name."""
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
        monitored.allow(name)
    return name
