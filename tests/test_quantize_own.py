"""Lockstep's own int8 convolution, against whole numbers in float64; and nets on it, against oneDNN's kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.models.nets import cifar_vgg
from lockstep.quantize import convert, engines, graph, native
from lockstep.quantize.kernels import Spot
from lockstep.quantize.own import WinogradConv, can
from lockstep.quantize.scheme import Numbers, Scheme

here = pytest.mark.skipif(bool(native.why_not()), reason=f"--engine winograd: {native.why_not()}")


def spot_of(outputs: int, channels: int, padding: int, relu: bool, top: int, seed: int = 1) -> Spot:
    dice = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (outputs, channels, 3, 3), generator=dice, dtype=torch.int8)
    scales = torch.rand(outputs, generator=dice) * 0.01 + 0.001
    # A step of the result is about as large as its spread needs.
    result = Numbers(0.02 * top**0.5 * channels**0.5, 0 if relu else 40, 127)
    return Spot(
        conv=True,
        weight=weight,
        scales=scales,
        bias=torch.randn(outputs, generator=dice),
        arguments=[[1, 1], [padding, padding], [1, 1], 1],
        source=Numbers(0.05, 3, top),
        result=result,
        relu=relu,
        top=top,
    )


def by_hand(spot: Spot, values: torch.Tensor) -> torch.Tensor:
    """The bytes before rounding, from sums that float64 holds exactly."""
    assert spot.source is not None
    assert spot.result is not None
    assert spot.bias is not None
    whole = nn.functional.conv2d(values.double() - spot.source.zero, spot.weight.double(), padding=spot.arguments[1][0])
    real = whole * (spot.source.scale * spot.scales.double().view(-1, 1, 1)) + spot.bias.double().view(-1, 1, 1)
    bytes_ = real / spot.result.scale + spot.result.zero
    return bytes_.clamp(spot.result.zero if spot.relu else 0, spot.result.top)


@here
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("batch", "channels", "outputs", "height", "width", "padding"),
    [(3, 32, 48, 8, 8, 1), (2, 16, 16, 5, 7, 1), (5, 64, 32, 9, 4, 0), (1, 256, 16, 4, 4, 1), (40, 16, 16, 16, 16, 1)],
)
def test_the_bytes_are_those_of_whole_numbers(
    batch: int, channels: int, outputs: int, height: int, width: int, padding: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for relu, top, pool in itertools.product((False, True), (127, 255), (False, True)):
            spot = spot_of(outputs, channels, padding, relu, top)
            assert can(spot, integers=True)
            layer = WinogradConv(spot)
            layer.pool = pool
            dice = torch.Generator().manual_seed(batch + top)
            values = torch.randint(0, top + 1, (batch, channels, height, width), generator=dice, dtype=torch.uint8)
            expected = by_hand(spot, values)
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
    spot = spot_of(16, 1024, 1, False, 255)._replace(
        weight=torch.full((16, 1024, 3, 3), -127, dtype=torch.int8),
        source=Numbers(0.05, 0, 255),
        result=Numbers(0.05 * 127 * 9 * 1024 * 0.011 * 3, 127, 127),
    )
    values = torch.full((1, 1024, 4, 4), 255, dtype=torch.uint8)
    assert (WinogradConv(spot)(values) - by_hand(spot, values)).abs().max() <= 0.501


@here
def test_a_wide_net_computes_what_onednn_computes() -> None:
    torch.manual_seed(3)
    images = torch.randn(6, 3, 32, 32)
    prepared = convert.prepare(cifar_vgg().eval(), images[:2], "static", Scheme())
    convert.calibrate(prepared, [images])
    module = graph.exported(convert.convert(prepared), images[:2]).module(check_guards=False)
    ours, theirs = (engines.build(name, module, images) for name in ("winograd", "onednn"))
    own = [layer for layer in ours.modules() if isinstance(layer, WinogradConv)]  # type: ignore[attr-defined]
    # The first has three channels only; every second one has its pool inside.
    assert [layer.pool for layer in own] == [True, False, True, False, True]
    with torch.no_grad():
        expected = theirs(images)
        assert (ours(images) - expected).abs().max() < 0.05 * expected.std()
        torch.testing.assert_close(ours(images[:1]), ours(images)[:1])


def test_other_layers_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    spot = spot_of(16, 16, 1, True, 127)
    assert not can(spot, integers=False)
    assert not can(spot._replace(arguments=[[2, 2], [1, 1], [1, 1], 1]), True)
    assert not can(spot._replace(arguments=[[1, 1], [2, 2], [1, 1], 1]), True)
    assert not can(spot_of(10, 16, 1, True, 127), True)
    assert not can(spot_of(16, 3, 1, True, 127), True)
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(InputError, match="--engine winograd: it needs a CPU with AVX2; here are: onednn, "):
        engines.check("winograd")
