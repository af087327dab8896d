"""Augmented batches: Lockstep's resident loader against transforms of one picture at a time, on one thread of one core.

Crop, flip, colour jitter and rotation of 32x32 colour images, as document C trains with. Two pipelines stand against ours.
"per sample" does what torchvision's transforms do for C's recipe, call for call, through PIL and a DataLoader. "per sample,
lean" leaves out all that the pictures do not need: Python's own dice, no checks, in-place arithmetic, no DataLoader.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.processes import last_core, parse_line, run
from benchmarks.record import Clock, Section, compare
from benchmarks.rounds import Span, interleave
from benchmarks.settings import Settings

SIDE, PADDING, JITTER, DEGREES = 32, 4, 0.2, 15.0
OURS = {32: "lockstep, batch 32", 256: "lockstep, batch 256"}
PER_SAMPLE, LEAN = "per sample", "per sample, lean"
COMPARED: tuple[tuple[str, Clock, float | None], ...] = (
    (PER_SAMPLE, "wall", 20.0),
    (PER_SAMPLE, "cpu", None),
    (LEAN, "wall", None),
    (LEAN, "cpu", None),
)
# Ours are so much faster that they need more images for a span of the same length.
IMAGES = {**dict.fromkeys(OURS.values(), 16_384), PER_SAMPLE: 1_024, LEAN: 1_024}
# Of the mean and deviation of 1,024 augmented images: everyone draws from the same distributions, over the same pictures.
# Means of so many differ by 0.01 (one standard deviation); without jitter, or with another normalisation, by far more.
TOLERANCE = 0.05


def measure(settings: Settings) -> Section:
    """Every contender in a fresh process on the same core; the data are in memory, and no model is near."""
    contenders = {name: partial(span, name, settings.quick) for name in IMAGES}
    outcome = interleave("loader", contenders, settings.repeats, settings.seed)
    title = f"Augmented batches of {SIDE}x{SIDE} colour images: crop, flip, jitter, rotation; one thread"
    section = Section("loader", title, "images", "rate", outcome.measurements)
    for ours in OURS.values():
        for theirs, clock, target in COMPARED:
            found = compare(outcome.measurements, ours, theirs, "speed", clock, target)
            if found:
                section.comparisons.append(found)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    check(section)
    return section


def check(section: Section) -> None:
    """Everyone must have made images of the same kind."""
    for what in ("mean", "deviation"):
        values = [one.details[what] for one in section.measurements]
        if not values:
            section.refuse("nothing was measured")
            return
        spread = max(values) - min(values)
        section.notes.append(f"The {what} of the images, which are from -1 to 1, differs by {spread:.3f} at most.")
        if spread > TOLERANCE:
            section.refuse(f"the {what} differs by {spread:.3f}, more than {TOLERANCE}: not the same augmentation")


def span(name: str, quick: bool) -> Span:
    from lockstep.process import KEEP_MEMORY  # what Lockstep sets for its ranks, here for everyone

    images = IMAGES[name] // (4 if quick else 1)
    settings = [f"{key}={value}" for key, value in KEEP_MEMORY.items()]
    words = ["env", *settings, sys.executable, "-m", "benchmarks.sections.loader", name, str(images)]
    document = parse_line(run(words, last_core(), threads=1))
    details = {key: document[key] for key in ("mean", "deviation")}
    return Span(document["images"], document["seconds"], document["cpu_seconds"], details)


# From here on: one contender in a process of its own.

Batches = Iterator[Any]


def ours(images: Any, labels: Any, batch: int) -> Batches:
    """What a training step gets, with the order, the memory format and the normalisation of a run."""
    import torch

    from lockstep.data import open_data
    from lockstep.data.batches import Batches, sample_order
    from lockstep.recipe import Augment, Recipe

    recipe = Recipe(augment=Augment(crop=PADDING, flip=True, jitter=JITTER, rotation=DEGREES))
    data = open_data("embedded-color", quiet=True)
    batches = Batches(images, labels, data, recipe, torch.device("cpu"), torch.channels_last)
    epoch = 0
    while True:
        epoch += 1
        batches.visit(sample_order(recipe, epoch, len(labels)), epoch)
        for low in range(0, len(labels) - batch + 1, batch):
            yield batches.train_batch(low, low + batch).images


def as_torchvision(image: Any) -> Any:
    """RandomCrop, RandomHorizontalFlip, ColorJitter, RandomRotation (bilinear), ToTensor and Normalize of one picture."""
    import numpy as np
    import torch
    from PIL import Image, ImageEnhance, ImageOps

    image = ImageOps.expand(image, PADDING, fill=0)
    top, left = (int(torch.randint(0, 2 * PADDING + 1, (1,)).item()) for _ in range(2))
    image = image.crop((left, top, left + SIDE, top + SIDE))
    if torch.rand(1) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    factors = [float(torch.empty(1).uniform_(1 - JITTER, 1 + JITTER)) for _ in enhancers]
    for which in torch.randperm(3).tolist():
        image = enhancers[which](image).enhance(factors[which])
    angle = float(torch.empty(1).uniform_(-DEGREES, DEGREES).item())
    image = image.rotate(angle, Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image, np.uint8, copy=True)).view(SIDE, SIDE, 3)
    tensor = pixels.permute((2, 0, 1)).contiguous().to(dtype=torch.get_default_dtype()).div(255)
    mean, deviation = (torch.as_tensor((0.5, 0.5, 0.5), dtype=tensor.dtype).view(-1, 1, 1) for _ in range(2))
    return tensor.clone().sub_(mean).div_(deviation)


def per_sample(images: Any, labels: Any, batch: int) -> Batches:
    """A data set that transforms each picture when it is asked for, behind a DataLoader without workers."""
    import numpy as np
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    pictures = np.ascontiguousarray(images.transpose(0, 2, 3, 1))

    class Pictures(Dataset[Any]):
        def __len__(self) -> int:
            return len(labels)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return as_torchvision(Image.fromarray(pictures[index])), int(labels[index])

    while True:
        for found, _ in DataLoader(Pictures(), batch_size=batch, shuffle=True, drop_last=True):
            yield found


def lean(images: Any, labels: Any, batch: int) -> Batches:
    """The same pictures with as little around PIL as one can write."""
    import numpy as np
    import torch
    from PIL import Image, ImageEnhance, ImageOps

    pictures = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    dice = random.Random(1)
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)

    def one(index: int) -> Any:
        image = ImageOps.expand(Image.fromarray(pictures[index]), PADDING)
        top, left = dice.randrange(2 * PADDING + 1), dice.randrange(2 * PADDING + 1)
        image = image.crop((left, top, left + SIDE, top + SIDE))
        if dice.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for enhancer in enhancers:
            image = enhancer(image).enhance(dice.uniform(1 - JITTER, 1 + JITTER))
        image = image.rotate(dice.uniform(-DEGREES, DEGREES), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    order = list(range(len(labels)))
    while True:
        dice.shuffle(order)
        for low in range(0, len(order) - batch + 1, batch):
            # The conversion and the normalisation of the whole batch at once.
            yield torch.stack([one(index) for index in order[low : low + batch]]).float().div_(127.5).sub_(1)


def main(name: str, wanted: int) -> None:
    """Warm up, make the batches, print one line of JSON."""
    import numpy as np
    import torch

    from lockstep.data import open_data

    torch.set_num_threads(1)
    data = open_data("embedded-color", quiet=True)
    images, labels = np.array(data.train_images), np.array(data.train_labels)
    sizes = {ours: batch for batch, ours in OURS.items()}
    batch = sizes.get(name, 32)
    makers: dict[str, Callable[[Any, Any, int], Batches]] = {PER_SAMPLE: per_sample, LEAN: lean}
    batches = makers.get(name, ours)(images, labels, batch)
    for _ in range(max(256 // batch, 4)):
        next(batches)
    count = wanted // batch
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        next(batches)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    sample = torch.cat([next(batches) for _ in range(1024 // batch)])
    document = {
        "images": count * batch,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "mean": float(sample.mean()),
        "deviation": float(sample.std()),
    }
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
