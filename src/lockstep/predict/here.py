"""Where to fit: the ranks of one host of the requested placement, on this machine."""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.errors import InputError
from lockstep.machine.cores import cores
from lockstep.placement import Placement, ranks_per_host
from lockstep.predict.messages import check_known
from lockstep.recipe import Recipe
from lockstep.resolve import choose_backend, choose_device, resolve


def here(recipe: Recipe, placement: Placement) -> tuple[Recipe, Placement, str]:
    """Recipe and placement to fit with, resolved; and a remark if the ranks differ from the requested ones."""
    if placement.ranks % placement.hosts:
        raise InputError(f"ranks={placement.ranks} do not divide over hosts={placement.hosts}")
    batch = recipe.global_batch if recipe.batch_per_rank is None else recipe.batch_per_rank * placement.ranks
    recipe = msgspec.structs.replace(recipe, batch_per_rank=None, global_batch=batch)
    ranks, threads, remark = _one_host(placement)
    strategy = "auto" if placement.strategy == "single" or ranks == 1 else placement.strategy
    chosen: dict[str, Any] = {"launcher": "auto", "hosts": 1, "emulated": False, "link": None, "rendezvous": None}
    chosen |= {"micro_batch": None, "accumulation": None, "max_restarts": 0, "strategy": strategy}
    # Device and backend are those that a run of the request would use: a launcher cannot start every backend, and the
    # fastest backend within one host may not work between hosts.
    placement = msgspec.structs.replace(placement, device=choose_device(placement)[0])
    if placement.ranks > 1:
        chosen["backend"] = choose_backend(recipe, placement)[0]
    placement = msgspec.structs.replace(placement, **chosen, ranks=ranks, threads=threads)
    recipe, placement, _ = resolve(recipe, placement)
    if ranks > 1:
        check_known(placement)
    if recipe.regularize.batch_norm == "synchronised":
        raise InputError(
            "regularize.batch_norm=synchronised cannot be predicted (it exchanges in every layer): choose per-rank or off"
        )
    return recipe, placement, remark


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
