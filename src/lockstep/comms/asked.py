"""What the user asked for, checked before anything starts: each mistake is one line with the option's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lockstep.backends.costs.plan import BACKENDS, COLLECTIVES, OWN
from lockstep.comms.pool import unavailable
from lockstep.errors import InputError
from lockstep.files import home_path
from lockstep.measure.environment import machine
from lockstep.placement import Placement
from lockstep.plugins import is_spec
from lockstep.reading import is_dir, is_file
from lockstep.units import counted


def known(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"{option} {name}: unknown; there are {', '.join(known)}")


def chosen(collectives: tuple[str, ...], own: str | None) -> list[str]:
    """With --own alone, the backend's all-reduce beside it and nothing else."""
    if own is None:
        return list(dict.fromkeys(collectives)) or list(COLLECTIVES)
    return [*(dict.fromkeys(collectives) or ["all_reduce"]), OWN]


def own_function(own: str) -> str:
    """Checked here, without importing it: the function needs torch, and only the ranks have that."""
    where, _, name = own.rpartition(":")
    if not is_spec(own):
        raise InputError(f"--own {own}: write it as FILE.py:FUNCTION")
    if not where.endswith(".py"):
        return own
    path = home_path(where)
    if not is_file(path):
        raise InputError(f"--own {own}: there is no file {path}")
    return f"{path}:{name}"


def there(
    backends: tuple[str, ...], device: str, ranks: int, where: Placement | None = None
) -> tuple[list[str], dict[str, str]]:
    """The backends to measure; one that was asked for by name must be there. Between hosts only those that work there are meant."""
    fitting = [name for name in BACKENDS if device == "cuda" or name != "nccl"]
    fitting = [name for name in fitting if where is None or works_at(name, where) is None]
    by_srun = where is not None and where.launcher == "slurm" and where.slurm.ranks_by == "srun"
    if where and by_srun and not where.slurm.mpi and not backends:
        fitting = [name for name in fitting if name != "mpi"]  # which --mpi is right is not ours to guess
    fitting = [name for name in fitting if device == "cpu" or name in ("gloo", "nccl")]
    left_out: dict[str, str] = {}
    for name in backends or fitting:
        reason = works_at(name, where) if where else None
        reason = reason or unavailable(name, device, ranks, where)
        if reason is None and name not in fitting:
            reason = f"it does not work on device={device}"
        if reason and backends:
            raise InputError(f"--backend {name}: {reason}")
        if reason:
            left_out[name] = reason
    return [name for name in dict.fromkeys(backends or fitting) if name not in left_out], left_out


def works_at(backend: str, where: Placement) -> str | None:
    """Why a backend does not work on these hosts, or with this launcher; None where it may."""
    if backend == "shm" and where.hosts > 1:
        return "it shares the memory of one host"
    by_slurm = where.launcher == "slurm" and where.slurm.ranks_by != "torchrun"
    by_mpi = where.launcher in ("auto", "mpirun") and not where.emulated
    if backend == "mpi" and not by_slurm and not by_mpi:
        by = "spawn" if where.launcher == "auto" else where.launcher
        said = f"slurm.ranks_by={where.slurm.ranks_by}" if by == "slurm" else f"launcher={by}"
        return f"it needs ranks that MPI started, not {said}"
    return None


def check_plot(plot: Path | None, capabilities: bool) -> None:
    if plot is None:
        return
    if capabilities:
        raise InputError("--plot has nothing to draw with --capabilities: leave one of them out")
    if plot.suffix != ".svg":
        raise InputError(f"--plot {plot}: the chart is written as SVG; name it {plot.with_suffix('.svg')}")
    if not is_dir(plot.absolute().parent):
        raise InputError(f"--plot {plot}: there is no folder {plot.absolute().parent}")


def warnings(ranks: int, where: Placement | None = None) -> Iterator[str]:
    """What makes times less trustworthy, without being wrong."""
    if where and where.launcher == "slurm":
        return  # its nodes are elsewhere
    seen = machine()
    cores, load = seen["cores_usable"], seen["load_1min"] or 0.0
    if ranks > cores:
        yield f"{ranks} ranks on {counted(cores, 'core')} take turns; their times say little about a machine with enough cores"
    if load > 0.5 * cores:
        yield f"load {load:.1f} on {counted(cores, 'core')}: timings will be noisy; end other work for figures to rely on"
