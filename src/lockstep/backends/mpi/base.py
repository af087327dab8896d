"""A group of the backend `mpi`: how it ends, and how an operation becomes something to wait for."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI

from lockstep.backends.mpi.work import Mismatch, briefly, gate_for, sleep_until
from lockstep.backends.python_group import PythonGroup
from lockstep.backends.work import Done, Pending, ProgressThread
from lockstep.torch_private import Store, untraced

NAME = "lockstep_mpi"
# Up to this size an operation is finished before its call returns, even where the caller would not have waited: handing
# it to the progress thread costs more than it takes (docs/mpi.md).
INLINE_BYTES = int(os.environ.get("LOCKSTEP_MPI_INLINE_BYTES", 1 << 20))

open_groups: set[int] = set()


@untraced
class MpiBase(PythonGroup):
    """One communicator. torch calls the methods without underscore; their names and arguments are its."""

    backend_name = NAME

    def __init__(self, store: Store, communicator: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(store, communicator.rank, communicator.size)
        self._comm, self._timeout_s = communicator, timeout.total_seconds()
        self._gate, self._progress = gate_for(communicator), ProgressThread("lockstep-mpi")
        self._barriers, self._broken, self._begun = 0, "", 0
        open_groups.add(id(self))

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

    def _do(
        self, what: str, alike: int, perform: Callable[[], None], result: Any, size: int, options: Any
    ) -> Done | Pending:
        """Wait for the others and carry it out: here, or in the progress thread. There go large ones whose caller has something
        else to do, and those for which another rank is late: it may wait for what this caller does next. What is queued
        comes first: MPI matches operations by their order."""
        asynchronous = getattr(options, "asyncOp", True)
        here = not self._progress.queue and (size <= INLINE_BYTES or not asynchronous)
        if here:
            self._enter(alike)
            if self._meet(what, brief=asynchronous):
                perform()
                return Done(result)

        def queued() -> None:
            if not here:
                self._enter(alike)
            self._sleep_until_all_are_here(what)
            perform()

        return self._progress.add(Pending(queued, result, "mpi"))

    def _enter(self, alike: int) -> None:
        """Come to the gate, for what `alike` stands for."""
        if self._broken:
            raise RuntimeError(f"this process group is broken: {self._broken}")
        self._begun += 1
        self._gate.enter(alike)

    def begun(self) -> int:
        return self._begun

    def _meet(self, what: str, brief: bool) -> bool:
        """Wait for the others at the gate. With `brief`, returns False instead of sleeping."""
        try:
            if briefly(self._gate.look):
                return True
            if brief:
                return False
            sleep_until(self._gate.look, self._timeout_s, what)
        except RuntimeError as error:
            raise self._break(what, error) from None
        return True

    def _sleep_until_all_are_here(self, what: str) -> None:
        """Without ever holding the core, which belongs to the thread that computes."""
        try:
            sleep_until(self._gate.look, self._timeout_s, what)
        except RuntimeError as error:
            raise self._break(what, error) from None

    def _break(self, what: str, error: RuntimeError) -> RuntimeError:
        """Ranks that did not meet once would be one operation apart from then on."""
        if isinstance(error, Mismatch):
            error = RuntimeError(f"backend=mpi: rank {self._rank} called {what}, but {error}")
        self._broken = str(error)
        return error

    def _give(self, target: torch.Tensor, mine: torch.Tensor, average: bool = False) -> None:
        """What is left to do when the numbers are there: divide, and copy where MPI could not work in place."""
        if average:
            mine.div_(self._size)
        if mine is not target:
            target.copy_(mine)
