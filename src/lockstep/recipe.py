"""The recipe: *what* is computed. It says nothing about machines.

The batch is the **global** batch. What each rank and each micro step gets is derived from the placement
(see `placement.plan`), so the same recipe computes the same thing wherever it runs.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lockstep.units import MOST

MOST_FLOAT = 1e30
Positive = Annotated[int, Meta(ge=1, le=MOST)]
NonNegative = Annotated[int, Meta(ge=0, le=MOST)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=MOST_FLOAT)]
PositiveFloat = Annotated[float, Meta(gt=0, le=MOST_FLOAT)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
Scalar = bool | int | float | str


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights move."""

    name: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    lr: PositiveFloat = 5e-4
    weight_decay: NonNegativeFloat = 0.0
    """adamw: decoupled (weights shrink by lr x decay); the others: coupled (decay x weight is added to the gradient)."""
    momentum: Fraction = 0.0
    nesterov: bool = False
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    alpha: Fraction = 0.99
    """rmsprop: the smoothing constant of the mean of squares."""
    eps: PositiveFloat = 1e-8
    clip_norm: PositiveFloat | None = None
    """Scale the whole gradient down to this norm where it is longer."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the learning rate goes over the run: a factor of `optimizer.lr` for each optimizer step."""

    name: Literal["constant", "step", "cosine", "onecycle"] = "constant"
    warmup_steps: NonNegative = 0
    """Rise linearly over the first N steps, before the schedule itself."""
    every_epochs: Positive = 1
    """step: multiply by `factor` every N epochs."""
    factor: Annotated[float, Meta(gt=0, le=1)] = 0.1
    final: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """cosine: where it ends, as a part of the learning rate."""
    peak_at: Annotated[float, Meta(gt=0, lt=1)] = 0.3
    """onecycle: when the learning rate is reached, as a part of the run."""
    start_div: PositiveFloat = 25.0
    """onecycle: it starts at lr / start_div …"""
    final_div: PositiveFloat = 1e4
    """… and ends at lr / start_div / final_div."""
    cycle_momentum: bool = True
    """onecycle: momentum (or Adam's beta1) goes the other way, from 0.95 to 0.85 and back, as PyTorch's does."""


class Regularize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What keeps a model from learning its training set by heart, beside `optimizer.weight_decay`."""

    l1: NonNegativeFloat = 0.0
    """Adds l1 x sum |w| to the loss, over weights of two or more dimensions."""
    l2: NonNegativeFloat = 0.0
    """Adds l2 / 2 x sum w² to the loss, over the same weights; with plain sgd the same as coupled weight decay on them."""
    label_smoothing: Fraction = 0.0
    dropout: Fraction = 0.0
    batch_norm: Literal["off", "synchronised", "per-rank"] = "off"
    """synchronised: mean and variance over the global micro batch of all ranks; per-rank: over each rank's own."""
    mixup: NonNegativeFloat = 0.0
    """Blend pairs of samples by a part drawn from Beta(mixup, mixup)."""


class Augment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Random changes of training images, drawn anew for each (seed, epoch, sample), whatever the placement."""

    crop: NonNegative = 0
    """Pad by N pixels on each side, and crop the image's own size at a random position."""
    flip: bool = False
    """Mirror every second image, left to right."""
    rotation: NonNegativeFloat = 0.0
    """Rotate by at most N degrees, either way."""
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Brightness, contrast and saturation each times a number within 1 ± jitter."""
    cutout: NonNegative = 0
    """Grey out a square of N x N pixels."""


class EarlyStopping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stop when the model no longer improves, and go back to the best weights."""

    patience: NonNegative = 0
    """Stop after N epochs without improvement; 0 disables early stopping."""
    min_delta: NonNegativeFloat = 0.0
    """The least improvement that counts."""
    on: Literal["test_loss", "test_accuracy"] = "test_loss"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is computed: model, data, global batch, optimizer, epochs, seed."""

    model: str = "mnist-convnet"
    model_args: dict[str, Scalar] = {}
    data: str = "mnist"
    normalize: Literal["half", "standard", "none"] = "half"
    """half: (x - 0.5) / 0.5; standard: by the train set's mean and deviation per channel; none: 0..1."""
    augment: Augment = Augment()
    loss: str = "cross-entropy"
    """cross-entropy, mse, bce (binary, of logits), next-token, or your own as path/to/file.py:function (docs/tasks.md)."""
    metrics: str = "auto"
    """What a model is judged by beside its loss, the first one first: accuracy, top5, mae, perplexity, your own as path/to/file.py:function,
    or several with commas between them; auto: what is usual for the loss."""
    train_limit: Positive | None = None
    """Use only the first N training samples (for trials)."""
    test_limit: Positive | None = None
    shuffle: bool = True
    global_batch: Positive = 32
    batch_per_rank: Positive | None = None
    """States the batch per rank instead. The global batch then grows with the ranks: another recipe each time."""
    epochs: Positive = 3
    max_steps: Positive | None = None
    """Stop after N optimizer steps in all, whatever `epochs` says."""
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    lr_rule: Literal["keep", "linear", "sqrt"] = "keep"
    """What becomes of `optimizer.lr` when the global batch is not `lr_batch`: keep it, or scale it by the ratio or its root."""
    lr_batch: Positive | None = None
    """The global batch that `optimizer.lr` was meant for."""
    precision: Literal["fp32", "bf16", "fp16", "pure-bf16", "pure-fp16"] = "fp32"
    """bf16 and fp16: mixed (autocast; weights stay fp32, fp16 with a loss scale); pure: weights too, to see why mixed is needed."""
    regularize: Regularize = Regularize()
    early_stopping: EarlyStopping = EarlyStopping()
    compile: bool = False
    """Compile the model with torch.compile; the time that takes is measured apart."""
    fused: bool | Literal["auto"] = "auto"
    """Convolution, ReLU and max-pool in one kernel of Lockstep's own, where it was measured to be faster (docs/kernels.md). True says so
    where that is in vain; auto is silent, and leaves it where something else needs the layers apart."""
    quantize: Literal["off", "qat"] = "off"
    """qat: train with fake quantization, and make and test an int8 model after every epoch (docs/quantization.md)."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 123


# What may change when a run goes on from a checkpoint: how long, not what. Kernels compute the same within rounding, as placements do.
MAY_CHANGE = ("epochs", "max_steps", "early_stopping", "fused")


def fuses(recipe: Recipe, device: str) -> bool:
    """Whether its model gets Lockstep's own kernels. Left to us, it does on a CPU, unless something needs the layers apart."""
    if recipe.fused != "auto":
        return recipe.fused
    return device == "cpu" and recipe.quantize == "off"


def global_terms(recipe: Recipe) -> Recipe:
    """The same recipe with its global batch stated, whatever it was stated by: what it is on another number of ranks too."""
    if recipe.batch_per_rank is None:
        return recipe
    meant = recipe.lr_batch or recipe.batch_per_rank if recipe.lr_rule != "keep" else recipe.lr_batch
    return msgspec.structs.replace(recipe, batch_per_rank=None, lr_batch=meant)


# Which settings each choice reads; one that is set and not read deserves a warning, never silence.
_READ_BY_OPTIMIZER = {
    "adam": ("beta1", "beta2", "eps"),
    "adamw": ("beta1", "beta2", "eps"),
    "sgd": ("momentum", "nesterov"),
    "rmsprop": ("alpha", "eps", "momentum"),
}
_READ_BY_SCHEDULE = {
    "constant": (),
    "step": ("every_epochs", "factor"),
    "cosine": ("final",),
    "onecycle": ("peak_at", "start_div", "final_div", "cycle_momentum"),
}


def unused_settings(recipe: Recipe) -> list[str]:
    """Settings that have no effect in this recipe; each one deserves a warning, never silence."""
    optimizer, schedule, stopping = recipe.optimizer, recipe.schedule, recipe.early_stopping
    always = ("name", "lr", "weight_decay", "clip_norm")
    found = _unread("optimizer", optimizer, "name", (*always, *_READ_BY_OPTIMIZER[optimizer.name]))
    found += _unread("schedule", schedule, "name", ("name", "warmup_steps", *_READ_BY_SCHEDULE[schedule.name]))
    if stopping.patience == 0:
        found += _unread("early_stopping", stopping, "patience", ("patience",))
    if optimizer.name == "sgd" and optimizer.nesterov and optimizer.momentum == 0:
        found.append("optimizer.nesterov=true has no effect with optimizer.momentum=0: set a momentum")
    if recipe.lr_rule == "keep" and recipe.lr_batch is not None:
        found.append(f"lr_batch={recipe.lr_batch} has no effect with lr_rule=keep: choose lr_rule=linear or sqrt")
    return found


def _unread(table: str, chosen: msgspec.Struct, because_of: str, read: tuple[str, ...]) -> list[str]:
    default = type(chosen)()
    return [
        f"{table}.{key}={getattr(chosen, key)} has no effect with {table}.{because_of}={getattr(chosen, because_of)}"
        for key in chosen.__struct_fields__
        if key not in read and getattr(chosen, key) != getattr(default, key)
    ]
