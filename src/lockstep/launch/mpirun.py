"""`mpirun`: Open MPI's or MPICH's own launcher, on this host or in a job of Slurm's. It starts a monitor per rank (launch/monitor.py).

`python -m lockstep.launch.mpirun WORDS…` becomes the launcher that WORDS name, after asking the kernel to end it with us.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from lockstep.errors import InputError
from lockstep.launch.base import Start, default_environment, monitor_argv, thread_environment
from lockstep.machine.cores import cores
from lockstep.placement import Placement, ranks_per_host
from lockstep.process import PARENT, die_with_parent
from lockstep.run import Spec

HOW_TO_GET = "pip install 'lockstep-bench[mpi]'"
# Where both MPIs are installed, the plain names belong to one of them; the others are each MPI's own.
NAMES = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.mpich", "mpirun.openmpi", "orterun")
SONAMES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}
LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"


@dataclass(frozen=True)
class Mpi:
    """One launcher that was found."""

    kind: str
    """openmpi or mpich, as the option's words."""
    version: tuple[int, ...]
    program: str


def starts(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    placement = spec.placement
    mpi = choose(placement)
    argv = [sys.executable, "-m", "lockstep.launch.mpirun", *command(mpi, placement)]
    environment = thread_environment(placement) | library_environment(mpi, placement)
    return [
        Start(
            [*argv, *monitor_argv(folder)],
            environment,
            default_environment(placement) | fast_settings(mpi),
            what="mpirun",
        )
    ]


def command(mpi: Mpi, placement: Placement) -> list[str]:
    """mpirun and its options, without the program that it starts."""
    words = [mpi.program, "-n", str(placement.ranks)]
    if placement.launcher == "slurm":  # it finds the nodes by itself, and they may have other cores than we have here
        each = str(ranks_per_host(placement))
        ways = ["-ppn", each, "-bind-to"] if mpi.kind == "mpich" else ["--map-by", f"ppr:{each}:node", "--bind-to"]
        return [*words, *ways, "none"]
    bind = placement.pin and placement.device == "cpu" and mpirun_can_bind(placement)
    threads = placement.threads or 1
    if mpi.kind == "mpich":
        return [*words, "-bind-to", ("core" if threads == 1 else f"core:{threads}") if bind else "none"]
    modifiers = [f"PE={threads}"] if bind and threads > 1 else []
    if placement.ranks > physical_cores():
        modifiers.append("OVERSUBSCRIBE")
    if modifiers:
        words += ["--map-by", ":".join(["slot" if bind else "", *modifiers])]
    return [*words, "--bind-to", "core" if bind else "none"]


def mpirun_can_bind(placement: Placement) -> bool:
    """Whether mpirun's idea of cores is ours. It counts physical cores and looks past what `taskset` left us; where that
    makes a difference it is told not to bind, and the rank pins itself as under every other launcher (process.pin)."""
    needed = placement.ranks * (placement.threads or 1)
    return needed <= physical_cores() and cores() == (os.cpu_count() or 1)


def physical_cores() -> int:
    """Cores of this machine, a core with two hardware threads counted once, as mpirun counts them."""
    siblings = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return len({path.read_text() for path in siblings}) or cores()


def fast_settings(mpi: Mpi) -> dict[str, str]:
    """Within one host. Open MPI tries every network first: over a second at each start, for ranks of one host that need none of them. With
    the larger eager limit, gradients of a small net go in one piece. Only where the user has not chosen."""
    if mpi.kind != "openmpi":
        return {}
    shared_memory = "sm" if mpi.version >= (5,) else "vader"
    return {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": f"self,{shared_memory}",
        f"OMPI_MCA_btl_{shared_memory}_eager_limit": "65536",
    }


def library_environment(mpi: Mpi, placement: Placement) -> dict[str, str]:
    """What makes the ranks' library the launcher's own, and lets Open MPI run as root (in a container, as a rule)."""
    environment: dict[str, str] = {}
    if placement.backend == "mpi" and placement.mpi != "auto":
        # mpi4py looks for a library by itself, or takes the one that it is told. An MPI of the system has none beside its
        # launcher; there the loader finds it by its name.
        library = Path(mpi.program).parent.parent / "lib" / SONAMES[mpi.kind]
        environment |= {"MPI4PY_LIBMPI": str(library)} if library.exists() else {"MPI4PY_MPIABI": mpi.kind}
    if mpi.kind == "openmpi" and os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environment


def choose(placement: Placement) -> Mpi:
    """The launcher to use: the one asked for, or the one that belongs to mpi4py's library, or the first."""
    if placement.backend == "mpi" and find_spec("mpi4py") is None:
        raise InputError(f"backend=mpi needs mpi4py, which is not installed: {HOW_TO_GET}")
    found = installed()
    if not found:
        asked = "slurm.ranks_by=mpirun" if placement.launcher == "slurm" else "launcher=mpirun"
        raise InputError(f"{asked}: there is no mpirun on this machine: {HOW_TO_GET}")
    wanted = placement.mpi if placement.mpi != "auto" else library_kind()
    matching = [mpi for mpi in found if mpi.kind == wanted]
    if matching:
        return matching[0]
    there = f"{found[0].program} is {found[0].kind}"
    if placement.mpi != "auto":
        raise InputError(f"mpi={wanted}: no mpirun of it is installed, {there}: choose mpi={found[0].kind}")
    if placement.backend == "mpi" and wanted is not None:
        raise InputError(
            f"backend=mpi: mpi4py uses {wanted}, but {there}: install {wanted} (pip install {wanted}), or choose "
            f"mpi={found[0].kind}"
        )
    return found[0]


def installed() -> list[Mpi]:
    """Every launcher that is there: beside our own interpreter first, then along PATH."""
    folders = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    programs = dict.fromkeys(shutil.which(name, path=folder) for folder in folders for name in NAMES)
    return [mpi for program in programs if program and (mpi := _identify(program))]


@lru_cache
def _identify(program: str) -> Mpi | None:
    """Which MPI a launcher is of, in its own words; None for one that is neither, or does not work."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout + done.stderr
    for kind, pattern in (("openmpi", r"\(Open MPI\) ([\d.]+)"), ("mpich", r"HYDRA[\s\S]*?Version:\s+([\d.]+)")):
        match = re.search(pattern, text)
        if match:
            return Mpi(kind, tuple(int(part) for part in match[1].split(".") if part), program)
    return None


@lru_cache
def library_kind() -> str | None:
    """The MPI that mpi4py uses here, asked in a process of its own: loading it may change the process. None without it."""
    if find_spec("mpi4py") is None:
        return None
    done = subprocess.run([sys.executable, "-c", LIBRARY], capture_output=True, text=True, timeout=60)
    return {"Open MPI": "openmpi", "MPICH": "mpich"}.get(done.stdout.strip())


def main() -> None:
    die_with_parent()
    # The ranks' parent is mpirun, or a helper of it, not the process that this names.
    os.environ.pop(PARENT, None)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
