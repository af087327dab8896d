"""Keyed random numbers: the same bits wherever they are drawn, and as good as numbers of a generator.

Every statistic is compared with its own distribution under true randomness, five standard deviations at most. Seeds are
fixed, so a test passes always or never. A weak hash is put through the same checks, to show that they can fail.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.keyed import Beta, Stream, choice, sample_keys, uniform, words

SAMPLES = 20_000
SIGMA = 5.0


def draw(stream: int = 3, seed: int = 11, epoch: int = 2, width: int = 16) -> np.ndarray:
    return uniform(sample_keys(seed, epoch, torch.arange(SAMPLES)), stream, width).double().numpy()


def weak(stream: int = 3, seed: int = 11, epoch: int = 2, width: int = 16) -> np.ndarray:
    """What one gets without the hash: a Weyl sequence. Its mean and variance are perfect, and nothing else is."""
    index = np.arange(SAMPLES)[:, None] * width + np.arange(width)
    return (index * 0.6180339887498949 + 0.1 * stream + 0.01 * seed + 0.001 * epoch) % 1.0


def z_of_mean(values: np.ndarray) -> float:
    return float((values.mean() - 0.5) / np.sqrt(1 / 12 / values.size))


def z_of_variance(values: np.ndarray) -> float:
    return float((((values - 0.5) ** 2).mean() - 1 / 12) / np.sqrt(1 / 180 / values.size))


def z_of_correlation(one: np.ndarray, two: np.ndarray) -> float:
    return float(((one - 0.5) * (two - 0.5)).mean() * 12 * np.sqrt(one.size))


def z_of_chi_square(cells: np.ndarray, count: int) -> float:
    seen = np.bincount(cells.reshape(-1), minlength=count)
    expected = cells.size / count
    return float((((seen - expected) ** 2 / expected).sum() - (count - 1)) / np.sqrt(2 * (count - 1)))


def checks(draw: Callable[..., np.ndarray]) -> dict[str, float]:
    """Deviations from randomness, each in its own standard deviations."""
    values = draw()
    pairs = (values[:, :-1] * 16).astype(np.int64) * 16 + (values[:, 1:] * 16).astype(np.int64)
    return {
        "mean": z_of_mean(values),
        "variance": z_of_variance(values),
        "256 cells": z_of_chi_square((values * 256).astype(np.int64), 256),
        "low bits": z_of_chi_square((values * 2**24).astype(np.int64) % 64, 64),
        "16x16 cells of neighbouring columns": z_of_chi_square(pairs[:, ::2], 256),
        "neighbouring columns": z_of_correlation(values[:, :-1:2], values[:, 1::2]),
        "neighbouring samples": z_of_correlation(values[:-1:2], values[1::2]),
        "next stream": z_of_correlation(values, draw(stream=4)),
        "next epoch": z_of_correlation(values, draw(epoch=3)),
        "next seed": z_of_correlation(values, draw(seed=12)),
    }


def test_numbers_look_random() -> None:
    for what, deviation in checks(draw).items():
        assert abs(deviation) < SIGMA, f"{what}: {deviation:.1f} standard deviations"


def test_the_checks_find_a_weak_hash() -> None:
    found = checks(weak)
    failed = {what for what, deviation in found.items() if abs(deviation) >= SIGMA}
    assert failed >= {"neighbouring columns", "neighbouring samples", "next stream", "next epoch", "next seed"}, found


def test_every_bit_of_a_key_turns_half_of_the_word() -> None:
    keys = sample_keys(1, 1, torch.arange(2000))
    before = words(keys, 5, 2)
    for bit in range(64):
        flipped = keys ^ (-(2**63) if bit == 63 else 2**bit)
        changed = (before ^ words(flipped, 5, 2)).numpy().view(np.uint8)
        share = np.unpackbits(changed).mean()
        # 2,000 x 64 bits: a standard deviation of 0.0014
        assert abs(share - 0.5) < SIGMA * 0.0014, f"bit {bit}: {share:.4f}"


def test_numbers_lie_in_the_unit_interval_and_reach_its_ends() -> None:
    values = draw(width=64)
    assert values.min() >= 0
    assert values.max() < 1
    assert values.min() < 1e-5
    assert values.max() > 1 - 1e-5


def test_samples_streams_epochs_and_seeds_have_numbers_of_their_own() -> None:
    samples = torch.arange(100_000)
    keys = [sample_keys(seed, epoch, samples) for seed in (0, 1, 2**40) for epoch in (1, 2)]
    assert len(torch.cat(keys).unique()) == 600_000
    streams = [words(keys[0][:1000], stream, 8) for stream in [*Stream, Stream.DROPOUT + 1]]
    equal = sum(int((a == b).sum()) for i, a in enumerate(streams) for b in streams[i + 1 :])
    assert equal <= 2, "of 288,000 pairs of 32-bit words, one in 15,000 draws of all this has a single equal pair"


def test_no_division_or_order_of_a_batch_changes_a_bit() -> None:
    samples = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))[:640]
    whole = uniform(sample_keys(9, 4, samples), Stream.AUGMENT, 7)
    parts = [uniform(sample_keys(9, 4, part), Stream.AUGMENT, 7) for part in samples.split((1, 30, 609))]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(uniform(sample_keys(9, 4, samples.flip(0)), Stream.AUGMENT, 7).flip(0), whole)
    # A column does not depend on how many there are.
    assert torch.equal(uniform(sample_keys(9, 4, samples), Stream.AUGMENT, 3), whole[:, :3])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(uniform(sample_keys(9, 4, samples), Stream.AUGMENT, 7), whole)
    finally:
        torch.set_num_threads(threads)


def splitmix(state: int) -> int:
    """The published function on Python's integers, which cannot overflow."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> shift)) * factor % 2**64
    return state ^ (state >> 31)


def test_words_equal_the_definition_on_whole_numbers() -> None:
    keys = sample_keys(123, 1, torch.arange(50))
    found = words(keys, 6, 5).tolist()
    same = uniform(keys, 6, 5).tolist()  # by numpy, where words are by torch
    for key, row, numbers in zip(keys.tolist(), found, same, strict=True):
        expected: list[int] = []
        for pair in range(3):
            number = splitmix((key + splitmix((6 << 32) + pair)) % 2**64)
            expected += struct.unpack("<2i", struct.pack("<Q", number))
        assert row == expected[:5]
        assert numbers == [(word % 2**32 >> 8) / 2**24 for word in row]


def test_numbers_are_the_same_in_every_version() -> None:
    """A changed hash would change every run with dropout or augmentation: it must not happen unnoticed."""
    values = uniform(sample_keys(123, 1, torch.arange(1000)), Stream.AUGMENT, 4)
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    assert digest == "b9dc74a368581d755735be16940634fce1fd5548b074d3077251ef94594470d7"


@pytest.mark.parametrize("count", [1, 7, 60_000])
def test_choice_is_even(count: int) -> None:
    chosen = choice(sample_keys(3, 1, torch.arange(60_000)), Stream.PARTNER, count).numpy()
    assert chosen.min() >= 0
    assert chosen.max() < count
    if count == 7:
        assert abs(z_of_chi_square(chosen, 7)) < SIGMA
    if count == 60_000:  # as many draws as places: about 1 / e of them stay empty
        assert len(np.unique(chosen)) / count == pytest.approx(1 - np.exp(-1), abs=0.01)


@pytest.mark.parametrize("a", [0.05, 0.2, 0.5, 1.0, 1.7, 8.0, 200.0])
def test_shares_are_beta_distributed(a: float) -> None:
    """Against numpy's own sampler: the largest gap between two distribution functions (Kolmogorov, Smirnov)."""
    ours = Beta(a)(uniform(sample_keys(5, 1, torch.arange(40_000)), Stream.SHARE, 1)[:, 0])
    theirs = np.random.default_rng(1).beta(a, a, 400_000)
    ours_sorted = np.sort(ours.double().numpy())
    # Compared at their values, and not beyond float32, where many of ours are equal.
    places = np.quantile(theirs[(theirs > 1e-6) & (theirs < 1 - 1e-6)], np.linspace(0, 1, 2001))
    gap = np.abs(
        np.searchsorted(ours_sorted, places) / len(ours_sorted) - np.searchsorted(np.sort(theirs), places) / len(theirs)
    ).max()
    assert gap < 2.2 * np.sqrt(1 / 40_000 + 1 / 400_000), "exceeded once in 8,000 trials by chance"
    assert float(ours.double().var()) == pytest.approx(1 / (4 * (2 * a + 1)), rel=0.05)


def test_extreme_shares_are_numbers() -> None:
    draws = torch.tensor([0.0, 2**-24, 0.5, 1 - 2**-24])
    for a in (1e-3, 0.1, 1.0, 50.0, 1e7):
        shares: Tensor = Beta(a)(draws)
        assert torch.isfinite(shares).all(), a
        assert (shares >= 0).all()
        assert (shares <= 1).all()
        assert (shares.diff() >= 0).all()


COMPILED = """
import torch
from lockstep import keyed
keys = torch.randint(-(2**62), 2**62, (8,), generator=torch.Generator().manual_seed(1))
draw = lambda keys: keyed.words(keys, 1024, 97) + 0
assert torch.equal(torch.compile(draw)(keys), draw(keys))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_compiled_code_draws_the_same_words(capability: str, tmp_path: Path) -> None:
    """A cache of its own: inductor's would give out what was compiled for another instruction set."""
    settings = {"ATEN_CPU_CAPABILITY": capability, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
