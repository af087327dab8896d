"""The placement: *where* a recipe is computed. It never changes the mathematics, but for the few strategies and hooks that
say so of themselves (`changes_mathematics`), and they are marked wherever they appear.

What "auto" comes to on this machine is in resolve/, how ranks divide a batch in plan.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lockstep.errors import InputError
from lockstep.recipe import NonNegative, Positive, PositiveFloat, Recipe

# Far more than any cluster has: what is beyond it is a slip of the keyboard, and planning it would take hours.
Ranks = Annotated[int, Meta(ge=1, le=100_000)]
# PyTorch's own. Left unstated, DDP starts with a small bucket, so that the exchange begins early.
DEFAULT_BUCKET_MB = 25.0
FIRST_BUCKET_BYTES = 1 << 20
LAUNCHERS = ("single", "spawn", "torchrun", "mpirun", "slurm", "ray")
STRATEGIES = ("single", "ddp", "flat", "naive", "dp", "fsdp", "local-sgd", "diloco")


class Ddp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of DistributedDataParallel."""

    bucket_mb: PositiveFloat = DEFAULT_BUCKET_MB
    """Gradients are exchanged in buckets of about this size."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    bucket_view: bool = True
    """Let gradients be views into the buckets instead of copies."""
    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compress what is exchanged. This changes the mathematics."""
    powersgd_rank: Positive = 1
    find_unused_parameters: bool | Literal["auto"] = "auto"
    """Look after each forward pass which parameters it did not use, at the cost of a walk through the graph; auto: where a trial step leaves some out."""


class Fsdp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knob of fully_shard."""

    replicas: Positive = 1
    """HSDP: N groups of neighbouring ranks; each group divides the whole model among its ranks, and the groups exchange gradients."""


class LocalSgd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks that train alone and average their weights now and then. This changes the mathematics."""

    every: Positive = 8
    """Steps between two averages."""
    warm_start: NonNegative = 0
    """The first N steps exchange gradients every step, as ddp does."""
    outer_lr: PositiveFloat = 0.7
    """diloco: the outer optimizer's step along the average of what the ranks learnt …"""
    outer_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """… and its Nesterov momentum."""


class Slurm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the sbatch script asks the cluster for, beyond hosts, ranks and threads."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    """Time limit as Slurm writes it, for example 00:30:00."""
    gres: str | None = None
    """For example gpu:4."""
    ranks_by: Literal["srun", "torchrun", "mpirun"] = "srun"
    """Whether srun starts every rank, or one torchrun per host, or mpirun of the job's first host."""
    mpi: str | None = None
    """srun's --mpi, for backend=mpi: pmi2 for MPICH, pmix for Open MPI."""
    directives: list[str] = []
    """More lines for the script, without the leading #SBATCH, for example --exclusive."""
    setup: list[str] = []
    """Shell lines before the ranks start, for example module load cuda."""
    requeue: bool = False
    """Whether a job that has to give way keeps a checkpoint, queues again and goes on as the same run."""
    grace: Annotated[int, Meta(ge=1, le=65_535)] = 60
    """With requeue: how many seconds before its time limit a job keeps its checkpoint and queues again."""


class Ray(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where `launcher=ray` finds its cluster."""

    address: str | None = None
    """HOST:PORT of a running Ray cluster, or auto for the one that this machine is a node of; unstated, a Ray of its own on this host."""


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it is computed: launcher, hosts x ranks x threads, device, backend, strategy, micro batch."""

    launcher: Annotated[
        str, Meta(extra_json_schema={"anyOf": [{"enum": ["auto", *LAUNCHERS]}, {"type": "string"}]})
    ] = "auto"
    """single, spawn, torchrun, mpirun, slurm, ray, or your own as path/to/file.py:starts (docs/extending.md)."""
    hosts: Ranks = 1
    """A number, or "emulated:N" for N hosts made of network namespaces on this machine (docs/emulated-hosts.md)."""
    emulated: bool = False
    link: str | None = None
    """What lies between emulated hosts: rate, delay and loss, for example "1gbit,0.5ms" or "100mbit,20ms,0.1%"."""
    ranks: Ranks = 1
    """All ranks together, over all hosts."""
    threads: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """Threads of one rank; unstated, the host's cores divided by its ranks."""
    pin: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl", "mpi", "shm"] = "auto"
    strategy: str = "auto"
    """single, ddp, flat, naive, dp, fsdp, local-sgd, diloco, or your own as path/to/file.py:Class (docs/strategies.md)."""
    ddp: Ddp = Ddp()
    fsdp: Fsdp = Fsdp()
    local_sgd: LocalSgd = LocalSgd()
    shares: Literal["auto"] | list[Positive] | None = None
    """How ranks of unequal speed divide each global batch: one number a rank, such as [3,1], or auto: as measured, and anew when that changes."""
    zero: bool = False
    """Divide the optimizer's state over the ranks (ZeRO-1)."""
    micro_batch: Positive | None = None
    """Samples in one forward pass of one rank; unstated, the rank's whole share of the global batch."""
    accumulation: Positive | None = None
    """Forward passes per optimizer step; another way to state micro_batch."""
    eval_batch: Positive = 1000
    memory_format: Literal["auto", "channels_last", "contiguous"] = "auto"
    rendezvous: str | None = None
    """HOST:PORT where ranks of several hosts meet (torchrun); on one host a free port is taken."""
    timeout_s: Annotated[float, Meta(gt=0, le=1e7)] = 60.0
    """How long a rank waits for the others before it gives up."""
    max_restarts: NonNegative = 0
    """How often torchrun starts all ranks again after one failed, from the newest checkpoint."""
    mpi: Literal["auto", "openmpi", "mpich"] = "auto"
    """Which MPI `launcher=mpirun` uses, where there are several."""
    slurm: Slurm = Slurm()
    ray: Ray = Ray()


def changes_mathematics(placement: Placement, recipe: Recipe | None = None) -> str | None:
    """What about this placement computes something else than one process would; None for nearly all of them.

    With the recipe also what that makes of it: batch norm, where its statistics are of fewer samples.
    """
    norm = recipe.regularize.batch_norm if recipe else "off"
    if norm != "off" and (placement.accumulation or placement.micro_batch):
        return "batch norm's statistics are of a micro batch, so accumulation makes another computation"
    if placement.ranks == 1:
        return None
    if norm == "per-rank":
        return "regularize.batch_norm=per-rank takes its statistics from each rank's own share"
    if placement.strategy in ("local-sgd", "diloco"):
        return f"strategy={placement.strategy} averages weights every {placement.local_sgd.every} steps, not gradients every step"
    if placement.strategy == "ddp" and placement.ddp.hook != "none":
        return f"ddp.hook={placement.ddp.hook} compresses the gradients that are exchanged"
    return None


def unknown_mathematics(placement: Placement) -> str | None:
    """What only a trial can tell: whether a strategy of the user's own computes what one process would."""
    if placement.ranks == 1 or placement.strategy in (*STRATEGIES, "auto"):
        return None
    return (
        f"strategy={placement.strategy} is your own: lockstep verify shows whether it computes what one process would"
    )


def unused_settings(placement: Placement) -> list[str]:
    """Settings that have no effect in this (resolved) placement; each one deserves a warning, never silence."""
    strategy = placement.strategy
    found = []
    # False is what runs of earlier versions have there, unasked.
    if strategy != "ddp" and placement.ddp not in (Ddp(), Ddp(find_unused_parameters=False)):
        found.append(f"ddp.* has no effect with strategy={strategy}")
    if strategy != "fsdp" and placement.fsdp != Fsdp():
        found.append(f"fsdp.* has no effect with strategy={strategy}")
    if strategy not in ("local-sgd", "diloco") and placement.local_sgd != LocalSgd():
        found.append(f"local_sgd.* has no effect with strategy={strategy}")
    if placement.ddp.powersgd_rank != 1 and placement.ddp.hook != "powersgd":
        found.append(f"ddp.powersgd_rank has no effect with ddp.hook={placement.ddp.hook}")
    if placement.launcher != "ray" and placement.ray != Ray():
        found.append(f"ray.* has no effect with launcher={placement.launcher}")
    if placement.zero and placement.ranks == 1:
        found.append("zero=true has no effect with one rank")
    if placement.shares is not None and placement.ranks == 1:
        found.append("shares has no effect with one rank")
    return found


def ranks_per_host(placement: Placement) -> int:
    return placement.ranks // placement.hosts


def elsewhere(placement: Placement) -> bool:
    """Whether the ranks run on machines of a cluster, of which this one need not be one."""
    return placement.launcher == "slurm" or (placement.launcher == "ray" and placement.ray.address is not None)


def one_command_per_host(placement: Placement) -> bool:
    """Whether the user starts each host's part; every other way starts all of them from one command."""
    return placement.launcher == "torchrun" and placement.hosts > 1 and not placement.emulated


def split_address(address: str, option: str = "rendezvous", example: str = "10.0.0.1:29500") -> tuple[str, int]:
    """HOST:PORT as a pair, or an error that names the option."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{option}={address!r} is not HOST:PORT, for example {option}={example}")
    return host, int(port)
