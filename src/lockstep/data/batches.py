"""Resident data to batches: slices by a permutation, augmented and normalised on the whole batch. No per-sample Python.

The order of samples is drawn from (seed, epoch) alone, so global batch k is the same set of samples on every placement.
What is random about a sample is drawn from (seed, epoch, sample): see keyed.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep import keyed
from lockstep.data import DataSet
from lockstep.data.augment import Augmenter, Decisions
from lockstep.data.inputs import Inputs
from lockstep.recipe import Augment, Recipe
from lockstep.task import IGNORED


class Batch(NamedTuple):
    """What a training step takes. What the recipe does not need is None, and has cost nothing."""

    images: Inputs
    """What the model is called with: images, or whatever the data set has as inputs."""
    labels: Tensor
    """The targets: classes, or whatever the loss compares with."""
    keys: Tensor | None = None
    """What the random numbers of each sample are drawn from (keyed.py)."""
    others: Tensor | None = None
    """Mixup: the labels of the samples that were blended in …"""
    share: Tensor | None = None
    """… and how much of each image is the first sample's."""


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


class Drawn(NamedTuple):
    """Some samples with all that is random about them."""

    samples: Tensor
    keys: Tensor
    decisions: Decisions | None


class _Block(NamedTuple):
    """What was drawn for some batches of `size` samples, from position `low` of the order and every `step` from there."""

    low: int
    step: int
    size: int
    batches: int
    own: Drawn
    partners: Drawn | None
    share: Tensor | None

    def part(self, low: int, high: int) -> slice | None:
        """Where the samples at these positions are in it; None where they are not."""
        number, rest = divmod(low - self.low, self.step)
        if rest or not 0 <= number < self.batches or high - low > self.size:
            return None
        return slice(number * self.size, number * self.size + high - low)


class Batches:
    """One split of a data set, resident, with the recipe's normalisation and augmentation."""

    # Draws are made for about N samples at once: a call of numpy costs more than the numbers that it draws.
    DRAWS = 1024

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
        self._labels = _targets(labels).to(device)
        self._units = _units(labels, data.class_weights, recipe.loss, device)
        self.one_class = labels.ndim == 1 and recipe.loss == "cross-entropy"
        """Whether each sample has one class, which a model gets right or not."""
        self._order: torch.Tensor | None = None
        self._epoch = 0
        self._block: _Block | None = None
        self._last_low: int | None = None
        self._stride = 0
        self._visited = min(self.count, recipe.train_limit or self.count)
        self._seed = recipe.seed
        self._device, self._format = device, memory_format
        self._scale, self._shift = _normalisation(data, recipe, device)
        self._augment = Augmenter(recipe.augment, _picture(data.shape), device) if recipe.augment != Augment() else None
        self._mixup = keyed.Beta(recipe.regularize.mixup) if recipe.regularize.mixup else None
        self.keyed = bool(self._augment or self._mixup or recipe.regularize.dropout)
        """Whether training batches carry keys. A model with dropout of its own needs them too (layers.needs_keys)."""

    def visit(self, order: torch.Tensor | None, epoch: int = 0) -> None:
        """Use this order from now on, None is the order of the file; random numbers are those of `epoch`."""
        self._order = None if order is None else order.to(self._device)
        self._epoch, self._block = epoch, None

    def units(self, first: int, count: int) -> float:
        """What the loss over these samples of the current order is divided by: their number, that of their tokens, or the weights of their
        classes. Every rank knows it of the whole global batch, without asking the others."""
        if self._units is None:
            return count
        return float(
            self._units[first : first + count].sum()
            if self._order is None
            else self._units[self._order[first : first + count]].sum()
        )

    def take(self, low: int, high: int) -> tuple[Inputs, torch.Tensor]:
        """The samples at positions low to high of the current order: float images and their labels."""
        if self._order is None:
            raw, labels = self._images[low:high], self._labels[low:high].clone()  # a loss may change them in place
        else:
            chosen = self._order[low:high]
            raw, labels = self._images.index_select(0, chosen), self._labels.index_select(0, chosen)
        return self._normalised(raw), labels

    def train_batch(self, low: int, high: int) -> Batch:
        """The same samples for a training step: augmented, blended, and with their keys, where the recipe asks for it."""
        if not self.keyed:
            return Batch(*self.take(low, high))
        if self._last_low is not None and low > self._last_low:
            self._stride = low - self._last_low
        self._last_low = low
        block = self._block
        part = None if block is None else block.part(low, high)
        if block is None or part is None:
            block = self._block = self._draw(low, high)
            part = slice(0, high - low)
        images, labels = self._augmented(block.own, part)
        if block.partners is None or block.share is None:
            return Batch(images, labels, block.own.keys[part])
        others, other_labels = self._augmented(block.partners, part)
        assert isinstance(images, Tensor)
        assert isinstance(others, Tensor)
        share = block.share[part]
        # share x image + (1 - share) x other
        blended = others.add_(images.sub_(others).mul_(share.view(-1, 1, 1, 1)))
        return Batch(blended, labels, block.own.keys[part], other_labels, share)

    def _draw(self, low: int, high: int) -> _Block:
        """All that is random about this batch and those that follow at the same distance: with several ranks, what lies
        in between belongs to others."""
        order = self._order
        total = self._visited if order is None else len(order)
        size = high - low
        step = max(size, self._stride)
        batches = max(1, min(self.DRAWS // size, -(-(total - low) // step)))
        starts = torch.arange(low, low + batches * step, step)
        positions = (starts[:, None] + torch.arange(size)).view(-1).clamp_(max=max(total, high) - 1).to(self._device)
        own = self._drawn(positions if order is None else order.index_select(0, positions))
        if self._mixup is None:
            return _Block(low, step, size, batches, own, None, None)
        position = keyed.choice(own.keys, keyed.Stream.PARTNER, total)
        partners = self._drawn(position if order is None else order.index_select(0, position))
        share = self._mixup(keyed.uniform(own.keys, keyed.Stream.SHARE, 1)[:, 0])
        return _Block(low, step, size, batches, own, partners, share)

    def _drawn(self, samples: Tensor) -> Drawn:
        """A sample has the same augmentation wherever it is used in an epoch."""
        keys = keyed.sample_keys(self._seed, self._epoch, samples)
        return Drawn(samples, keys, None if self._augment is None else self._augment.decide(keys))

    def _augmented(self, drawn: Drawn, part: slice) -> tuple[Inputs, Tensor]:
        chosen = drawn.samples[part]
        images, labels = self._images.index_select(0, chosen), self._labels.index_select(0, chosen)
        if self._augment is not None and drawn.decisions is not None:
            images = self._augment(images, drawn.decisions.of(part))
        return self._normalised(images), labels

    def _normalised(self, images: Tensor) -> Tensor:
        """Bytes, or floats that nobody else needs, from 0..255 to the recipe's range and the memory format."""
        if images.shape[1] == 1 or self._format == torch.contiguous_format:
            return images.to(torch.float32, memory_format=self._format).mul_(self._scale).add_(self._shift)
        # To floats first: torch converts and transposes at once in twice the time of one after the other.
        floats = images.to(torch.float32)
        result = torch.empty_like(floats, memory_format=self._format)
        return torch.mul(floats, self._scale, out=result).add_(self._shift)


def _targets(labels: np.ndarray[Any, Any]) -> Tensor:
    """One class a sample as int64, which the loss takes; what is larger stays where it is mapped."""
    if labels.ndim == 1 and labels.dtype.kind in "iu":
        return torch.from_numpy(np.asarray(labels, dtype=np.int64))
    return shared_tensor(labels)


def _units(labels: np.ndarray[Any, Any], weights: Sequence[float], loss: str, device: torch.device) -> Tensor | None:
    """How much each sample counts in what the loss is divided by; None where each counts 1."""
    if loss not in ("cross-entropy", "next-token") or (labels.ndim == 1 and not weights):
        return None
    counted = labels != IGNORED
    of_each = np.asarray(weights, np.float64)[np.where(counted, labels, 0)] * counted if weights else counted
    return torch.from_numpy(of_each.reshape(len(labels), -1).sum(1, dtype=np.float64)).to(device)


def _picture(shape: tuple[int, ...]) -> tuple[int, int, int]:
    channels, height, width = shape
    return channels, height, width


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
