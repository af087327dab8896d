"""A prediction from what an attached command has shown (docs/attach.md): a fit made of its own steps, without running it again.

The steps are used as they were timed; the model adds what changes: ranks, link, and with them the exchange and the waiting. Of the ranks that were
seen, what their exchange takes beyond the closed form is kept, as in every fit. Only the all-reduce of this machine is measured, if it is not known.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lockstep.backends.costs import store
from lockstep.backends.costs.choose import BETWEEN_HOSTS
from lockstep.errors import InputError
from lockstep.machine.cpu import another_cpu, cpu_model
from lockstep.measure.environment import version_of
from lockstep.measure.phases import Rows, computing
from lockstep.measure.view import RunView
from lockstep.placement import DEFAULT_BUCKET_MB, Ddp, Placement
from lockstep.predict.compute import Compute, Point
from lockstep.predict.exchange import Software
from lockstep.predict.fit import Fit, Measured
from lockstep.predict.measure import MOST_NOISE, SHORTEST_S, Tell, exchange
from lockstep.predict.messages import Gradient, messages
from lockstep.predict.waiting import noise_of
from lockstep.recipe import Recipe
from lockstep.units import counted

# What ranks that fill a host take longer than one alone, where only one of the two was seen: two ranks that exchange nothing were 1.82 times as fast as one
# here (docs/benchmark-figures.md).
CONTENTION = 0.1
# Steps are compared with those next to them: a machine that changes its speed is no spread of single steps.
WINDOW = 16
FEWEST_STEPS = 20


@dataclass(frozen=True)
class Shown:
    """What an attached run has shown, before anything is measured."""

    name: str
    ranks: int
    """Of one host: it ran on one."""
    steps: int
    step: dict[str, float]
    """Mean seconds of each part of a step over the ranks."""
    late: list[list[float]]
    """Deviations of single steps, by rank, as shares."""
    passes: float
    """Backward passes of a step."""
    batch: int | None
    """Samples of a rank in a step, if they are known."""
    gradients: list[Gradient]
    timed: bool
    """Whether it is known when each gradient comes."""
    recipe: Recipe
    placement: Placement
    cores: int
    cpu: str
    created: float


def shown(run: RunView) -> Shown:
    """Raises InputError where there is nothing that a prediction could stand on."""
    spec, seen, name = run.spec(), run.attached(), run.id
    kind = seen.get("strategy")
    if kind == "dp":
        raise InputError(
            f"{name}: nn.DataParallel: one process computes for all devices, and no step shows what one rank takes: attach to it "
            "with DistributedDataParallel, or without either"
        )
    if kind == "fsdp":
        raise InputError(
            f"{name}: FSDP sends parts of parameters before every layer, and which ones was not seen: attach to it with one process, or with DDP"
        )
    if spec.placement.hosts > 1:
        raise InputError(
            f"{name}: it ran on {spec.placement.hosts} hosts, and the link between them is not known: attach to it on one host"
        )
    ranks = run.after_warmup()
    split, found = run.split(), run.gradients()
    if not split or len(ranks[0]) < FEWEST_STEPS:
        steps = len(ranks[0]) if split else 0
        raise InputError(
            f"{name}: {counted(steps, 'step')} after warm-up are too few to predict from: attach to {FEWEST_STEPS} or more"
        )
    if not found.get("bytes"):
        raise InputError(
            f"{name}: how large its gradients are was not seen, so nothing says what an exchange would take: attach to it once more"
        )
    collectives = float(seen.get("collectives") or 0)
    if len(split) > 1 and kind != "ddp" and not collectives:
        raise InputError(
            f"{name}: its {len(split)} ranks exchanged no gradients that the hooks could see: prove it first, lockstep verify -- COMMAND"
        )
    steps = int(seen.get("steps") or 0) or 1
    strategy = kind or ("ddp" if len(split) == 1 else "flat" if collectives < 2 * steps else "naive")
    device = spec.placement.device if spec.placement.device in BETWEEN_HOSTS else "cpu"
    backend: Any = BETWEEN_HOSTS[device] if spec.placement.backend == "auto" else spec.placement.backend
    ready = found["ready"]
    return Shown(
        name=name,
        ranks=len(split),
        steps=len(ranks[0]),
        step={part: float(np.mean([each[part] for each in split])) for part in split[0]},
        late=_late(ranks),
        passes=float(seen.get("backwards") or steps) / steps,
        batch=spec.plan.global_batch // len(split) or None,
        # Where it is not known when each comes, they come evenly, the last parameter's first: as DDP takes them to.
        gradients=[
            Gradient(bytes=size, ready=ready[number] if ready else 1 - number / len(found["bytes"]))
            for number, size in enumerate(found["bytes"])
        ],
        timed=bool(ready),
        recipe=spec.recipe,
        placement=Placement(
            ranks=len(split),
            threads=spec.placement.threads or 1,
            device=device,
            backend=backend,
            strategy=strategy,
            pin=False,
            ddp=Ddp(bucket_mb=float(seen.get("bucket_mb") or DEFAULT_BUCKET_MB)),
        ),
        cores=int(seen.get("cores") or 1),
        cpu=str(run.environment().get("cpu") or ""),
        created=spec.created,
    )


def _late(ranks: list[Rows]) -> list[list[float]]:
    """Each rank's working time in a step beside the mean of the steps around it."""
    seconds = computing(ranks)
    kept = seconds[:, : seconds.shape[1] // WINDOW * WINDOW].reshape(len(ranks), -1, WINDOW)
    found: list[list[float]] = (kept / kept.mean(axis=2, keepdims=True) - 1).reshape(len(ranks), -1).tolist()
    return found


def fit_of(seen: Shown, accumulation: int | None, tell: Tell, anew: bool = False) -> Fit:
    """`accumulation`: passes of a step, instead of those that were seen. `anew`: measure the all-reduce even if it is known."""
    placement = _host(seen)
    sent = messages(msgspec.structs.replace(placement, ranks=max(2, placement.ranks)), seen.gradients)
    with tempfile.TemporaryDirectory(prefix="lockstep-predict-") as scratch:
        software = exchange(placement, sent, Path(scratch) / "comms", tell, anew)
    return assembled(seen, placement, software, accumulation)


def _host(seen: Shown) -> Placement:
    """The ranks that a host holds: those that were seen on it; of a single process as many as there are cores for."""
    ranks = seen.ranks if seen.ranks > 1 else max(1, seen.cores // (seen.placement.threads or 1))
    return msgspec.structs.replace(seen.placement, ranks=ranks)


def assembled(seen: Shown, placement: Placement, software: list[Software], accumulation: int | None = None) -> Fit:
    step = seen.step
    times = accumulation / seen.passes if accumulation else 1.0
    alone = step["total"] - step["exchange"] - step["waiting"]
    seconds = times * (alone - step["optimizer"]) + step["optimizer"]
    samples = max(1.0, times * (seen.batch or 1))
    # An exchange can hide behind the last pass alone.
    point = Point(
        samples=samples, seconds=seconds, backward=step["backward"] / seen.passes, optimizer=step["optimizer"]
    )
    fills = seen.ranks == 1 or placement.ranks * (placement.threads or 1) >= seen.cores
    crowded = 1 + CONTENTION if fills else 1.0
    alone_s, sharing_s = (seconds, seconds * crowded) if seen.ranks == 1 else (seconds / crowded, seconds)
    beyond = step["exchange"] + step["waiting"] * seconds / alone
    return Fit(
        time=seen.created,
        seconds=0.0,
        machine=store.machine(),
        cores=seen.cores,
        lockstep=version_of("lockstep") or "unknown",
        recipe=seen.recipe,
        placement=placement,
        compute=Compute(
            ranks=placement.ranks,
            wrapper=0.0,
            alone=[msgspec.structs.replace(point, seconds=alone_s)],
            sharing=[msgspec.structs.replace(point, seconds=sharing_s)],
        ),
        together=[Measured(samples=int(samples), seconds=seconds + beyond, beyond=beyond, spread=SHORTEST_S)]
        if seen.ranks > 1
        else [],
        gradients=seen.gradients,
        software=software,
        noise=noise_of(seen.late, MOST_NOISE),
    )


def remarks(seen: Shown, accumulation: int | None) -> list[str]:
    """What the prediction stands on, and what it cannot know."""
    here = cpu_model()
    size = sum(gradient.bytes for gradient in seen.gradients)
    found = [
        f"Seen were {seen.steps:,} steps of {counted(seen.ranks, 'rank')}; each of more ranks takes as long for its own batch, so the global "
        f"batch grows with the ranks. {size / 1e6:.3g} MB of gradients are exchanged in a step."
    ]
    if seen.batch is None:
        found.append("The global batch is not known, so samples/s are not either: lockstep attach --batch N tells.")
    if seen.ranks == 1:
        found.append(
            f"One process shows neither DDP's own work nor what ranks of a host take from each other: the first is left out, the second is "
            f"taken to be {CONTENTION:.0%} of a step on a full host."
        )
        if _host(seen).ranks == 1 and seen.cores > 1:
            found.append(
                f"Its {counted(seen.placement.threads or 1, 'thread')} fill this host of {counted(seen.cores, 'core')}, so every rank has a host of its "
                "own: attach to it with OMP_NUM_THREADS=1 to ask about ranks of one thread."
            )
    else:
        found.append(
            f"What fewer ranks of a host would take was not seen: where these fill it, one alone is taken to be {CONTENTION:.0%} faster."
        )
    if not seen.timed:
        found.append("When each gradient comes was not seen (the model is compiled): evenly, from the last layer on.")
    if accumulation:
        found.append(
            f"A step was seen with {seen.passes:.3g} passes; {accumulation} passes are taken to be as long each."
        )
    if seen.cpu and another_cpu(seen.cpu, here):
        found.append(f"The steps are those of another machine ({seen.cpu}), the all-reduce is this one's ({here}).")
    return found
