"""Augmentation: against versions that look at one pixel at a time, against PIL, and against itself in other divisions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from lockstep.data import DataSet, augment, open_data
from lockstep.data.augment import Augmenter
from lockstep.data.batches import Batch, Batches, sample_order
from lockstep.keyed import Stream, sample_keys, uniform
from lockstep.recipe import Augment, Recipe, Regularize

EVERYTHING = Augment(crop=4, flip=True, jitter=0.3, rotation=20.0, cutout=9)
LUMA = np.array([0.299, 0.587, 0.114])


@pytest.fixture(scope="module")
def colour() -> DataSet:
    return open_data("embedded-color", quiet=True)


@pytest.fixture(scope="module")
def grey() -> DataSet:
    return open_data("embedded", quiet=True)


class Draws:
    """The nine numbers of a sample, by what they are for."""

    def __init__(self, keys: Tensor, index: int) -> None:
        numbers = uniform(keys, Stream.AUGMENT, 9)[index].tolist()
        self.place, self.side, self.light, self.angle, self.square = (
            numbers[:2], numbers[2], numbers[3:6], numbers[6], numbers[7:],
        )  # fmt: skip


def naive(image: np.ndarray, settings: Augment, draws: Draws) -> np.ndarray:
    """One image, pixel by pixel, in float64. Shares the draws with ours, and nothing else."""
    height, width = image.shape[1:]
    result = image.astype(np.float64)
    if settings.jitter:
        result = naive_jitter(result, [1 + settings.jitter * (2 * u - 1) for u in draws.light])
    top, left = (int(u * (2 * settings.crop + 1)) for u in draws.place)
    flipped = settings.flip and draws.side < 0.5
    if settings.rotation:
        angle = settings.rotation * (2 * draws.angle - 1)
        result = naive_turn(result, angle, flipped, top - settings.crop, left - settings.crop)
    else:
        padded = np.pad(result, ((0, 0), (settings.crop, settings.crop), (settings.crop, settings.crop)))
        result = padded[:, top : top + height, left : left + width][:, :, :: -1 if flipped else 1].copy()
    if settings.cutout:
        down, right = (
            int(u * side) - settings.cutout // 2 for u, side in zip(draws.square, (height, width), strict=True)
        )
        for y in range(max(down, 0), min(down + settings.cutout, height)):
            for x in range(max(right, 0), min(right + settings.cutout, width)):
                result[:, y, x] = 127.5
    return result


def naive_jitter(image: np.ndarray, factors: list[float]) -> np.ndarray:
    """One after the other, as the three are defined."""
    channels, height, width = image.shape
    bright, contrast, colour = factors
    weights = LUMA if channels == 3 else np.ones(1)
    result = image * bright
    mean = np.mean([weights @ result[:, y, x] for y in range(height) for x in range(width)])
    result = contrast * result + (1 - contrast) * mean
    for y in range(height):
        for x in range(width):
            result[:, y, x] = colour * result[:, y, x] + (1 - colour) * (weights @ result[:, y, x])
    return np.clip(result, 0, 255)


def naive_turn(image: np.ndarray, degrees: float, flipped: bool, down: int, right: int) -> np.ndarray:
    """For each pixel: turn it back about the centre, mirror it back, shift it back, and look between the four around it."""
    channels, height, width = image.shape
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    result = np.zeros((channels, height, width))
    for y in range(height):
        for x in range(width):
            dx, dy = x - (width - 1) / 2, y - (height - 1) / 2
            dx, dy = cosine * dx - sine * dy, sine * dx + cosine * dy
            from_x, from_y = (-dx if flipped else dx) + (width - 1) / 2 + right, dy + (height - 1) / 2 + down
            left, top = math.floor(from_x), math.floor(from_y)
            for row in (top, top + 1):
                for column in (left, left + 1):
                    if 0 <= row < height and 0 <= column < width:
                        near = (1 - abs(from_x - column)) * (1 - abs(from_y - row))
                        result[:, y, x] += near * image[:, row, column]
    return result


def augmented(images: Tensor, settings: Augment, keys: Tensor) -> Tensor:
    run = Augmenter(settings, tuple(images.shape[1:]), torch.device("cpu"))
    return run(images, run.decide(keys)).to(torch.float32)


@pytest.mark.parametrize("kind", ["colour", "grey", "oblong"])
@pytest.mark.parametrize(
    "settings",
    [
        Augment(crop=4),
        Augment(flip=True),
        Augment(jitter=0.4),
        Augment(rotation=30.0),
        Augment(cutout=8),
        Augment(cutout=5, crop=2, flip=True),
        EVERYTHING,
    ],
    ids=["crop", "flip", "jitter", "rotation", "cutout", "bytes and cutout", "everything"],
)
def test_equals_a_naive_version(kind: str, settings: Augment, request: pytest.FixtureRequest) -> None:
    if kind == "oblong":
        images = torch.randint(0, 256, (6, 3, 11, 18), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    else:
        images = torch.tensor(request.getfixturevalue(kind).train_images[:12])
    keys = sample_keys(4, 2, torch.arange(len(images)))
    found = augmented(images, settings, keys)
    for index in range(len(images)):
        expected = naive(images[index].numpy(), settings, Draws(keys, index))
        np.testing.assert_allclose(found[index].numpy(), expected, atol=5e-3, err_msg=f"image {index}")
    if not (settings.jitter or settings.rotation):
        exact = [naive(image.numpy(), settings, Draws(keys, i)) for i, image in enumerate(images)]
        assert np.array_equal(found.numpy(), np.stack(exact)), "moving bytes needs no tolerance"


def picture(image: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(np.float64).transpose(2, 0, 1)


def test_crop_and_flip_equal_pil(colour: DataSet) -> None:
    images = torch.tensor(colour.train_images[:40])
    keys = sample_keys(8, 1, torch.arange(40))
    found = augmented(images, Augment(crop=3, flip=True), keys)
    flips = 0
    for index in range(40):
        draws = Draws(keys, index)
        top, left = (int(u * 7) for u in draws.place)
        wide = ImageOps.expand(picture(images[index].numpy()), 3, fill=0)
        expected = wide.crop((left, top, left + 32, top + 32))
        if draws.side < 0.5:
            flips += 1
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        assert np.array_equal(found[index].numpy(), pixels(expected))
    assert 10 < flips < 30


def test_rotation_equals_pil_inside(colour: DataSet) -> None:
    """PIL goes the same way round about the same centre; it treats the border in another way and rounds to bytes."""
    images = torch.tensor(colour.train_images[:10])
    angles = np.linspace(-25, 25, 10)[:, None]
    nothing = np.zeros((10, 2), np.int64), np.zeros((10, 1), bool)
    along, across = (torch.from_numpy(part).float() for part in augment.turns(*nothing, angles, (3, 32, 32)))
    found = augment.turn(images, along, across)
    y, x = np.mgrid[0:32, 0:32] - 15.5
    inside = np.hypot(x, y) < 14
    for index in range(10):
        angle = float(angles[index, 0])
        expected = pixels(picture(images[index].numpy()).rotate(angle, Image.Resampling.BILINEAR))
        difference = np.abs(found[index].numpy() - expected)[:, inside]
        assert difference.max() <= 1.01, f"at {angle:.1f} degrees"


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_jitter_is_what_pil_calls_so(colour: DataSet, which: int) -> None:
    """PIL rounds to bytes, and its mean and its grey to whole numbers: two levels of 255."""
    enhance: Any = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[which]
    images = torch.tensor(colour.train_images[:10])
    factors = np.ones((10, 3))
    factors[:, which] = np.linspace(0.5, 1.5, 10)
    found = augment.recolour(images, *(torch.from_numpy(map).float() for map in augment.colours(factors, (3, 32, 32))))
    for index in range(10):
        factor = float(factors[index, which])
        expected = pixels(enhance(picture(images[index].numpy())).enhance(factor))
        assert np.abs(found[index].numpy() - expected).max() <= 2, f"factor {factor:.2f}"


@pytest.mark.parametrize("kind", ["colour", "grey"])
def test_jitter_rounds_once_per_operation_in_a_fixed_order(kind: str, request: pytest.FixtureRequest) -> None:
    """Equal bits on every processor and in every batch: numpy, which rounds after each operation, gives the same ones."""
    images = request.getfixturevalue(kind).train_images[:20]
    channels, height, width = images.shape[1:]
    factors = np.random.default_rng(2).uniform(0.5, 1.5, (20, 3))
    own, grey = (part.astype(np.float32) for part in augment.colours(factors, images.shape[1:]))
    values = images.astype(np.float32)
    means = images.sum((2, 3), keepdims=True).astype(np.float32) * np.float32(1 / (height * width))
    level = sum_in_order(means) * grey[:, 1:, None, None]
    if channels == 3:
        level = sum_in_order(values) * grey[:, :1, None, None] + level
    expected = np.clip(values * own[:, :, None, None] + level, 0, 255)
    found = augment.recolour(torch.tensor(images), torch.from_numpy(own), torch.from_numpy(grey))
    assert np.array_equal(found.numpy(), expected)
    single = [
        augment.recolour(
            torch.tensor(images[i : i + 1]), torch.from_numpy(own[i : i + 1]), torch.from_numpy(grey[i : i + 1])
        )
        for i in range(20)
    ]
    assert torch.equal(torch.cat(single), found)


def sum_in_order(values: np.ndarray) -> np.ndarray:
    weights = LUMA.astype(np.float32) if values.shape[1] == 3 else np.ones(1, np.float32)
    total = values[:, :1] * weights[0]
    for channel in range(1, values.shape[1]):
        total = total + values[:, channel : channel + 1] * weights[channel]
    return total


def test_saturation_does_nothing_without_colours() -> None:
    factors = np.array([[1.2, 0.7, 0.5], [1.2, 0.7, 1.5]])
    for matrices in augment.colours(factors, (1, 28, 28)):
        assert np.array_equal(matrices[0], matrices[1])


def test_draws_cover_what_they_may() -> None:
    """All 81 windows of a crop, both sides, and angles over the whole range, evenly."""
    keys = sample_keys(1, 1, torch.arange(20_000))
    marked = torch.zeros(20_000, 1, 9, 9, dtype=torch.uint8)
    marked[:, :, 4, 4] = 255
    found = augmented(marked, Augment(crop=4), keys).view(-1, 81).argmax(1)
    counts = torch.bincount(found, minlength=81)
    assert counts.min() > 180, "20,000 / 81 = 247"
    assert counts.max() < 320
    ramp = torch.arange(9, dtype=torch.uint8).expand(20_000, 1, 9, 9)
    flipped = augmented(ramp, Augment(flip=True), keys)[:, 0, 0, 0] == 8
    assert 9_650 < int(flipped.sum()) < 10_350


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["colour", "grey", "odd"])
def test_no_division_of_a_batch_changes_a_bit(kind: str, threads: int, request: pytest.FixtureRequest) -> None:
    if kind == "odd":  # sizes that no vector divides
        images = torch.randint(0, 256, (64, 3, 17, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    else:
        images = torch.tensor(request.getfixturevalue(kind).train_images[:64])
    samples = torch.arange(64)

    def parts(order: Tensor, *sizes: int) -> Tensor:
        found = [augmented(images[part], EVERYTHING, sample_keys(6, 3, part)) for part in order.split(sizes)]
        return torch.cat(found)[order.argsort()]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = augmented(images, EVERYTHING, sample_keys(6, 3, samples))
        assert torch.equal(parts(samples, 16, 16, 16, 16), whole)
        assert torch.equal(parts(samples, 1, 2, 3, 5, 7, 46), whole)
        assert torch.equal(parts(torch.randperm(64, generator=torch.Generator().manual_seed(1)), 31, 33), whole)
    finally:
        torch.set_num_threads(before)


def batches_of(data: DataSet, recipe: Recipe, memory_format: torch.memory_format = torch.contiguous_format) -> Batches:
    return Batches(data.train_images, data.train_labels, data, recipe, torch.device("cpu"), memory_format)


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(None if column[0] is None else torch.cat(column) for column in zip(*batches, strict=True)))  # type: ignore[arg-type]


def assert_same(one: Batch, two: Batch) -> None:
    for name, a, b in zip(Batch._fields, one, two, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


def test_a_plain_recipe_gets_the_very_batches_of_take(colour: DataSet) -> None:
    recipe = Recipe(data="embedded-color")
    batches = batches_of(colour, recipe)
    batches.visit(sample_order(recipe, 1, 500), 1)
    batch = batches.train_batch(10, 40)
    images, labels = batches.take(10, 40)
    assert torch.equal(batch.images, images)
    assert torch.equal(batch.labels, labels)
    assert batch[2:] == (None, None, None)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("normalize", ["half", "standard", "none"])
def test_train_batches_equal_a_naive_reader(
    colour: DataSet, normalize: Any, memory_format: torch.memory_format
) -> None:
    recipe = Recipe(data="embedded-color", normalize=normalize, augment=EVERYTHING, seed=3)
    batches = batches_of(colour, recipe, memory_format)
    order = sample_order(recipe, 2, 300)
    batches.visit(order, 2)
    batch = batches.train_batch(20, 26)
    assert batch.images.is_contiguous(memory_format=memory_format)
    assert batch.keys is not None
    mean = {"half": 0.5, "none": 0.0, "standard": np.reshape(colour.mean, (3, 1, 1))}[normalize]
    deviation = {"half": 0.5, "none": 1.0, "standard": np.reshape(colour.std, (3, 1, 1))}[normalize]
    keys = sample_keys(3, 2, order[20:26])
    for position in range(6):
        sample = int(order[20 + position])
        plain = naive(colour.train_images[sample], EVERYTHING, Draws(keys, position)) / 255
        np.testing.assert_allclose(batch.images[position].numpy(), (plain - mean) / deviation, atol=1e-4)
        assert batch.labels[position] == int(colour.train_labels[sample])
    images, _ = batches.take(20, 26)
    plain = (colour.train_images[order[20:26].numpy()] / 255 - mean) / deviation
    np.testing.assert_allclose(images.numpy(), plain, atol=2e-6, err_msg="evaluation is never augmented")


@pytest.mark.parametrize("shuffled", [True, False])
def test_batches_do_not_depend_on_their_division(grey: DataSet, shuffled: bool) -> None:
    recipe = Recipe(
        data="embedded",
        augment=Augment(crop=2, rotation=10.0, jitter=0.2),
        regularize=Regularize(mixup=0.4),
        train_limit=400,
    )
    batches = batches_of(grey, recipe, torch.channels_last)
    order = sample_order(recipe, 1, 400) if shuffled else None
    batches.visit(order, 1)
    whole = batches.train_batch(0, 64)
    assert_same(joined([batches.train_batch(low, low + 16) for low in (0, 16, 32, 48)]), whole)
    assert_same(joined([batches.train_batch(*ends) for ends in ((0, 1), (1, 31), (31, 64))]), whole)
    for low in (48, 0, 16, 32):  # in any order of asking, as ranks do
        part = Batch(*(None if column is None else column[low : low + 16] for column in whole))  # type: ignore[arg-type]
        assert_same(batches.train_batch(low, low + 16), part)
    ends = [(k, min(k + 16, 400)) for k in range(0, 400, 16)]
    every = joined([batches.train_batch(*part) for part in ends])
    for rank in range(3):  # each rank takes every third, and a short one at the end
        other = batches_of(grey, recipe, torch.channels_last)
        other.visit(order, 1)
        mine = joined([other.train_batch(*part) for part in ends[rank::3]])
        chosen = torch.cat([torch.arange(*part) for part in ends[rank::3]])
        assert_same(mine, Batch(*(None if column is None else column[chosen] for column in every)))  # type: ignore[arg-type]
    batches.visit(order, 2)
    assert not torch.equal(batches.train_batch(0, 64).images, whole.images), "another epoch, other draws"


def test_mixup_blends_samples_of_the_visited_part(grey: DataSet) -> None:
    recipe = Recipe(data="embedded", regularize=Regularize(mixup=0.7), train_limit=150, seed=2)
    batches = batches_of(grey, recipe)
    plain = torch.tensor(grey.train_images[:150]).float() / 127.5 - 1
    labels = torch.tensor(grey.train_labels[:150].astype(np.int64))
    for order in (None, sample_order(recipe, 5, 150)):
        batches.visit(order, 5)
        batch = batches.train_batch(0, 100)
        assert batch.others is not None
        assert batch.share is not None
        partners = set()
        for position in range(100):
            sample = position if order is None else int(order[position])
            share = float(batch.share[position])
            assert batch.labels[position] == labels[sample]
            # Whose rest is it? Found by looking at all of them: only one of the visited samples may fit.
            rest = batch.images[position] - share * plain[sample]
            distance = (rest - (1 - share) * plain).abs().amax((1, 2, 3))
            if share < 0.9:
                partner = int(distance.argmin())
                assert distance[partner] < 1e-4
                assert batch.others[position] == labels[partner]
                partners.add(partner)
        assert len(partners) > 30, "pairs are drawn from everywhere"


def test_only_dropout_needs_keys_and_changes_no_image(grey: DataSet) -> None:
    batches = batches_of(grey, Recipe(data="embedded", regularize=Regularize(dropout=0.2), seed=5))
    batches.visit(None, 3)
    batch = batches.train_batch(4, 9)
    assert batch.keys is not None
    assert torch.equal(batch.keys, sample_keys(5, 3, torch.arange(4, 9)))
    assert torch.equal(batch.images, batches.take(4, 9)[0])
    assert batch.others is None


def test_resident_data_are_never_written_to(colour: DataSet) -> None:
    before = colour.train_images[:50].copy()
    recipe = Recipe(data="embedded-color", augment=EVERYTHING, regularize=Regularize(mixup=0.2), train_limit=50)
    batches = batches_of(colour, recipe)
    for order in (None, torch.arange(50)):
        batches.visit(order, 1)
        batches.train_batch(0, 50)
    assert np.array_equal(before, colour.train_images[:50])
