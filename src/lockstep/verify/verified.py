"""What `lockstep verify` has proven: one small file for each recipe and kind of placement, in the folder of runs.

    .verified/3f2a….json      recipe, placement, versions, when, how many checks and steps

`explain` reads it: only what was proven may be called proven.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from lockstep.measure.environment import version_of
from lockstep.plugins import source_digest
from lockstep.run import Spec, read_json, write_atomic, writing
from lockstep.task import own_functions

FOLDER = ".verified"
# How long, on how much of the data, with which luck, and how the batch and the learning rate were stated: not what is computed.
FREE = (
    "seed",
    "epochs",
    "max_steps",
    "train_limit",
    "test_limit",
    "early_stopping",
    "batch_per_rank",
    "lr_rule",
    "lr_batch",
)
# What of a placement decides which code computes and exchanges.
KIND = (
    "launcher",
    "hosts",
    "emulated",
    "ranks",
    "shares",
    "device",
    "backend",
    "strategy",
    "ddp",
    "fsdp",
    "local_sgd",
    "zero",
    "memory_format",
)


def record(root: Path, specs: Iterable[Spec], checks: int, steps: int) -> None:
    """Remember that these runs computed the same as one process."""
    for spec in specs:
        key = _key(spec)
        content = {**key, **_versions(), "time": time.time(), "checks": checks, "steps": steps}
        with writing(root / FOLDER):
            (root / FOLDER).mkdir(parents=True, exist_ok=True)
            write_atomic(root / FOLDER / f"{_digest(key)}.json", content)


def find(roots: Iterable[Path], spec: Spec, environment: dict[str, Any]) -> dict[str, Any] | None:
    """The proof of this run's recipe on its kind of placement, by the versions that it ran with."""
    name = f"{_digest(_key(spec))}.json"
    for root in roots:
        found = read_json(root / FOLDER / name)
        if found and all(found.get(key) == _plain(environment.get(key)) for key in ("torch", "lockstep")):
            return found
    return None


def _versions() -> dict[str, str | None]:
    return {
        "torch": _plain(version_of("torch")),
        "lockstep": _plain(version_of("lockstep")),
        "python": platform.python_version(),
    }


def _plain(version: str | None) -> str | None:
    """Without what the build is for: 2.13.0+cpu is 2.13.0 here and there."""
    return version.partition("+")[0] if version else None


def _key(spec: Spec) -> dict[str, Any]:
    recipe, placement = msgspec.to_builtins(spec.recipe), msgspec.to_builtins(spec.placement)
    computed = {key: value for key, value in recipe.items() if key not in FREE}
    computed["optimizer"] = {**computed["optimizer"], "lr": spec.plan.lr}
    kind = {key: placement[key] for key in KIND} | {"accumulates": spec.plan.accumulation > 1}
    # A proof does not outlive a change of a user's own file.
    sources = {
        name: source_digest(name)
        for name in (spec.recipe.model, spec.recipe.data, spec.placement.strategy, *own_functions(spec.recipe))
    }
    return {"recipe": computed, "placement": kind, "sources": {name: own for name, own in sources.items() if own}}


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
