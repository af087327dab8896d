"""A fit: what was measured of one recipe on this machine, and where it is kept (next to the measurements of `lockstep comms`)."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lockstep.backends.costs import store
from lockstep.placement import Placement
from lockstep.plugins import source_digest
from lockstep.predict.compute import Compute, Parts
from lockstep.predict.exchange import Software
from lockstep.predict.messages import ROUNDS, Gradient, Norm
from lockstep.predict.waiting import Noise
from lockstep.recipe import Optimizer, Recipe
from lockstep.run import read_json, write_atomic
from lockstep.task import own_functions

FORMAT = 4
# The keys that a step's time depends on. Seeds, learning rates and numbers of epochs do not change it.
_RECIPE = (
    "model",
    "model_args",
    "data",
    "normalize",
    "augment",
    "precision",
    "regularize",
    "compile",
    "fused",
    "quantize",
)
_PLACEMENT = ("ranks", "threads", "pin", "device", "backend", "strategy", "ddp", "zero", "memory_format")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A training step of all ranks of this host together."""

    samples: int
    """Of one rank."""
    seconds: float
    beyond: float
    """How much longer it takes than the same step without exchange: the median over rounds."""
    spread: float
    """The standard error of `beyond`."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a prediction needs."""

    format: int = FORMAT
    time: float
    seconds: float
    """How long the fit took."""
    machine: dict[str, Any]
    cores: int
    recipe: Recipe
    placement: Placement
    """The measured placement: the ranks of one host, on this machine."""
    compute: Compute
    together: list[Measured]
    gradients: list[Gradient]
    norms: list[Norm] = []
    """Layers whose ranks exchange in forward and backward: synchronised batch norm."""
    updates: list[tuple[int, float]] = []
    """Where the optimizer is divided: ranks, and what the largest part's update takes, as a share of the whole one."""
    software: list[Software]
    crowding_s: float = 0.0
    """What a hop within a host takes longer if two ranks share each of its cores: whoever is needed next has to get one first."""
    noise: Noise
    """Deviations of single steps of ranks that wait for nobody."""
    cores_had: float | None = None
    """The share of its cores that the fit had (machine/starving.py)."""
    lockstep: str = "unknown"
    """The version that measured."""

    @property
    def spare(self) -> bool:
        """Whether the ranks leave the host a core for moving data."""
        return self.placement.device == "cuda" or self.placement.ranks * (self.placement.threads or 1) < self.cores

    @property
    def room(self) -> int:
        """How many ranks of a host compute at the same time; more of them take turns."""
        fitting = self.cores // (self.placement.threads or 1)
        return self.compute.ranks if self.placement.device == "cuda" else max(self.compute.ranks, fitting)

    def parts(self, micro: float, accumulation: int, sharing: int) -> Parts:
        """A step of `accumulation` passes of `micro` samples without exchange, on a host with N ranks."""
        return self.compute.parts(micro, accumulation, sharing, self.room)

    def software_for(self, ranks: int, collective: str) -> Software:
        """As measured with the most ranks, but no more than this many if there is such a measurement."""
        known = [one for one in self.software if one.collective == collective]
        fewer = [one for one in known if one.ranks <= ranks]
        return max(fewer or known, key=lambda one: one.ranks)

    def update(self, ranks: int) -> float:
        """What an update of one of N parts takes, as a share of the whole one: linear in the part's size."""
        if not self.updates:
            return 1.0
        parts, shares = zip(*((1 / count, share) for count, share in sorted(self.updates, reverse=True)), strict=True)
        return float(np.interp(1 / ranks, parts, shares))


def folder() -> Path:
    """Fits and checks of machines like this one."""
    return store.folder().parent / "predict" / store.fingerprint()


def key(recipe: Recipe, placement: Placement) -> str:
    """The name of a fit: the same for all recipes and placements (of one host) whose steps take the same time."""
    chosen = [msgspec.to_builtins(recipe)[name] for name in _RECIPE]
    chosen += [msgspec.to_builtins(placement)[name] for name in _PLACEMENT]
    chosen += [recipe.optimizer.name, recipe.optimizer.clip_norm is None, *_updates(recipe.optimizer)]
    if placement.strategy in ROUNDS and placement.ranks > 1:
        chosen += [placement.local_sgd.every, placement.local_sgd.warm_start]
    chosen += [source_digest(recipe.model), source_digest(recipe.data), *map(source_digest, own_functions(recipe))]
    chosen += [recipe.loss] if recipe.loss != Recipe().loss else []
    return hashlib.sha256(msgspec.json.encode(chosen)).hexdigest()[:16]


def _updates(optimizer: Optimizer) -> list[bool]:
    """What makes an update more work: a momentum has a buffer, a decay is added to every gradient."""
    has_momentum = optimizer.name in ("sgd", "rmsprop") and optimizer.momentum > 0
    return [has_momentum, has_momentum and optimizer.nesterov, optimizer.weight_decay > 0]


def load(recipe: Recipe, placement: Placement, where: Path | None = None) -> Fit | None:
    """The fit of a resolved placement of one host; None where there is none, or one of another format."""
    content = read_json((where or folder()) / f"{key(recipe, placement)}.json")
    if not content or content.get("format") != FORMAT:
        return None
    try:
        return msgspec.convert(content, type=Fit)
    except msgspec.ValidationError:
        return None


def save(fit: Fit, where: Path | None = None) -> Path:
    path = (where or folder()) / f"{key(fit.recipe, fit.placement)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.to_builtins(fit))
    return path


def age(fit: Fit) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(fit.time))
