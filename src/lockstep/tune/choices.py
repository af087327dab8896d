"""What can be chosen without another recipe: ranks, threads, backend, strategy, buckets, passes, layout, kernels; and what may change numbers, if that is allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lockstep.errors import InputError
from lockstep.machine import formats, inductor, shared_memory
from lockstep.models import CATALOGUE
from lockstep.placement import Ddp, Placement
from lockstep.recipe import Recipe

# A pass of fewer samples than this has nothing for a processor to do.
SMALLEST_PASS = 4
SMALL_BUCKET_MB = 4.0
# A compiled model takes this long to start, so it is tried where there is time for it.
COMPILING_S = 60.0

Settings = Mapping[str, Any]
Change = tuple[str, dict[str, Any]]
"""A factor, and the keys that are other values then."""


class Way(msgspec.Struct, frozen=True):
    """One way to train the recipe."""

    recipe: Recipe
    placement: Placement

    @property
    def cores(self) -> int:
        return self.placement.ranks * (self.placement.threads or 1)

    def with_(self, keys: Settings) -> Way:
        replace: Any = msgspec.structs.replace
        recipe, placement = self.recipe, self.placement
        for key, value in keys.items():
            if key in Recipe.__struct_fields__:
                recipe = replace(recipe, **{key: value})
            elif key == "ddp.bucket_mb":
                placement = replace(placement, ddp=replace(placement.ddp, bucket_mb=value))
            else:
                placement = replace(placement, **{key: value})
        return Way(recipe, placement)

    def words(self) -> list[str]:
        """All that was chosen and is not what anybody would get anyway."""
        recipe, placement = self.recipe, self.placement
        found: dict[str, Any] = {"ranks": placement.ranks, "threads": placement.threads}
        if placement.hosts > 1:
            hosts = f"emulated:{placement.hosts}" if placement.emulated else placement.hosts
            found = {"hosts": hosts, **found}
        if placement.ranks > 1:
            found |= {"backend": placement.backend, "strategy": placement.strategy}
            if placement.strategy == "ddp" and placement.ddp.bucket_mb != Ddp().bucket_mb:
                found["ddp.bucket_mb"] = placement.ddp.bucket_mb
        usual: dict[str, Any] = {"micro_batch": None, "memory_format": "channels_last"}
        found |= {key: getattr(placement, key) for key, value in usual.items() if getattr(placement, key) != value}
        usual = {"fused": "auto", "compile": False, "precision": "fp32"}
        found |= {key: getattr(recipe, key) for key, value in usual.items() if getattr(recipe, key) != value}
        return [f"{key}={written(value)}" for key, value in found.items()]


def written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def layouts(cores: int, batch: int, hosts: int) -> list[tuple[int, int]]:
    """Ranks and threads that fill the cores: one rank of all of them, two of half, …"""
    found = []
    ranks = 1
    while ranks <= cores:
        if batch % (ranks * hosts) == 0:
            found.append((ranks * hosts, max(1, cores // ranks)))
        ranks *= 2
    return found


def changes(
    way: Way, cores: Sequence[int], fixed: Collection[str], allow: Sequence[str], seconds: float
) -> Iterator[Change]:
    """Every change of one factor. `cores`: how many may be used; `fixed`: keys that the user has stated; `seconds`: the time that there is."""
    for factor, keys, follows in _changes(way.recipe, way.placement, cores, allow, seconds):
        if not any(key in fixed for key in keys):
            yield factor, {**{key: value for key, value in follows.items() if key not in fixed}, **keys}


def _changes(
    recipe: Recipe, placement: Placement, cores: Sequence[int], allow: Sequence[str], seconds: float
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The factor, what is changed, and what follows from it where nobody has stated it."""
    several, here = placement.ranks > 1, placement.hosts == 1
    now = (placement.ranks, placement.threads)
    alone: dict[str, Any] = {"backend": "auto", "strategy": "auto", "ddp.bucket_mb": 25.0, "micro_batch": None}
    hosts = 1 if here else placement.hosts
    found = dict.fromkeys(each for count in cores for each in layouts(count, recipe.global_batch, hosts))
    for ranks, threads in found:
        if (ranks, threads) == now:
            continue
        keys = {"ranks": ranks, "threads": threads}
        # One rank has no backend; several that were not tried yet take what usually is fastest.
        shared = here and not shared_memory.problem()
        usual = {} if several else {"backend": "shm" if shared else "gloo", "strategy": "ddp"}
        yield "ranks", keys, {**usual, "micro_batch": None} if ranks > 1 else alone
        if usual and ranks > 1:
            yield "ranks", keys, {**usual, "strategy": "flat", "micro_batch": None}
    if not here:
        one = {"hosts": 1, "emulated": False, "link": None, "rendezvous": None, "ranks": 1}
        yield "hosts", one, {"threads": max(cores), "launcher": "auto", **alone}
    if several:
        for backend in ("shm", "gloo") if here and not shared_memory.problem() else ():
            if backend != placement.backend:
                yield "backend", {"backend": backend}, {}
        for strategy in ("ddp", "flat"):
            if strategy != placement.strategy:
                yield "strategy", {"strategy": strategy}, {}
        if placement.strategy == "ddp":
            other = SMALL_BUCKET_MB if placement.ddp.bucket_mb != SMALL_BUCKET_MB else 25.0
            yield "bucket", {"ddp.bucket_mb": other}, {}
    for keys in _passes(recipe, placement):
        yield "passes", keys, {}
    other_layout = "contiguous" if placement.memory_format == "channels_last" else "channels_last"
    yield "memory_format", {"memory_format": other_layout}, {}
    yield "fused", {"fused": "auto" if recipe.fused is False else False}, {}
    if inductor.has_compiler() and (recipe.compile or seconds > 2 * COMPILING_S):
        yield "compile", {"compile": not recipe.compile}, {}
    if "precision" in allow:
        for precision in ("fp32", "bf16"):
            if precision != recipe.precision and _works(precision):
                yield "precision", {"precision": precision}, {}


def _passes(recipe: Recipe, placement: Placement) -> Iterator[dict[str, Any]]:
    """Half and a quarter of the samples in a pass, or all of them again."""
    # Statistics of batch norm are of a pass, so this would be another computation; a model of the user's own may have it too.
    info = CATALOGUE.get(recipe.model)
    if info is None or info.batch_norm or recipe.regularize.batch_norm != "off" or placement.accumulation:
        return
    share = recipe.global_batch // placement.ranks
    micro = placement.micro_batch or share
    for passes in (micro // 2, micro // 4, share):
        if passes != micro and passes >= min(SMALLEST_PASS, share) and share % passes == 0:
            yield {"micro_batch": None if passes == share else passes}


def _works(precision: str) -> bool:
    if precision == "fp32":
        return True
    try:
        formats.check(f"precision={precision}", precision, "")
    except InputError:
        return False
    return True
