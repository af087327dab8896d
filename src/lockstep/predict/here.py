"""Where to fit: the ranks of one host of the placement asked about, on this machine."""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.errors import InputError
from lockstep.launch.auto import choose_backend
from lockstep.placement import Placement, cores, ranks_per_host
from lockstep.predict.messages import check_known
from lockstep.recipe import Recipe
from lockstep.resolve import resolve


def here(recipe: Recipe, placement: Placement) -> tuple[Recipe, Placement, str]:
    """Recipe and placement to fit with, resolved; and a remark where the ranks are others than those asked about."""
    if placement.ranks % placement.hosts:
        raise InputError(f"ranks={placement.ranks} do not divide over hosts={placement.hosts}")
    batch = recipe.global_batch if recipe.batch_per_rank is None else recipe.batch_per_rank * placement.ranks
    recipe = msgspec.structs.replace(recipe, batch_per_rank=None, global_batch=batch)
    ranks, threads, remark = _one_host(placement)
    strategy = "auto" if placement.strategy == "single" or ranks == 1 else placement.strategy
    chosen: dict[str, Any] = {"launcher": "auto", "hosts": 1, "emulated": False, "link": None, "rendezvous": None}
    chosen |= {"micro_batch": None, "accumulation": None, "max_restarts": 0, "strategy": strategy}
    placement = msgspec.structs.replace(placement, **chosen, ranks=ranks, threads=threads)
    placement, _ = choose_backend(recipe, placement)
    recipe, placement = resolve(recipe, placement)
    if ranks > 1:
        check_known(placement)
    if recipe.regularize.batch_norm == "synchronised":
        raise InputError(
            "regularize.batch_norm=synchronised cannot be predicted (it exchanges in every layer): choose per-rank or off"
        )
    return recipe, placement, remark


def _one_host(placement: Placement) -> tuple[int, int | None, str]:
    """Ranks and threads. One rank by itself says nothing about how more of them would share a host, so there it is filled."""
    threads = placement.threads
    if placement.emulated:
        return placement.ranks, threads, ""  # they share this machine, so this is how they were measured
    if placement.hosts > 1 or placement.ranks > 1:
        return ranks_per_host(placement), threads, ""
    ranks = cores() // (threads or 1)
    if ranks < 2 <= cores():
        return cores(), 1, f"one rank of {threads} threads fills this host: predicted are ranks of one thread"
    return max(1, ranks), threads, ""
