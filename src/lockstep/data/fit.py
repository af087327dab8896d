"""Whether a data set has what the recipe's loss and settings need; asked before anything starts."""

from __future__ import annotations

import numpy as np

from lockstep.data import DataSet
from lockstep.errors import InputError
from lockstep.recipe import Augment, Recipe


def check(recipe: Recipe, data: DataSet) -> None:
    """One line for what does not go together."""
    _check_inputs(recipe, data)
    targets, name = data.train_labels, f"data={recipe.data}"
    what = f"{name} has targets {targets.dtype} of shape {('N', *targets.shape[1:])}".replace("'", "")
    classes = targets.dtype.kind in "iu"
    if recipe.loss in ("cross-entropy", "next-token") and not classes:
        raise InputError(
            f"loss={recipe.loss} needs classes, whole numbers from 0 on; {what}: choose loss=mse or loss=bce"
        )
    if recipe.loss == "next-token" and not (
        data.train_images.dtype.kind in "iu" and data.train_images.shape == targets.shape
    ):
        raise InputError(
            f"loss=next-token needs sequences of tokens, whole numbers (N, T), and the tokens that follow them; {name} has inputs "
            f"{data.train_images.dtype} of shape {('N', *data.shape)}".replace("'", "")
        )
    tokens = data.train_images.dtype.kind in "iu" and not data.is_images and data.train_images.shape == targets.shape
    if recipe.loss == "cross-entropy" and tokens and targets.ndim == 2:
        raise InputError(f"{name} has tokens, and a token that follows each: choose loss=next-token")
    if recipe.loss == "bce":
        for labels in (data.train_labels, data.test_labels):
            if labels.min() < 0 or labels.max() > 1:
                raise InputError(f"loss=bce needs targets from 0 to 1; {name} has {labels.min():g} to {labels.max():g}")
    if data.class_weights and recipe.loss not in ("cross-entropy", "next-token"):
        raise InputError(f"class_weights of {name} are for classes, not for loss={recipe.loss}: leave them out")
    if data.class_weights and recipe.regularize.mixup:
        raise InputError(f"regularize.mixup does not go with the class_weights of {name}: leave one of them out")


def _check_inputs(recipe: Recipe, data: DataSet) -> None:
    """What Lockstep does to images it does to nothing else, not to labels that are pictures either."""
    if data.is_images:
        dense = data.train_labels.ndim > 1
        if dense and (recipe.augment != Augment() or recipe.regularize.mixup):
            setting = "regularize.mixup" if recipe.regularize.mixup else "augment"
            raise InputError(
                f"{setting} changes images, and would leave the labels of data={recipe.data}, of shape "
                f"{('N', *data.train_labels.shape[1:])}, as they are: leave it out".replace("'", "")
            )
        return
    inputs = f"data={recipe.data} has inputs {data.train_images.dtype} of shape {('N', *data.shape)}".replace("'", "")
    if recipe.augment != Augment():
        changed = next(
            key for key in Augment.__struct_fields__ if getattr(recipe.augment, key) != getattr(Augment(), key)
        )
        raise InputError(f"augment.{changed} changes images in bytes; {inputs}: leave it out")
    if recipe.regularize.mixup:
        raise InputError(f"regularize.mixup blends images in bytes; {inputs}: leave it out")
    if recipe.normalize == "standard":
        raise InputError(
            f"normalize=standard is for images in bytes; {inputs}: normalize them in your data, and leave it out"
        )
    if recipe.quantize != "off":
        raise InputError(f"quantize={recipe.quantize} is for images in bytes; {inputs}: leave it out")


def remarks(recipe: Recipe, data: DataSet) -> list[str]:
    """What the recipe says and this data set has no use for."""
    if data.is_images or recipe.normalize == "none" or np.issubdtype(data.train_images.dtype, np.integer):
        return []
    return [f"inputs are taken as they are: normalize={recipe.normalize} is for images in bytes"]
