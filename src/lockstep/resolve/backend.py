"""`backend=auto`: shared memory between ranks of one host, unless `lockstep comms` measured another to be faster for the model's gradients."""

from __future__ import annotations

from lockstep import models
from lockstep.backends.costs import choose, store
from lockstep.placement import Placement
from lockstep.recipe import Recipe

# What each launcher can start; one that was not chosen either may become mpirun.
CANDIDATES = {
    "auto": ("gloo", "shm", "mpi"),
    "spawn": ("gloo", "shm"),
    "torchrun": ("gloo", "shm"),
    "ray": ("gloo", "shm"),
    "mpirun": ("gloo", "shm", "mpi"),
}


def choose_backend(recipe: Recipe, placement: Placement, script: bool = False) -> tuple[str, str]:
    """The backend and why that one; the placement's device is known. Ranks of several hosts take the one that works everywhere."""
    if placement.backend != "auto":
        return placement.backend, ""
    everywhere = choose.BETWEEN_HOSTS[placement.device]
    if placement.ranks == 1:
        return everywhere, "one rank exchanges nothing"
    if placement.device == "cuda":
        return everywhere, "the backend for GPUs"
    if placement.hosts > 1 or placement.launcher not in CANDIDATES:
        return everywhere, "it works between hosts, where nothing was measured"
    if placement.ddp.hook == "powersgd":
        return everywhere, "ddp.hook=powersgd works over gloo only"
    if script:
        return everywhere, "what a training loop of your own exchanges is not known"
    measured = any(cell.ranks == placement.ranks for cell in store.load())
    # Lazy layers on data of the user's own have no size yet: then the backend with the lowest latency.
    _, size = (models.trained_size(recipe) if measured else None) or (0, 0)
    backend, why = choose.best(size, placement.ranks, among=CANDIDATES[placement.launcher])
    return backend, why.removeprefix(f"{backend}: ")
