"""Random numbers without a generator: each is a hash of what it is for.

A generator gives out numbers in the order of asking, so ranks that share a batch would draw others than one process does.
Here a number depends on (seed, epoch, sample), on its purpose (a stream) and on its column, and on nothing else. So
whichever rank draws it, beside whichever other samples, gets the same bits.

Few numbers for each sample are drawn by numpy, whose calls cost a fraction of torch's; whole masks by torch, where they are used.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]


class Stream(IntEnum):
    """What a number is for. Two purposes never share their numbers."""

    AUGMENT = 1
    PARTNER = 2
    SHARE = 3
    DROPOUT = 1024
    """The first dropout layer; the next ones follow."""


def sample_keys(seed: int, epoch: int, samples: Tensor) -> Tensor:
    """One 64-bit key for each sample, given by its index in the data set; no two samples of an epoch share one."""
    keys = _mix_words(_words_of(samples) * _WEYL + _epoch_key(seed, epoch))
    return torch.from_numpy(keys.view(np.int64)).to(samples.device)


def uniform(keys: Tensor, stream: int, width: int) -> Tensor:
    """Numbers in [0, 1), `width` of them for each key; 24 bits each, so they are exact in float32."""
    pairs = _mix_words(_words_of(keys)[:, None] + _words_of(_columns(stream, -(-width // 2))))
    numbers = (pairs.view(np.uint32)[:, :width] >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    return torch.from_numpy(numbers).to(keys.device)


def choice(keys: Tensor, stream: int, count: int) -> Tensor:
    """One whole number from 0 to count - 1 for each key. The remainder's bias is below count / 2^64."""
    chosen = _mix_words(_words_of(keys) + _words_of(_columns(stream, 1))) % np.uint64(count)
    return torch.from_numpy(chosen.view(np.int64)).to(keys.device)


def words(keys: Tensor, stream: int, width: int) -> Tensor:
    """Random 32-bit words, as int32: `width` of them for each key, on the keys' own device."""
    if torch.compiler.is_compiling():
        # One operator to the compiler: the scalar code that inductor writes for the hash gave other words (ATEN_CPU_CAPABILITY=default).
        drawn: Tensor = torch.ops.lockstep.keyed_words(keys, int(stream), width)
        return drawn
    return _words(keys, stream, width)


def _words(keys: Tensor, stream: int, width: int) -> Tensor:
    return _mix(keys[:, None] + _columns(stream, -(-width // 2)).to(keys.device)).view(torch.int32)[:, :width]


torch.library.define("lockstep::keyed_words", "(Tensor keys, int stream, int width) -> Tensor")
torch.library.impl(
    "lockstep::keyed_words",
    "CompositeExplicitAutograd",
    lambda keys, stream, width: _words(keys, stream, width).contiguous(),
)
torch.library.impl(
    "lockstep::keyed_words",
    "Meta",
    lambda keys, stream, width: keys.new_empty((keys.shape[0], width), dtype=torch.int32),
)


class Beta:
    """Numbers distributed as Beta(a, a), by the inverse of its distribution function: one draw each, nothing rejected."""

    def __init__(self, a: float) -> None:
        # Half the distribution is enough, since it is symmetric. For a < 1 the density has a pole at 0; over s = t^a in
        # place of t it has none, because t^(a-1) dt = ds / a.
        exponent = min(a, 1.0)
        places = np.linspace(0.0, 0.5**exponent, 8192)
        t = places ** (1 / exponent)
        density = (4 * t * (1 - t)) ** (a - 1) if a > 1 else (1 - t) ** (a - 1)
        areas = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
        rising = np.append(np.diff(areas) > 0, True)
        self._power = 1 / exponent
        self._below, self._places = areas[rising] / (2 * areas[-1]), places[rising]

    def __call__(self, draws: Tensor) -> Tensor:
        """float32 in [0, 1] for uniform draws in [0, 1)."""
        numbers = draws.cpu().double().numpy()
        smaller = np.interp(np.minimum(numbers, 1 - numbers), self._below, self._places) ** self._power
        shares = np.where(numbers < 0.5, smaller, 1 - smaller).astype(np.float32)
        return torch.from_numpy(shares).to(draws.device)


# The output function of SplitMix64 (Steele, Lea, Flood 2014): each input bit changes each output bit about every second
# time, and it can be undone, so different inputs stay different.
_ROUNDS = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB))
_LAST_SHIFT = 31
_WEYL = np.uint64(0x9E37_79B9_7F4A_7C15)


def _words_of(numbers: Tensor) -> Words:
    found: NDArray[Any] = numbers.cpu().numpy()
    return found.view(np.uint64)


def _mix_words(numbers: Words) -> Words:
    """Hash in place; products wrap around."""
    for shift, factor in _ROUNDS:
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers ^= numbers >> np.uint64(_LAST_SHIFT)
    return numbers


def _mix(numbers: Tensor) -> Tensor:
    """The same for torch, whose numbers are signed: a shift brings in copies of the sign, and these are cut off."""
    for shift, factor in _ROUNDS:
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor - 2**64)
    return numbers.bitwise_xor_((numbers >> _LAST_SHIFT).bitwise_and_((1 << (64 - _LAST_SHIFT)) - 1))


@lru_cache(maxsize=16)
def _epoch_key(seed: int, epoch: int) -> np.uint64:
    # The last number keeps these keys apart from the order of samples, which is drawn from (seed, epoch).
    return np.uint64(np.random.SeedSequence([seed, epoch, 1]).generate_state(1, np.uint64)[0])


@lru_cache(maxsize=64)
def _columns(stream: int, width: int) -> Tensor:
    """What is added to a key for each column: hashed, so that neighbouring columns and keys have nothing in common."""
    return _mix(torch.arange(width) + (int(stream) << 32))
