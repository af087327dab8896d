"""Resident data to batches: slices by a permutation, normalised on the whole batch. No per-sample Python.

The order of samples is drawn from (seed, epoch) alone, so global batch k is the same set of samples on every placement.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from lockstep.data import DataSet
from lockstep.recipe import Recipe


def sample_order(recipe: Recipe, epoch: int, count: int) -> torch.Tensor:
    """The order in which an epoch visits its samples; the same on every rank of every placement."""
    if not recipe.shuffle:
        return torch.arange(count)
    mixed = np.random.SeedSequence([recipe.seed, epoch]).generate_state(1, np.uint64)[0]
    generator = torch.Generator().manual_seed(int(mixed) & 0x7FFF_FFFF_FFFF_FFFF)
    return torch.randperm(count, generator=generator)


def shared_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The array's own memory as a tensor: all ranks of a host share the pages of one file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors; we never write to it
        return torch.from_numpy(array)


class Batches:
    """One split of a data set, resident, with the recipe's normalisation."""

    def __init__(
        self,
        images: np.ndarray[Any, Any],
        labels: np.ndarray[Any, Any],
        data: DataSet,
        recipe: Recipe,
        device: torch.device,
        memory_format: torch.memory_format,
    ) -> None:
        self.count = len(labels)
        # On a CPU the images stay where they are mapped; a GPU gets its own copy once.
        self._images = shared_tensor(images).to(device)
        self._labels = torch.from_numpy(np.asarray(labels, dtype=np.int64)).to(device)
        self._order: torch.Tensor | None = None
        self._format = memory_format
        self._scale, self._shift = _normalisation(data, recipe, device)

    def visit(self, order: torch.Tensor | None) -> None:
        """Use this order from now on; None is the order of the file."""
        self._order = None if order is None else order.to(self._labels.device)

    def take(self, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The samples at positions low to high of the current order: float images and their labels."""
        if self._order is None:
            raw, labels = self._images[low:high], self._labels[low:high]
        else:
            chosen = self._order[low:high]
            raw, labels = self._images.index_select(0, chosen), self._labels.index_select(0, chosen)
        images = raw.to(torch.float32, memory_format=self._format)
        return images.mul_(self._scale).add_(self._shift), labels


def _normalisation(data: DataSet, recipe: Recipe, device: torch.device) -> tuple[Any, Any]:
    """Scale and shift from 0..255 to what the recipe asks for; numbers where all channels agree, else tensors."""
    if recipe.normalize == "none":
        return 1 / 255, 0.0
    if recipe.normalize == "half":
        return 1 / 127.5, -1.0
    scale = [1 / (255 * deviation) for deviation in data.std]
    shift = [-mean / deviation for mean, deviation in zip(data.mean, data.std, strict=True)]
    return _per_channel(scale, device), _per_channel(shift, device)


def _per_channel(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device).view(1, -1, 1, 1)
