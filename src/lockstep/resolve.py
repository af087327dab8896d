"""What "auto" comes to on this machine, and what cannot work: each with one line that says how to fix it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import InputError
from lockstep.machine import facts, formats
from lockstep.placement import STRATEGIES, Placement, cores, one_command_per_host, ranks_per_host
from lockstep.recipe import Recipe


def resolve(recipe: Recipe, placement: Placement) -> tuple[Recipe, Placement]:
    """Replace every "auto" by what it means here, and refuse what cannot work."""
    replace: Any = msgspec.structs.replace
    if placement.ranks % placement.hosts:
        nearest = placement.hosts * max(1, placement.ranks // placement.hosts)
        raise InputError(f"ranks={placement.ranks} do not divide over hosts={placement.hosts}: choose ranks={nearest}")
    placement = replace(placement, launcher=_launcher(placement), device=_device(placement))
    _check_hosts(placement)
    placement = replace(placement, backend=_backend(placement), strategy=_strategy(placement))
    if recipe.precision == "fp16" and placement.strategy == "fsdp":
        raise InputError("precision=fp16 does not go with strategy=fsdp yet: choose precision=bf16, or strategy=ddp")
    _check_hook(placement)
    _check_number_formats(recipe, placement)
    if recipe.quantize != "off":
        _check_quantize(recipe, placement)
    # Emulated hosts share this machine's cores.
    sharing = placement.ranks if placement.emulated else ranks_per_host(placement)
    # Measured on 4-D image batches with few channels: pooling and convolution gradients are vectorised over channels-last
    # memory, 1.4x a whole training step of the MNIST net (docs/training.md).
    memory_format = "channels_last" if placement.memory_format == "auto" else placement.memory_format
    placement = replace(placement, threads=placement.threads or max(1, cores() // sharing), memory_format=memory_format)
    batch = recipe.global_batch if recipe.batch_per_rank is None else recipe.batch_per_rank * placement.ranks
    return replace(recipe, global_batch=batch), placement


def _launcher(placement: Placement) -> str:
    launcher = placement.launcher
    if launcher == "auto":
        if placement.backend == "mpi":
            return "mpirun"
        if placement.hosts > 1 and not placement.emulated:
            return "torchrun"
        return "spawn" if placement.ranks > 1 else "single"
    if launcher == "single" and placement.ranks > 1:
        raise InputError(
            f"launcher=single has one rank, not ranks={placement.ranks}: choose launcher=spawn or launcher=torchrun"
        )
    return launcher


def _check_hosts(placement: Placement) -> None:
    launcher, hosts, rendezvous = placement.launcher, placement.hosts, placement.rendezvous
    if placement.emulated:
        if launcher not in ("spawn", "torchrun"):
            raise InputError(f"hosts=emulated:{hosts} works with launcher=spawn or torchrun, not launcher={launcher}")
        if rendezvous is not None:
            raise InputError("rendezvous has no effect on emulated hosts: leave it out")
    elif placement.link is not None:
        raise InputError(f"link={placement.link} needs emulated hosts: add hosts=emulated:2")
    elif hosts > 1 and launcher in ("single", "spawn", "mpirun"):
        raise InputError(
            f"launcher={launcher} stays on one host, not hosts={hosts}: choose launcher=torchrun or launcher=slurm"
        )
    if placement.max_restarts and launcher != "torchrun":
        raise InputError(f"max_restarts has no effect with launcher={launcher}: leave it out, or use launcher=torchrun")
    if one_command_per_host(placement) and rendezvous is None:
        raise InputError(f"hosts={hosts} need a meeting point: add rendezvous=FIRST_HOST:29500")
    if rendezvous is not None:
        if launcher != "torchrun":
            raise InputError(
                f"rendezvous has no effect with launcher={launcher}: leave it out, or use launcher=torchrun"
            )
        split_address(rendezvous)


def _device(placement: Placement) -> str:
    if placement.device == "auto":
        return "cuda" if cuda_present() and placement.launcher != "slurm" else "cpu"
    # On a cluster the machine that submits need not be one that trains.
    if placement.device == "cuda" and placement.launcher != "slurm" and not cuda_present():
        raise InputError(
            "device=cuda, but this machine has no usable CUDA: choose device=cpu ('lockstep doctor' says more)"
        )
    return placement.device


def _backend(placement: Placement) -> str:
    backend = placement.backend
    if backend == "auto":
        return "nccl" if placement.device == "cuda" else "gloo"
    if backend == "nccl" and placement.device == "cpu":
        raise InputError("backend=nccl works on CUDA only: choose backend=gloo for device=cpu")
    if backend in ("mpi", "shm") and placement.device == "cuda":
        raise InputError(f"backend={backend} works on CPUs only: choose backend=nccl for device=cuda")
    by_srun = placement.launcher == "slurm" and placement.slurm.ranks_by == "srun"
    if backend == "mpi" and placement.launcher != "mpirun" and not by_srun:
        raise InputError(
            f"backend=mpi needs ranks that MPI started, not launcher={placement.launcher}: choose launcher=mpirun, "
            "or launcher=slurm with slurm.ranks_by=srun"
        )
    return backend


def _strategy(placement: Placement) -> str:
    strategy, ranks = placement.strategy, placement.ranks
    if strategy == "auto":
        return "ddp" if ranks > 1 else "single"
    if strategy not in STRATEGIES and ":" not in strategy:
        raise InputError(
            f"strategy={strategy}: no such strategy; known: {', '.join(STRATEGIES)}, or your own as path/to/file.py:Class"
        )
    if strategy == "dp" and placement.device == "cpu":
        raise InputError(
            "strategy=dp divides a batch over the GPUs of one process, and a CPU is one device, whose cores threads=N "
            "already uses: choose strategy=ddp with ranks=2, or leave strategy out"
        )
    if strategy in ("ddp", "fsdp") and ranks == 1:
        raise InputError(
            f"strategy={strategy} exchanges between ranks, and there is one: add ranks=2, or leave strategy out"
        )
    if strategy == "dp" and ranks > 1:
        raise InputError(f"strategy=dp is one process for all GPUs, not ranks={ranks}: choose ranks=1, or strategy=ddp")
    if placement.zero and strategy in ("fsdp", "local-sgd", "diloco"):
        raise InputError(
            f"zero=true does not go with strategy={strategy}: choose strategy=ddp or flat, or leave zero out"
        )
    if strategy == "single" and ranks > 1:
        raise InputError(f"strategy=single does not exchange gradients between ranks={ranks}: choose strategy=ddp")
    return strategy


def _check_hook(placement: Placement) -> None:
    """PyTorch's PowerSGD waits for an exchange inside the callback of another, which these two carry out in one thread: it would hang."""
    if placement.ddp.hook == "powersgd" and placement.backend in ("shm", "mpi"):
        raise InputError(f"ddp.hook=powersgd does not go with backend={placement.backend}: choose backend=gloo")


def _check_number_formats(recipe: Recipe, placement: Placement) -> None:
    """Refuse a format that this machine was seen to fail at. On a cluster the nodes are other machines."""
    if placement.device != "cpu" or placement.launcher == "slurm":
        return
    known = facts.known()
    if known is not None and (wrong := formats.problem("fp32", known)):
        raise InputError(f"nothing can be trained on this CPU: {wrong} ('lockstep doctor' says more)")
    if recipe.precision != "fp32":
        formats.check(f"precision={recipe.precision}", recipe.precision.removeprefix("pure-"), "choose precision=fp32")
    if recipe.quantize != "off":
        formats.check(f"quantize={recipe.quantize}", "int8", "leave quantize out")


def cuda_present() -> bool:
    """Whether CUDA can be had, judged without importing torch: a device node, and a torch built for CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    library = Path(spec.submodule_search_locations[0]) / "lib" / "libtorch_cuda.so"
    return library.exists() and Path("/dev/nvidiactl").exists()


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair, or an error that names the option."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"rendezvous={address!r} is not HOST:PORT, for example rendezvous=10.0.0.1:29500")
    return host, int(port)


def _check_quantize(recipe: Recipe, placement: Placement) -> None:
    if recipe.precision != "fp32":
        raise InputError(f"quantize=qat trains in fp32, not precision={recipe.precision}: leave one of them out")
    for key in ("compile", "fused"):
        if getattr(recipe, key):
            raise InputError(f"quantize=qat does not go with {key}=true: leave one of them out")
    if placement.strategy in ("fsdp", "dp"):
        raise InputError(f"quantize=qat does not go with strategy={placement.strategy}: choose strategy=ddp or flat")
    if placement.device != "cpu":
        raise InputError("quantize=qat tests its int8 model on CPU kernels: choose device=cpu")
