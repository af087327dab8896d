"""What single techniques cost or save: 16 bits on a CNN of millions of weights, checkpoints, accumulation without exchange."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks import ours
from benchmarks.processes import last_core
from benchmarks.record import Section, compare
from benchmarks.rounds import Contender, interleave
from benchmarks.settings import Settings

VGG = ("model=cifar-vgg", "data=embedded-color", "test_limit=10")
VGG_IMAGES, VGG_BATCH = 640, 32
FP32, BF16 = "cifar-vgg, fp32, channels-last", "cifar-vgg, bf16, channels-last"
FP32_PLAIN, BF16_PLAIN = "cifar-vgg, fp32, contiguous", "cifar-vgg, bf16, contiguous"
EVERY, SELDOM = "mnist, 2 ranks, exchange every 32 images", "mnist, 2 ranks, accumulation 8: every 256"
EPOCH, CHECKPOINT = "mnist, one epoch of training", "mnist, its checkpoint"
CHECKPOINT_TARGET = 0.05


def measure(settings: Settings) -> Section:
    vgg = {
        FP32: (),
        BF16: ("precision=bf16",),
        FP32_PLAIN: ("memory_format=contiguous",),
        BF16_PLAIN: ("memory_format=contiguous", "precision=bf16"),
    }
    contenders: dict[str, Contender] = {
        name: partial(ours.train, VGG_BATCH, 1, 2, VGG_IMAGES, None, (*VGG, *words)) for name, words in vgg.items()
    }
    gloo = ("backend=gloo", "strategy=ddp")
    contenders[EVERY] = partial(ours.train, 32, 2, 1, settings.samples, None, gloo)
    contenders[SELDOM] = partial(ours.train, 256, 2, 1, settings.samples, None, (*gloo, "accumulation=8"))
    checkpoint = ("--checkpoint-every", "1")
    contenders[EPOCH] = partial(ours.train, 32, 1, 1, settings.samples, last_core(), checkpoint)
    outcome = interleave("techniques", contenders, settings.repeats, settings.seed)
    section = Section("techniques", "What single techniques cost or save", "images", "rate", outcome.measurements)
    # The checkpoint's time was measured in the same run as the epoch's.
    for one in [m for m in section.measurements if m.contender == EPOCH]:
        seconds = one.details["checkpoint_seconds"]
        section.measurements.append(replace(one, contender=CHECKPOINT, wall_seconds=seconds, cpu_seconds=seconds))
    for mine, theirs, how, target in (
        (BF16, FP32, "speed", None),
        (BF16_PLAIN, FP32_PLAIN, "speed", None),
        (FP32, FP32_PLAIN, "speed", None),
        (SELDOM, EVERY, "speed", None),
        (CHECKPOINT, EPOCH, "share", CHECKPOINT_TARGET),
    ):
        found = compare(section.measurements, mine, theirs, how, "wall", target)  # type: ignore[arg-type]
        if found:
            section.comparisons.append(found)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    section.notes.append("The checkpoint's CPU time was not measured; the table repeats its wall time.")
    return section
