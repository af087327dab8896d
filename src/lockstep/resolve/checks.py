"""What cannot work on this machine, refused before anything starts: each with one line that says how to fix it."""

from __future__ import annotations

import difflib

from lockstep import offered
from lockstep.errors import InputError
from lockstep.machine import facts, formats
from lockstep.machine.cuda import cuda_present
from lockstep.placement import LAUNCHERS, STRATEGIES, Placement, elsewhere, one_command_per_host, split_address
from lockstep.recipe import Recipe


def check_hosts_divide(placement: Placement) -> None:
    if placement.ranks % placement.hosts:
        nearest = placement.hosts * max(1, placement.ranks // placement.hosts)
        raise InputError(f"ranks={placement.ranks} do not divide over hosts={placement.hosts}: choose ranks={nearest}")


def check_device(placement: Placement) -> None:
    # On a cluster the machine that submits need not be one that trains.
    if placement.device == "cuda" and not elsewhere(placement) and not cuda_present():
        raise InputError(
            "device=cuda, but this machine has no usable CUDA: choose device=cpu ('lockstep doctor' says more)"
        )


def check_placement(placement: Placement) -> None:
    """Of a placement whose device, backend, launcher and strategy are known."""
    _check_launcher(placement)
    _check_hosts(placement)
    _check_backend(placement)
    _check_strategy(placement)


def check_together(recipe: Recipe, placement: Placement) -> None:
    """What the recipe asks for and this place, or this machine, cannot do."""
    if recipe.precision == "fp16" and placement.strategy == "fsdp":
        raise InputError("precision=fp16 does not go with strategy=fsdp yet: choose precision=bf16, or strategy=ddp")
    if recipe.compile and placement.strategy == "fsdp":
        # Its hooks come after compiling, and so the first steps would compile again.
        raise InputError("compile=true does not go with strategy=fsdp yet: leave compile out, or choose strategy=ddp")
    # On a cluster the machine that submits need not be one that trains: each node asks itself (worker.py).
    if placement.device == "cpu" and not elsewhere(placement):
        check_number_formats(recipe)
    if recipe.quantize != "off":
        _check_quantize(recipe, placement)
    if placement.shares == "auto":
        _check_shares_auto(recipe, placement)


def _check_launcher(placement: Placement) -> None:
    if placement.launcher not in ("auto", *LAUNCHERS) and ":" not in placement.launcher:
        known = ["auto", *LAUNCHERS, *offered.names("launcher")]
        near = difflib.get_close_matches(placement.launcher, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}; your own: path/to/file.py:starts"
        raise InputError(f"launcher={placement.launcher}: no such launcher; {hint}")
    if placement.launcher == "single" and placement.ranks > 1:
        raise InputError(
            f"launcher=single has one rank, not ranks={placement.ranks}: choose launcher=spawn or launcher=torchrun"
        )


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
        beyond = (
            "launcher=slurm slurm.ranks_by=mpirun" if launcher == "mpirun" else "launcher=torchrun or launcher=slurm"
        )
        raise InputError(f"launcher={launcher} stays on one host, not hosts={hosts}: choose {beyond}")
    if launcher == "ray":
        _check_ray(placement)
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


def _check_ray(placement: Placement) -> None:
    address = placement.ray.address
    if address is None and placement.hosts > 1:
        raise InputError(f"launcher=ray hosts={placement.hosts} needs a Ray cluster: add ray.address=HOST:PORT")
    if address not in (None, "auto"):
        split_address(address, "ray.address", "10.0.0.1:6379")
    if placement.device == "cuda":
        raise InputError("launcher=ray trains on CPUs only: choose launcher=torchrun or launcher=slurm for device=cuda")


def _check_backend(placement: Placement) -> None:
    backend = placement.backend
    if backend == "nccl" and placement.device == "cpu":
        raise InputError("backend=nccl works on CUDA only: choose backend=gloo for device=cpu")
    if backend in ("mpi", "shm") and placement.device == "cuda":
        raise InputError(f"backend={backend} works on CPUs only: choose backend=nccl for device=cuda")
    if backend == "mpi" and placement.launcher == "slurm" and placement.slurm.ranks_by == "torchrun":
        raise InputError(
            "backend=mpi needs ranks that MPI started, not slurm.ranks_by=torchrun: choose slurm.ranks_by=mpirun"
        )
    if backend == "mpi" and placement.launcher not in ("mpirun", "slurm"):
        raise InputError(
            f"backend=mpi needs ranks that MPI started, not launcher={placement.launcher}: choose launcher=mpirun, "
            "or launcher=slurm with slurm.ranks_by=mpirun"
        )
    # PyTorch's PowerSGD waits for an exchange inside the callback of another, which these two carry out in one thread: it would hang.
    if placement.ddp.hook == "powersgd" and backend in ("shm", "mpi"):
        raise InputError(f"ddp.hook=powersgd does not go with backend={backend}: choose backend=gloo")


def _check_strategy(placement: Placement) -> None:
    strategy, ranks = placement.strategy, placement.ranks
    if strategy == "hsdp":
        raise InputError(
            "strategy=hsdp is strategy=fsdp with several groups of ranks: choose strategy=fsdp fsdp.replicas=2"
        )
    if strategy not in STRATEGIES and ":" not in strategy:
        raise InputError(
            f"strategy={strategy}: no such strategy; known: {', '.join([*STRATEGIES, *offered.names('strategy')])}, "
            "or your own as path/to/file.py:Class"
        )
    if strategy == "dp" and placement.device == "cpu":
        raise InputError(
            "strategy=dp divides a batch over the GPUs of one process, and a CPU is one device, whose cores threads=N "
            "already uses: choose strategy=ddp with ranks=2, or leave strategy out"
        )
    if strategy in ("ddp", "fsdp") and ranks == 1:
        raise InputError(
            f"strategy={strategy} exchanges between ranks, and there is one: add ranks=2, or strategy=auto"
        )
    if strategy == "dp" and ranks > 1:
        raise InputError(f"strategy=dp is one process for all GPUs, not ranks={ranks}: choose ranks=1, or strategy=ddp")
    if placement.zero and strategy in ("fsdp", "local-sgd", "diloco"):
        raise InputError(
            f"zero=true does not go with strategy={strategy}: choose strategy=ddp or flat, or leave zero out"
        )
    if placement.shares is not None and placement.ddp.static_graph:
        # Its first pass exchanges, and ranks may take different numbers of passes.
        raise InputError("shares does not go with ddp.static_graph=true: leave one of them out")
    if placement.shares is not None and strategy in ("local-sgd", "diloco"):
        raise InputError(
            f"shares does not go with strategy={strategy}, whose ranks train by themselves: choose strategy=ddp or flat"
        )
    _check_replicas(placement)
    if strategy == "single" and ranks > 1:
        raise InputError(f"strategy=single does not exchange gradients between ranks={ranks}: choose strategy=ddp")


def _check_replicas(placement: Placement) -> None:
    """Each replica of the model is divided over as many ranks as the others, and over several."""
    ranks, replicas = placement.ranks, placement.fsdp.replicas
    if placement.strategy != "fsdp" or replicas == 1:
        return
    possible = [str(number) for number in range(2, ranks) if ranks % number == 0]
    instead = f"choose fsdp.replicas={' or '.join(possible)}" if possible else "leave fsdp.replicas out"
    if ranks % replicas:
        raise InputError(f"fsdp.replicas={replicas} does not divide ranks={ranks}: {instead}")
    if replicas == ranks:
        raise InputError(
            f"fsdp.replicas={replicas} leaves each of ranks={ranks} the whole model, as strategy=ddp does: {instead}"
        )


def _check_shares_auto(recipe: Recipe, placement: Placement) -> None:
    """Which rank is slow shows in who waits for the exchange of gradients, so nothing else may make ranks wait for each other."""
    instead = "state them, for example shares=[3,1]"
    if recipe.compile:
        raise InputError(
            f"shares=auto does not go with compile=true, which compiles for the shares at the start: {instead}"
        )
    if placement.strategy == "fsdp":
        raise InputError(
            f"shares=auto does not go with strategy=fsdp, whose ranks wait for each other's weights: {instead}"
        )
    if recipe.regularize.batch_norm == "synchronised" and placement.ranks > 1:
        raise InputError(
            f"shares=auto does not go with regularize.batch_norm=synchronised, whose ranks wait for each other in every layer: {instead}"
        )


def check_number_formats(recipe: Recipe) -> None:
    """Refuse a format that this machine was seen to fail at."""
    known = facts.known()
    if known is not None and (wrong := formats.problem("fp32", known)):
        raise InputError(f"nothing can be trained on this CPU: {wrong} ('lockstep doctor' says more)")
    if recipe.precision != "fp32":
        formats.check(f"precision={recipe.precision}", recipe.precision.removeprefix("pure-"), "choose precision=fp32")
    if recipe.quantize != "off":
        formats.check(f"quantize={recipe.quantize}", "int8", "leave quantize out")


def _check_quantize(recipe: Recipe, placement: Placement) -> None:
    if recipe.precision != "fp32":
        raise InputError(f"quantize=qat trains in fp32, not precision={recipe.precision}: leave one of them out")
    for key in ("compile", "fused"):
        if getattr(recipe, key) is True:
            raise InputError(f"quantize=qat does not go with {key}=true: leave one of them out")
    if placement.strategy in ("fsdp", "dp"):
        raise InputError(f"quantize=qat does not go with strategy={placement.strategy}: choose strategy=ddp or flat")
    if placement.device != "cpu":
        raise InputError("quantize=qat tests its int8 model on CPU kernels: choose device=cpu")
