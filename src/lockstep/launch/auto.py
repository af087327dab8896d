"""`backend=auto`: the fastest backend that `lockstep comms` measured on this machine for the model's gradients."""

from __future__ import annotations

import msgspec

from lockstep import models
from lockstep.comms import choose, store
from lockstep.placement import Placement
from lockstep.recipe import Recipe

# What each launcher can start; one that was not chosen either may become mpirun.
CANDIDATES = {
    "auto": ("gloo", "shm", "mpi"),
    "spawn": ("gloo", "shm"),
    "torchrun": ("gloo", "shm"),
    "mpirun": ("gloo", "shm", "mpi"),
}


def choose_backend(recipe: Recipe, placement: Placement) -> tuple[Placement, str]:
    """The placement with a backend, and why that one. What was not measured here (GPUs, several hosts) is left as it is."""
    here = placement.hosts == 1 and placement.device != "cuda" and placement.launcher in CANDIDATES
    if placement.backend != "auto" or placement.ranks == 1 or not here:
        return placement, ""
    if placement.ddp.hook == "powersgd":
        return msgspec.structs.replace(placement, backend="gloo"), "ddp.hook=powersgd works over gloo only"
    measured = any(cell.ranks == placement.ranks for cell in store.load())
    # Lazy layers on data of the user's own have no size yet: then the backend with the lowest latency.
    _, size = (models.trained_size(recipe) if measured else None) or (0, 0)
    backend, why = choose.best(size, placement.ranks, among=CANDIDATES[placement.launcher])
    return msgspec.structs.replace(placement, backend=backend), why
