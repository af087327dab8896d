"""The placement: *where* a recipe is computed. It never changes the mathematics.

Here too lives the batch algebra, `global_batch = ranks x micro_batch x accumulation`, and what "auto" comes to
on this machine.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from lockstep.errors import InputError
from lockstep.recipe import Positive, PositiveFloat, Recipe

STRATEGIES = ("single", "ddp")


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it is computed: launcher, hosts x ranks x threads, device, backend, strategy, micro batch."""

    launcher: Literal["auto", "single", "spawn", "torchrun"] = "auto"
    hosts: Positive = 1
    ranks: Positive = 1
    """All ranks together, over all hosts."""
    threads: Positive | None = None
    """Threads of one rank; unstated, the host's cores divided by its ranks."""
    pin: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    strategy: str = "auto"
    """single, ddp, or your own as path/to/file.py:Class (see docs/placements.md)."""
    micro_batch: Positive | None = None
    """Samples in one forward pass of one rank; unstated, the rank's whole share of the global batch."""
    accumulation: Positive | None = None
    """Forward passes per optimizer step; another way to state micro_batch."""
    eval_batch: Positive = 1000
    memory_format: Literal["auto", "channels_last", "contiguous"] = "auto"
    rendezvous: str | None = None
    """HOST:PORT where ranks of several hosts meet (torchrun); on one host a free port is taken."""
    timeout_s: PositiveFloat = 60.0
    """How long a rank waits for the others before it gives up."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The batch algebra of one recipe on one placement, worked out."""

    ranks: int
    global_batch: int
    micro_batch: int
    accumulation: int
    train_samples: int
    test_samples: int
    steps_per_epoch: int
    last_batch: int
    """Samples in the last global batch of an epoch; smaller than the others where the set does not divide."""
    total_steps: int

    def line(self) -> str:
        """The one line that every run starts with."""
        last = f" (last batch {self.last_batch})" if self.last_batch != self.global_batch else ""
        return (
            f"global batch {self.global_batch} = {self.ranks} ranks x {self.micro_batch} micro batch x "
            f"{self.accumulation} accumulation; {self.steps_per_epoch} steps an epoch{last}, {self.total_steps} in all"
        )


def cores() -> int:
    """Cores this process may use: what a container or taskset left us, not what the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def cuda_present() -> bool:
    """Whether CUDA can be had, judged without importing torch: a device node, and a torch built for CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    library = Path(spec.submodule_search_locations[0]) / "lib" / "libtorch_cuda.so"
    return library.exists() and Path("/dev/nvidiactl").exists()


def resolve(recipe: Recipe, placement: Placement) -> tuple[Recipe, Placement]:
    """Replace every "auto" by what it means here, and refuse what cannot work."""
    ranks, hosts = placement.ranks, placement.hosts
    if ranks % hosts:
        raise InputError(
            f"ranks={ranks} do not divide over hosts={hosts}: choose ranks={hosts * max(1, ranks // hosts)}"
        )
    launcher = placement.launcher
    if launcher == "auto":
        launcher = "torchrun" if hosts > 1 else "spawn" if ranks > 1 else "single"
    if launcher == "single" and ranks > 1:
        raise InputError(f"launcher=single has one rank, not ranks={ranks}: choose launcher=spawn or launcher=torchrun")
    if launcher in ("single", "spawn") and hosts > 1:
        raise InputError(f"launcher={launcher} stays on one host, not hosts={hosts}: choose launcher=torchrun")
    if hosts > 1 and placement.rendezvous is None:
        raise InputError(f"hosts={hosts} need a meeting point: add rendezvous=FIRST_HOST:29500")
    if placement.rendezvous is not None:
        if launcher != "torchrun":
            raise InputError(
                f"rendezvous has no effect with launcher={launcher}: leave it out, or use launcher=torchrun"
            )
        split_address(placement.rendezvous)
    device = placement.device
    if device == "auto":
        device = "cuda" if cuda_present() else "cpu"
    elif device == "cuda" and not cuda_present():
        raise InputError(
            "device=cuda, but this machine has no usable CUDA: choose device=cpu ('lockstep doctor' says more)"
        )
    backend = placement.backend
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    elif backend == "nccl" and device == "cpu":
        raise InputError("backend=nccl works on CUDA only: choose backend=gloo for device=cpu")
    strategy = placement.strategy
    if strategy == "auto":
        strategy = "ddp" if ranks > 1 else "single"
    if strategy not in STRATEGIES and ":" not in strategy:
        raise InputError(
            f"strategy={strategy}: no such strategy; known: {', '.join(STRATEGIES)}, or your own as path/to/file.py:Class"
        )
    if strategy == "single" and ranks > 1:
        raise InputError(f"strategy=single does not exchange gradients between ranks={ranks}: choose strategy=ddp")
    batch = recipe.global_batch if recipe.batch_per_rank is None else recipe.batch_per_rank * ranks
    memory_format = placement.memory_format
    if memory_format == "auto":
        # Measured on 4-D image batches with few channels: pooling and convolution gradients are vectorised over
        # channels-last memory, 1.4x a whole training step of the MNIST net (docs/training.md).
        memory_format = "channels_last"
    resolved = msgspec.structs.replace(
        placement,
        launcher=launcher,
        threads=placement.threads or max(1, cores() // (ranks // hosts)),
        device=device,
        backend=backend,
        strategy=strategy,
        memory_format=memory_format,
    )
    return msgspec.structs.replace(recipe, global_batch=batch), resolved


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
    found = [str(d) for d in range(1, number + 1) if number % d == 0]
    return "one of " + ", ".join(found if len(found) <= 12 else [*found[:6], "…", *found[-5:]])


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair, or an error that names the option."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"rendezvous={address!r} is not HOST:PORT, for example rendezvous=10.0.0.1:29500")
    return host, int(port)


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
