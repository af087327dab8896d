"""What torch asks of any process group: who it is, how it ends, and how an operation becomes something to wait for."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

from lockstep.parallel.done import Done
from lockstep.parallel.mpi_work import Progress, Queued, gate_for

NAME = "lockstep_mpi"
# Up to this size an operation is finished before its call returns, even where the caller would not have waited: handing
# it to the progress thread costs more than it takes (docs/mpi.md).
INLINE_BYTES = int(os.environ.get("LOCKSTEP_MPI_INLINE_BYTES", 1 << 20))

open_groups: set[int] = set()


class MpiBase(dist.ProcessGroup):
    """One communicator. torch calls the methods without underscore; their names and arguments are its."""

    def __init__(self, communicator: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._comm, self._rank, self._size = communicator, communicator.rank, communicator.size
        self._timeout_s = timeout.total_seconds()
        self._gate, self._progress = gate_for(communicator), Progress()
        self._name = self._description = "undefined"
        open_groups.add(id(self))

    # ------------------------------------------------ who we are; the base class asks backends that we do not have

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def shutdown(self) -> None:
        """All went well: finish what is under way and give the communicator back."""
        if id(self) in open_groups:
            self._progress.end()
            self._gate.close()
            self._comm.Free()
            open_groups.discard(id(self))

    def abort(self) -> None:
        """Nothing to do here: a rank that ends without Finalize makes mpirun end the others."""

    # ------------------------------------------------ from an operation to what torch waits for

    def _do(self, what: str, perform: Callable[[], None], result: Any, size: int, options: Any) -> Any:
        """Wait for the others and carry it out: here, or, where it is large and the caller has something else to do, in
        the progress thread. What is queued there comes first: MPI matches operations by their order."""
        wait_here = size <= INLINE_BYTES or not getattr(options, "asyncOp", True)
        if wait_here and not self._progress.queue:
            self._gate.wait(self._timeout_s, what)
            perform()
            return Done(result)

        def queued() -> None:
            # No spinning there: it would keep the computing thread from its core and from the interpreter's lock.
            self._gate.wait(self._timeout_s, what, spins=0)
            perform()

        return self._progress.add(Queued(queued, result, what))
