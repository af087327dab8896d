"""Where to fit: the ranks of one host of the requested placement, on this machine."""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.backends.costs.choose import BETWEEN_HOSTS
from lockstep.errors import InputError
from lockstep.machine.cores import cores
from lockstep.placement import Placement, ranks_per_host
from lockstep.predict.messages import check_known
from lockstep.recipe import Recipe
from lockstep.resolve import choose_backend, choose_device, resolve
from lockstep.run import Spec


def as_asked(spec: Spec) -> Placement:
    """A run's placement, but for a backend that was not stated: what is best for its ranks need not work between hosts."""
    return msgspec.structs.replace(spec.placement, backend="auto") if "backend" in spec.why else spec.placement


def here(
    recipe: Recipe, placement: Placement, batch: int | None = None, weak: bool = False
) -> tuple[Recipe, Placement, list[str]]:
    """Recipe and placement to fit with, resolved; and what differs from the requested ones. What cannot be compared is refused, before anything
    is measured for it: `batch` is predicted instead of the recipe's; with `weak` it is that of one rank."""
    if placement.ranks % placement.hosts:
        raise InputError(f"ranks={placement.ranks} do not divide over hosts={placement.hosts}")
    own = recipe.global_batch if recipe.batch_per_rank is None else recipe.batch_per_rank * placement.ranks
    least = 2 if batch else max(2, placement.ranks)  # a batch that is asked about is that of any number of ranks
    if not weak and (batch or own) < least:
        raise InputError(
            f"global_batch={batch or own} leaves some of {least} ranks without a sample: make it {least} or more, or add --weak to "
            "predict with this batch for each rank"
        )
    recipe = msgspec.structs.replace(recipe, batch_per_rank=None, global_batch=own)
    ranks, threads, remark = _one_host(placement)
    strategy = "auto" if placement.strategy == "single" or ranks == 1 else placement.strategy
    chosen: dict[str, Any] = {"launcher": "auto", "hosts": 1, "emulated": False, "link": None, "rendezvous": None}
    chosen |= {"micro_batch": None, "accumulation": None, "max_restarts": 0, "strategy": strategy}
    placement = msgspec.structs.replace(placement, device=choose_device(placement)[0])
    remarks = [remark] if remark else []
    # A prediction is about more hosts than this one, so a backend that nobody has stated is the one that works between them.
    if placement.backend == "auto":
        chosen["backend"] = BETWEEN_HOSTS[placement.device]
        within = choose_backend(
            recipe, msgspec.structs.replace(placement, **{**chosen, "backend": "auto"}, ranks=ranks)
        )[0]
        if ranks > 1 and within != chosen["backend"]:
            remarks.append(
                f"predicted over {chosen['backend']}, which works between hosts; backend={within} predicts ranks of this one"
            )
    placement = msgspec.structs.replace(placement, **chosen, ranks=ranks, threads=threads)
    recipe, placement, _ = resolve(recipe, placement)
    if ranks > 1:
        check_known(placement, recipe.regularize.batch_norm == "synchronised")
    return recipe, placement, remarks


def _one_host(placement: Placement) -> tuple[int, int | None, str]:
    """Ranks and threads. One rank alone says nothing about how several share a host, so then the host is filled."""
    threads = placement.threads
    if placement.emulated:
        return placement.ranks, threads, ""  # they share this machine, so this is how they were measured
    if placement.hosts > 1 or placement.ranks > 1:
        return ranks_per_host(placement), threads, ""
    ranks = cores() // (threads or 1)
    if ranks < 2 <= cores():
        return cores(), 1, f"one rank of {threads} threads fills this host: predicted are ranks of one thread"
    return max(1, ranks), threads, ""
