"""Ranges from calibration images, against the same done on all values at once: quantiles by sorting, errors by rounding each value."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.quantize import convert
from lockstep.quantize.calibrate import BEYOND, BINS, calibrate
from lockstep.quantize.scheme import Numbers, Scheme, from_range, input_integers


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ranged(values: Tensor, ranges: str, **scheme: str) -> convert.Prepared:
    """A linear layer whose inputs are these values, calibrated in several batches."""
    layer = nn.Sequential(nn.Linear(values.shape[1], 3))
    prepared = convert.prepare(layer, values[:2], "static", Scheme(ranges=ranges, **scheme))  # type: ignore[arg-type]
    calibrate(prepared, lambda: values.split(100))
    return prepared


def error(values: Tensor, numbers: Numbers) -> float:
    scale, zero, _ = numbers
    rounded = (input_integers(values, numbers).double() - zero) * scale
    return float(((rounded - values.double()) ** 2).sum())


# Like images, like what a ReLU gives, and below zero throughout; one value is far from all others.
KINDS = {
    "both signs": lambda: drawn(1000, 40),
    "after a ReLU": lambda: drawn(1000, 40).relu(),
    "below zero": lambda: -drawn(1000, 40).abs(),
}


@pytest.mark.parametrize("far", [0.0, 60.0])
@pytest.mark.parametrize("activations", ["affine", "symmetric"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_least_error_is_that_of_the_values_themselves(kind: str, activations: str, far: float) -> None:
    values = KINDS[kind]()
    values[500, 7] += math.copysign(far, values.sum())
    scheme = Scheme(activations=activations)  # type: ignore[arg-type]
    low, high = values.min().item(), values.max().item()
    # A naive search: every hundredth of either end, each value rounded.
    ends = [
        (low * i / 100, high * j / 100)
        for i in (range(1, 101) if low < 0 else [100])
        for j in (range(1, 101) if high > 0 else [100])
    ]
    sample = values[np.r_[0:100, 500:501]] if len(ends) > 100 else values  # ten thousand pairs of ends take a while
    best = min(ends, key=lambda each: error(sample, from_range(*each, scheme)))
    found = ranged(values, "mse", activations=activations).ranges["0"]
    assert error(values, found) <= 1.1 * error(values, from_range(*best, scheme))
    widest = error(values, from_range(low, high, scheme))
    assert error(values, found) <= widest * (1 + 1e-6)
    if far:
        assert error(values, found) < 0.95 * widest, "one value is not worth the others' steps"


@pytest.mark.parametrize("kind", KINDS)
def test_a_percentile_leaves_out_as_many_as_it_says(kind: str) -> None:
    values = KINDS[kind]()
    values[500, 7] *= 200
    prepared = ranged(values, "percentile")
    low, high = np.quantile(values.numpy().astype(np.float64), (BEYOND / 2, 1 - BEYOND / 2))
    scale, zero, top = prepared.ranges["0"]
    part = (values.max() - values.min()).item() / BINS
    # Zero is always covered, and an end lies on the edge of a part.
    assert -zero * scale == pytest.approx(min(low, 0), abs=2 * part + scale)
    assert (top - zero) * scale == pytest.approx(max(high, 0), abs=2 * part + scale)
    row = prepared.rows[0]
    assert (row.input_low, row.input_high) == (values.min().item(), values.max().item()), "what was seen is still said"


def test_inputs_that_are_all_the_same_or_not_finite() -> None:
    for ranges in ("min-max", "percentile", "mse"):
        assert ranged(torch.zeros(10, 4), ranges).ranges["0"].scale > 0
        assert ranged(torch.full((10, 4), 3.0), ranges).ranges["0"] == from_range(3.0, 3.0, Scheme())
        for odd in (math.nan, math.inf):
            values = drawn(300, 4)
            values[150, 2] = odd
            with pytest.raises(InputError, match="not finite"):
                ranged(values, ranges)
