"""The placement: *where* a recipe is computed. It never changes the mathematics, but for the few strategies and hooks that
say so of themselves (`changes_mathematics`), and they are marked wherever they appear.

Here too lives the batch algebra, `global_batch = ranks x micro_batch x accumulation`. What "auto" comes to on this
machine is in resolve/.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lockstep.errors import InputError
from lockstep.recipe import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Recipe
from lockstep.shapes import Count
from lockstep.units import counted

# Far more than any cluster has: what is beyond it is a slip of the keyboard, and planning it would take hours.
Ranks = Annotated[int, Meta(ge=1, le=100_000)]
STRATEGIES = ("single", "ddp", "flat", "naive", "dp", "fsdp", "local-sgd", "diloco")


class Ddp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of DistributedDataParallel."""

    bucket_mb: PositiveFloat = 25.0
    """Gradients are exchanged in buckets of about this size."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    bucket_view: bool = True
    """Let gradients be views into the buckets instead of copies."""
    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compress what is exchanged. This changes the mathematics."""
    powersgd_rank: Positive = 1
    find_unused_parameters: bool = False
    """Look after each forward pass which parameters it did not use. Needed where a step may leave some out; it costs a walk through the graph."""


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
    ranks_by: Literal["srun", "torchrun"] = "srun"
    """Whether srun starts every rank, or one torchrun per host."""
    mpi: str | None = None
    """srun's --mpi, for backend=mpi: pmi2 for MPICH, pmix for Open MPI."""
    directives: list[str] = []
    """More lines for the script, without the leading #SBATCH, for example --exclusive."""
    setup: list[str] = []
    """Shell lines before the ranks start, for example module load cuda."""


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it is computed: launcher, hosts x ranks x threads, device, backend, strategy, micro batch."""

    launcher: Literal["auto", "single", "spawn", "torchrun", "mpirun", "slurm"] = "auto"
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
    local_sgd: LocalSgd = LocalSgd()
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
    if strategy != "ddp" and placement.ddp != Ddp():
        found.append(f"ddp.* has no effect with strategy={strategy}")
    if strategy not in ("local-sgd", "diloco") and placement.local_sgd != LocalSgd():
        found.append(f"local_sgd.* has no effect with strategy={strategy}")
    if placement.ddp.powersgd_rank != 1 and placement.ddp.hook != "powersgd":
        found.append(f"ddp.powersgd_rank has no effect with ddp.hook={placement.ddp.hook}")
    if placement.zero and placement.ranks == 1:
        found.append("zero=true has no effect with one rank")
    return found


def ranks_per_host(placement: Placement) -> int:
    return placement.ranks // placement.hosts


def one_command_per_host(placement: Placement) -> bool:
    """Whether the user starts each host's part; every other way starts all of them from one command."""
    return placement.launcher == "torchrun" and placement.hosts > 1 and not placement.emulated


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair, or an error that names the option."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"rendezvous={address!r} is not HOST:PORT, for example rendezvous=10.0.0.1:29500")
    return host, int(port)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The batch algebra of one recipe on one placement, worked out."""

    ranks: Ranks
    global_batch: Count
    micro_batch: Count
    accumulation: Count
    train_samples: Count
    test_samples: Count
    steps_per_epoch: Count
    last_batch: Count
    """Samples in the last global batch of an epoch; smaller than the others where the set does not divide."""
    total_steps: Count
    lr: NonNegativeFloat = 0.0
    """The learning rate after `lr_rule`."""
    lr_note: str = ""

    def line(self) -> str:
        """The one line that every run starts with."""
        last = f" (last batch {self.last_batch})" if self.last_batch != self.global_batch else ""
        return (
            f"global batch {self.global_batch} = {counted(self.ranks, 'rank')} x {self.micro_batch} micro batch x "
            f"{self.accumulation} accumulation; {self.steps_per_epoch} steps an epoch{last}, {self.total_steps} in all"
        )


def plan(recipe: Recipe, placement: Placement, train_samples: int, test_samples: int) -> Plan:
    """Work out the batch algebra; a batch that does not divide is an error that quotes the numbers."""
    ranks, batch = placement.ranks, recipe.global_batch
    if batch % ranks:
        below, above = batch - batch % ranks, batch - batch % ranks + ranks
        options = f"{above}" if below == 0 else f"{below} or {above}"
        raise InputError(f"global_batch={batch} does not divide by ranks={ranks}: choose global_batch={options}")
    share = batch // ranks
    micro, accumulation = _micro(share, placement, ranks)
    train = min(train_samples, recipe.train_limit or train_samples)
    test = min(test_samples, recipe.test_limit or test_samples)
    steps = -(-train // recipe.global_batch)
    total = steps * recipe.epochs
    ratio, note = _lr_ratio(recipe)
    return Plan(
        ranks=ranks,
        global_batch=recipe.global_batch,
        micro_batch=micro,
        accumulation=accumulation,
        train_samples=train,
        test_samples=test,
        steps_per_epoch=steps,
        last_batch=train - (steps - 1) * recipe.global_batch,
        total_steps=min(total, recipe.max_steps or total),
        lr=recipe.optimizer.lr * ratio,
        lr_note=note,
    )


def _lr_ratio(recipe: Recipe) -> tuple[float, str]:
    """What the learning-rate rule makes of another global batch, and the words for it."""
    rule, batch, meant = recipe.lr_rule, recipe.global_batch, recipe.lr_batch or recipe.batch_per_rank
    if rule == "keep":
        return 1.0, ""
    if meant is None:
        raise InputError(
            f"lr_rule={rule} needs lr_batch: the global batch that optimizer.lr={recipe.optimizer.lr:g} was meant for"
        )
    ratio = batch / meant if rule == "linear" else (batch / meant) ** 0.5
    lr = recipe.optimizer.lr
    return (
        ratio,
        f"learning rate {lr:g} x {ratio:.4g} = {lr * ratio:.4g} ({rule} rule: global batch {batch}, meant for {meant})",
    )


def _micro(share: int, placement: Placement, ranks: int) -> tuple[int, int]:
    micro, accumulation = placement.micro_batch, placement.accumulation
    where = f"the share of one rank, {share} (global_batch / ranks={ranks})"
    if micro is None and accumulation is None:
        return share, 1
    if micro is None:
        assert accumulation is not None
        if share % accumulation:
            raise InputError(f"accumulation={accumulation} does not divide {where}: choose {_divisors(share)}")
        return share // accumulation, accumulation
    if share % micro:
        raise InputError(f"micro_batch={micro} does not divide {where}: choose {_divisors(share)}")
    if accumulation is not None and micro * accumulation != share:
        raise InputError(
            f"micro_batch={micro} x accumulation={accumulation} is not {where}: state one of the two and leave the other out"
        )
    return micro, share // micro


def _divisors(number: int) -> str:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = [str(d) for d in sorted({*small, *(number // d for d in small)})]
    return "one of " + ", ".join(found if len(found) <= 12 else [*found[:6], "…", *found[-5:]])


def share_of(total: int, part: int, parts: int) -> tuple[int, int]:
    """The half-open range of `total` items that belongs to `part`; the parts differ by at most one item."""
    return total * part // parts, total * (part + 1) // parts


def micro_shares(count: int, rank: int, plan: Plan) -> Iterator[tuple[int, int]]:
    """The micro batches of `rank` within a global batch of `count` samples, as ranges within that batch.

    A full batch gives `accumulation` ranges of `micro_batch` samples. A partial one gives fewer or shorter ones, down
    to a single empty range: a rank without samples must still take part in the exchange.
    """
    start, stop = share_of(count, rank, plan.ranks)
    if start == stop:
        yield start, start
    for low in range(start, stop, plan.micro_batch):
        yield low, min(low + plan.micro_batch, stop)
