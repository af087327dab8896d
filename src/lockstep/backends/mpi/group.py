"""The backend `mpi`: a process group of torch.distributed on mpi4py, for wheels of PyTorch that were built without MPI.

torch's own name "mpi" is never looked up among registered backends, so this one has another name there. The process
group is in base.py, reductions.py and collectives.py, what a tensor is to MPI in buffers.py, waiting in work.py.
"""

from __future__ import annotations

import atexit
import os
from typing import Any, NoReturn

from lockstep.errors import InputError

try:
    import mpi4py

    # Finalize waits for all ranks, so one that ends by an exception would wait for ever: see _finalize.
    mpi4py.rc.finalize = False
    # Not by the import but in register(), which first looks whether launcher and library fit.
    mpi4py.rc.initialize = False
    from mpi4py import MPI
except (ImportError, RuntimeError) as problem:  # RuntimeError: no MPI library was found
    raise InputError(f"backend=mpi: {str(problem).partition(chr(10))[0]}: pip install 'lockstep-bench[mpi]'") from None

from lockstep.backends import python_group
from lockstep.backends.mpi import segments
from lockstep.backends.mpi.base import NAME, open_groups
from lockstep.backends.mpi.collectives import MpiGroup


def _create(given: Any, options: Any = None) -> MpiGroup:
    """Called by torch for the world and for every subgroup that this rank is part of."""
    world = MPI.COMM_WORLD
    ranks = list(given.global_ranks_in_group)
    if ranks:
        return MpiGroup(given.store, world.Create_group(world.group.Incl(ranks)), given.timeout)
    _check_world(given.group_rank, given.group_size)
    _leave_no_segments()
    return MpiGroup(given.store, world.Dup(), given.timeout)


def _leave_no_segments() -> None:
    """Take away the names of the shared memory that MPI has made, as soon as every rank of this host has it open: the memory
    then goes with its last process, and a killed run leaves none behind."""
    world = MPI.COMM_WORLD
    world.alltoall([0] * world.size)  # Open MPI opens a peer's memory with the first message
    world.Barrier()
    for name, inode in segments.of_process(os.getpid()):
        segments.remove(name, inode)


def _check_launcher() -> None:
    """MPICH's library aborts the rank under Open MPI's mpirun, so this is looked at before it is initialized."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ and MPI.get_vendor()[0] != "Open MPI":
        _refuse(int(os.environ["OMPI_COMM_WORLD_SIZE"]), "knows nothing of Open MPI's mpirun")


def _check_world(rank: int, size: int) -> None:
    """Otherwise every rank finds itself alone in its world, and nothing else would notice."""
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, size):
        _leave_no_segments()
        _refuse(size, f"is rank {world.rank} of {world.size}")


def _refuse(size: int, but: str) -> NoReturn:
    vendor, version = MPI.get_vendor()
    word = {"Open MPI": "openmpi", "MPICH": "mpich"}.get(vendor, "auto")
    raise InputError(
        f"backend=mpi: the launcher started {size} ranks, but mpi4py's library, {vendor} {'.'.join(map(str, version))}, {but}: "
        f"launcher and library are of different MPIs: choose mpi={word}, or reinstall one of them"
    )


@atexit.register
def _finalize() -> None:
    """Only after success: with a group still open this rank failed, and mpirun is to end the others, not to wait."""
    if not open_groups and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def register() -> str:
    """Make the backend known to torch. Returns the name for init_process_group."""
    _check_launcher()
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise InputError("backend=mpi: this MPI library was built without thread support (MPI_THREAD_MULTIPLE)")
    return python_group.register(NAME, _create)
