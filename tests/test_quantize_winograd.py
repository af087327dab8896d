"""Lockstep's own int8 convolution, against whole numbers in float64. A whole net on it is in test_quantize.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.deploy import engines, kernels, winograd
from lockstep.deploy.kernels import LayerSpec
from lockstep.deploy.winograd import WinogradConv, can_compute
from lockstep.errors import InputError
from lockstep.quantize.scheme import Numbers

here = pytest.mark.skipif(bool(winograd.why_not()), reason=f"--engine winograd: {winograd.why_not()}")


def spec_of(out_channels: int, in_channels: int, padding: int, relu: bool, top: int, seed: int = 1) -> LayerSpec:
    dice = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (out_channels, in_channels, 3, 3), generator=dice, dtype=torch.int8)
    scales = torch.rand(out_channels, generator=dice) * 0.01 + 0.001
    # A step of the result is about as large as its spread needs.
    result = Numbers(0.02 * top**0.5 * in_channels**0.5, 0 if relu else 40, 127)
    return LayerSpec(
        conv=True,
        weight=weight,
        scales=scales,
        bias=torch.randn(out_channels, generator=dice),
        arguments=[[1, 1], [padding, padding], [1, 1], 1],
        source=Numbers(0.05, 3, top),
        result=result,
        relu=relu,
        top=top,
    )


def by_hand(spec: LayerSpec, values: torch.Tensor) -> torch.Tensor:
    """The bytes before rounding, from sums that float64 holds exactly."""
    assert spec.source is not None
    assert spec.result is not None
    assert spec.bias is not None
    whole = nn.functional.conv2d(values.double() - spec.source.zero, spec.weight.double(), padding=spec.arguments[1][0])
    real = whole * (spec.source.scale * spec.scales.double().view(-1, 1, 1)) + spec.bias.double().view(-1, 1, 1)
    bytes_ = real / spec.result.scale + spec.result.zero
    return bytes_.clamp(spec.result.zero if spec.relu else 0, spec.result.top)


@here
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("batch", "in_channels", "out_channels", "height", "width", "padding"),
    [(3, 32, 48, 8, 8, 1), (2, 16, 16, 5, 7, 1), (5, 64, 32, 9, 4, 0), (1, 256, 16, 4, 4, 1), (40, 16, 16, 16, 16, 1)],
)
def test_the_bytes_are_those_of_whole_numbers(
    batch: int, in_channels: int, out_channels: int, height: int, width: int, padding: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for relu, top, pool in ((False, 127, False), (True, 127, True), (True, 255, False), (False, 255, True)):
            spec = spec_of(out_channels, in_channels, padding, relu, top)
            assert can_compute(spec, integers=True)
            layer = WinogradConv(spec)
            layer.pool = pool
            dice = torch.Generator().manual_seed(batch + top)
            values = torch.randint(0, top + 1, (batch, in_channels, height, width), generator=dice, dtype=torch.uint8)
            expected = by_hand(spec, values)
            if pool:
                expected = nn.functional.max_pool2d(expected, 2)
            found = layer(values)
            assert found.dtype == torch.uint8
            assert found.shape == expected.shape
            # float32 may round a half the other way.
            assert (found - expected).abs().max() <= 0.501
            assert expected.std() > 5, "the test says nothing: all bytes are alike"
    finally:
        torch.set_num_threads(before)


@here
def test_the_largest_numbers_do_not_overflow() -> None:
    spec = spec_of(16, 1024, 1, False, 255)._replace(
        weight=torch.full((16, 1024, 3, 3), -127, dtype=torch.int8),
        source=Numbers(0.05, 0, 255),
        result=Numbers(0.05 * 127 * 9 * 1024 * 0.011 * 3, 127, 127),
    )
    values = torch.full((1, 1024, 4, 4), 255, dtype=torch.uint8)
    assert (WinogradConv(spec)(values) - by_hand(spec, values)).abs().max() <= 0.501


def test_other_layers_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(16, 16, 1, True, 127)
    assert not can_compute(spec, integers=False)
    assert not can_compute(spec._replace(arguments=[[2, 2], [1, 1], [1, 1], 1]), True)
    assert not can_compute(spec._replace(arguments=[[1, 1], [2, 2], [1, 1], 1]), True)
    assert not can_compute(spec_of(10, 16, 1, True, 127), True)
    assert not can_compute(spec_of(16, 3, 1, True, 127), True)
    monkeypatch.setattr(kernels, "cpu_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(InputError, match="--engine winograd: it needs a CPU with AVX2; here are: onednn, "):
        engines.check("winograd")
