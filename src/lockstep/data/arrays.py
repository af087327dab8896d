"""Batches of what are no images: vectors, sequences of tokens, several inputs. Laid down and drawn as images are, and taken as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data import DataSet
from lockstep.data.batches import Batches, Drawn, shared_tensor
from lockstep.data.inputs import Inputs
from lockstep.recipe import Recipe

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class ArrayBatches(Batches):
    """One split of a data set whose inputs are no images: they go to the model as they are, whole numbers as indices (int64)."""

    def __init__(
        self,
        inputs: Sequence[np.ndarray[Any, Any]],
        labels: np.ndarray[Any, Any],
        data: DataSet,
        recipe: Recipe,
        device: torch.device,
        memory_format: torch.memory_format,
    ) -> None:
        super().__init__(inputs[0], labels, data, recipe, device, memory_format)
        self._inputs = [self._images, *(shared_tensor(one).to(device) for one in inputs[1:])]
        self._keys = data.keys

    def take(self, low: int, high: int) -> tuple[Inputs, Tensor]:
        if self._order is None:
            # Copies: the files are mapped for reading, and a model may change its inputs in place.
            return self._ready([one[low:high].clone() for one in self._inputs]), self._labels[low:high].clone()
        return self._chosen(self._order[low:high])

    def _augmented(self, drawn: Drawn, part: slice) -> tuple[Inputs, Tensor]:
        return self._chosen(drawn.samples[part])

    def _chosen(self, samples: Tensor) -> tuple[Inputs, Tensor]:
        return self._ready([one.index_select(0, samples) for one in self._inputs]), self._labels.index_select(
            0, samples
        )

    def _ready(self, found: list[Tensor]) -> Inputs:
        found = [one.long() if one.dtype in _WHOLE else self._arranged(one) for one in found]
        if self._keys:
            return dict(zip(self._keys, found, strict=True))
        return found[0] if len(found) == 1 else tuple(found)

    def _arranged(self, one: Tensor) -> Tensor:
        return one.contiguous(memory_format=self._format) if one.dim() == 4 else one


def open_batches(
    data: DataSet, split: str, recipe: Recipe, device: torch.device, memory_format: torch.memory_format
) -> Batches:
    """The batches of a split, "train" or "test"."""
    train = split == "train"
    images, more = (data.train_images, data.train_more) if train else (data.test_images, data.test_more)
    labels = data.train_labels if train else data.test_labels
    if data.is_images:
        return Batches(images, labels, data, recipe, device, memory_format)
    return ArrayBatches([images, *more], labels, data, recipe, device, memory_format)
