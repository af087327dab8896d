"""What "auto" means on this machine: the one place that decides it, with a reason for each decision.

`run`, `verify`, `study`, `explain`, `predict` and scripts with a loop of their own all come here, so the same words mean the same
placement everywhere. A resolved placement resolves to itself. What cannot work is refused (checks.py).
May import backends/, models/, data/ and what is below them. Its door is `resolve`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from lockstep import models, offered
from lockstep.machine import facts
from lockstep.machine.cores import cores
from lockstep.machine.cuda import cuda_present
from lockstep.machine.formats import cap_line, precision_line
from lockstep.placement import FIRST_BUCKET_BYTES, LAUNCHERS, STRATEGIES, Ddp, Placement, elsewhere, ranks_per_host
from lockstep.recipe import Recipe
from lockstep.resolve import checks
from lockstep.resolve.backend import choose_backend
from lockstep.units import counted

__all__ = ["Resolved", "choose_backend", "choose_device", "resolve"]

Decision = tuple[Any, str]
"""A value, and why it is that one; "" where the user stated it."""


class Resolved(NamedTuple):
    """A recipe and a placement with nothing left to decide."""

    recipe: Recipe
    placement: Placement
    why: dict[str, str]
    """The reason for each setting that was decided here, by its key."""


def resolve(recipe: Recipe, placement: Placement, *, script: bool = False) -> Resolved:
    """Replace every "auto" by what it means here, and refuse what cannot work.

    `script`: the user's own loop trains, so what it exchanges is not known.
    """
    why: dict[str, str] = {}

    def decided(key: str, decision: Decision) -> dict[str, Any]:
        value, reason = decision
        if reason:
            why[key] = reason
        return {key: value}

    replace: Any = msgspec.structs.replace
    recipe, placement, named = _offered(recipe, placement)
    why |= named
    info = models.CATALOGUE.get(recipe.model)
    if info and info.batch_norm and recipe.regularize.batch_norm == "off":
        why["regularize.batch_norm"] = (
            f"model={recipe.model} has batch norm: over all ranks' samples, as one process computes it"
        )
        recipe = replace(recipe, regularize=replace(recipe.regularize, batch_norm="synchronised"))
    checks.check_hosts_divide(placement)
    # Which backends there are depends on the device, which launcher starts them on the backend.
    placement = replace(placement, **decided("device", choose_device(placement)))
    checks.check_device(placement)
    placement = replace(placement, **decided("backend", choose_backend(recipe, placement, script)))
    placement = replace(placement, **decided("launcher", _launcher(placement)))
    placement = replace(placement, **decided("strategy", _strategy(recipe, placement, script)))
    checks.check_placement(placement)
    checks.check_together(recipe, placement)
    why |= _unused_parameters(recipe, placement, script)
    placement = replace(
        placement,
        **decided("threads", _threads(placement)),
        **decided("memory_format", _memory_format(placement, script)),
    )
    recipe = replace(recipe, **decided("global_batch", _global_batch(recipe, placement)))
    return Resolved(recipe, placement, why | _number_formats(recipe, placement))


def _offered(recipe: Recipe, placement: Placement) -> Resolved:
    """Names that other packages offer become what they stand for: ranks import that, and the run's records say it."""
    found: dict[str, offered.Offer] = {}
    for key, name, ours in (
        ("model", recipe.model, models.CATALOGUE),
        ("strategy", placement.strategy, ("auto", *STRATEGIES)),
        ("launcher", placement.launcher, ("auto", *LAUNCHERS)),
    ):
        if name not in ours and (offer := offered.find(key, name)):
            found[key] = offer
    placed = {key: found[key].spec for key in ("strategy", "launcher") if key in found}
    if "model" in found:
        recipe = msgspec.structs.replace(recipe, model=found["model"].spec)
    return Resolved(
        recipe, msgspec.structs.replace(placement, **placed), {key: offer.why for key, offer in found.items()}
    )


def choose_device(placement: Placement) -> Decision:
    if placement.device != "auto":
        return placement.device, ""
    if elsewhere(placement):
        return "cpu", "what the cluster's nodes have is not known here"
    return ("cuda", "this machine has a usable GPU") if cuda_present() else ("cpu", "no usable CUDA on this machine")


def _launcher(placement: Placement) -> Decision:
    if placement.launcher != "auto":
        return placement.launcher, ""
    if placement.backend == "mpi":
        return "mpirun", "backend=mpi needs ranks that MPI started"
    if placement.hosts > 1 and not placement.emulated:
        return "torchrun", "several hosts, each with a command of its own"
    return ("spawn", "several ranks from one command") if placement.ranks > 1 else ("single", "one rank")


def _strategy(recipe: Recipe, placement: Placement, script: bool) -> Decision:
    """DDP sends a bucket while the next one is computed. Gradients that fit its first one are sent when backward is over, and flat does that
    with less around it (docs/shm.md). Whoever states a knob of DDP's means DDP; a net that would have to be built is not asked for its size.
    """
    if placement.strategy != "auto":
        return placement.strategy, ""
    if placement.ranks == 1:
        return "single", "one rank"
    size = None if script or placement.device != "cpu" or placement.ddp != Ddp() else models.published_size(recipe)
    if size and size[1] <= FIRST_BUCKET_BYTES:
        return (
            "flat",
            f"several ranks, and {size[1]:,} bytes of gradients are one message, with nothing left to overlap",
        )
    return "ddp", "several ranks"


def _unused_parameters(recipe: Recipe, placement: Placement, script: bool) -> dict[str, str]:
    """It stays auto: only a step of the model tells, and its ranks take one before they train (training/trial.py)."""
    open_ = placement.strategy == "ddp" and placement.ddp.find_unused_parameters == "auto"
    if not open_ or script or recipe.model in models.CATALOGUE or placement.ddp.static_graph:
        return {}
    return {"ddp.find_unused_parameters": "true where a trial pass before training leaves parameters out, else false"}


def _threads(placement: Placement) -> Decision:
    if placement.threads:
        return placement.threads, ""
    # Emulated hosts share this machine's cores.
    sharing = placement.ranks if placement.emulated else ranks_per_host(placement)
    here = cores()
    about = "of this machine, not of the cluster's nodes" if elsewhere(placement) else "of this host"
    return max(1, here // sharing), f"{counted(here, 'core')} {about}, divided by {counted(sharing, 'rank')}"


def _memory_format(placement: Placement, script: bool) -> Decision:
    """Measured on image batches with few channels: 1.4x a whole training step of the MNIST net (docs/training.md).

    One kind of layer would damage memory in it. A trial would not show that reliably, so models/memory.py keeps every such layer
    contiguous, in whichever model.
    """
    if placement.memory_format != "auto":
        return placement.memory_format, ""
    # A script decides for itself.
    reason = "pooling and convolution gradients are vectorised over it; layers unsafe in it stay contiguous"
    return "channels_last", "" if script else reason


def _global_batch(recipe: Recipe, placement: Placement) -> Decision:
    if recipe.batch_per_rank is None:
        return recipe.global_batch, ""
    batch = recipe.batch_per_rank * placement.ranks
    return batch, "the batch is stated per rank, so it is another recipe with another number of ranks"


def _number_formats(recipe: Recipe, placement: Placement) -> dict[str, str]:
    """What is known of the recipe's number format here, and which instructions the ranks have to do without."""
    on_this_cpu = placement.device == "cpu" and not elsewhere(placement)
    cap = cap_line(facts.known()) if on_this_cpu else None
    found = {"instructions": cap} if cap else {}
    if recipe.precision != "fp32":
        line = precision_line(recipe.precision, placement)
        found["precision"] = line.removeprefix(f"precision {recipe.precision}: ")
    return found
