"""The recipe: *what* is computed. It says nothing about machines.

The batch is the **global** batch. What each rank and each micro step gets is derived from the placement
(see `placement.plan`), so the same recipe computes the same thing wherever it runs.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
Scalar = bool | int | float | str


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights move. Weight decay here is coupled (added to the gradient), as in `torch.optim.Adam`."""

    name: Literal["adam", "sgd"] = "adam"
    lr: PositiveFloat = 5e-4
    weight_decay: NonNegativeFloat = 0.0
    momentum: Fraction = 0.0
    nesterov: bool = False
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveFloat = 1e-8


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is computed: model, data, global batch, optimizer, epochs, seed."""

    model: str = "mnist-convnet"
    model_args: dict[str, Scalar] = {}
    data: str = "mnist"
    normalize: Literal["half", "standard", "none"] = "half"
    """half: (x - 0.5) / 0.5; standard: by the train set's mean and deviation per channel; none: 0..1."""
    train_limit: Positive | None = None
    """Use only the first so many training samples (for trials)."""
    test_limit: Positive | None = None
    shuffle: bool = True
    global_batch: Positive = 32
    batch_per_rank: Positive | None = None
    """States the batch per rank instead. The global batch then grows with the ranks: another recipe each time."""
    epochs: Positive = 3
    max_steps: Positive | None = None
    """Stop after so many optimizer steps in all, whatever `epochs` says."""
    optimizer: Optimizer = Optimizer()
    seed: Annotated[int, Meta(ge=0)] = 123


def unused_settings(recipe: Recipe) -> list[str]:
    """Settings that have no effect in this recipe; each one deserves a warning, never silence."""
    default, chosen = Optimizer(), recipe.optimizer
    ignored = {"adam": ("momentum", "nesterov"), "sgd": ("beta1", "beta2", "eps")}[chosen.name]
    found = [
        f"optimizer.{key}={getattr(chosen, key)} has no effect with optimizer.name={chosen.name}"
        for key in ignored
        if getattr(chosen, key) != getattr(default, key)
    ]
    if chosen.name == "sgd" and chosen.nesterov and chosen.momentum == 0:
        found.append("optimizer.nesterov=true has no effect with optimizer.momentum=0: set a momentum")
    return found
