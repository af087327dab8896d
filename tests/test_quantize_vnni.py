"""Lockstep's own int8 layers for AVX512-VNNI, against whole numbers in float64. A whole net on them is in test_quantize.py.

The same cases run under AddressSanitizer, in a process of their own: `python test_quantize_vnni.py LIBRARY`.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.deploy import engines, kernels, vnni
from lockstep.deploy.kernels import LayerSpec
from lockstep.deploy.vnni import VnniBytes, VnniLayer, can_compute
from lockstep.errors import InputError
from lockstep.machine.native_code import compiler
from lockstep.quantize.scheme import Numbers, input_integers
from sanitizing import sanitized, sanitizer

here = pytest.mark.skipif(bool(vnni.why_not()), reason=f"--engine vnni: {vnni.why_not()}")


def spec_of(shape: tuple[int, ...], padding: int, relu: bool, top: int) -> LayerSpec:
    """A convolution, or with two sizes a linear layer."""
    dice = torch.Generator().manual_seed(sum(shape))
    weight = torch.randint(-127, 128, shape, generator=dice, dtype=torch.int8)
    # A step of the result is about as large as its spread needs.
    result = Numbers(0.007 * top**0.5 * weight[0].numel() ** 0.5, 0 if relu else 40, 127)
    return LayerSpec(
        conv=len(shape) == 4,
        weight=weight,
        scales=torch.rand(shape[0], generator=dice) * 0.01 + 0.001,
        bias=torch.randn(shape[0], generator=dice),
        arguments=[[1, 1], [padding, padding], [1, 1], 1] if len(shape) == 4 else [],
        source=Numbers(0.05, 3, top),
        result=result,
        relu=relu,
        top=top,
    )


def floats_by_hand(spec: LayerSpec, values: torch.Tensor) -> torch.Tensor:
    """From sums that float64 holds exactly."""
    assert spec.source is not None
    assert spec.bias is not None
    inputs, weight = values.double() - spec.source.zero, spec.weight.double()
    scales, bias = spec.source.scale * spec.scales.double(), spec.bias.double()
    if not spec.conv:
        return inputs @ weight.T * scales + bias
    whole = nn.functional.conv2d(inputs, weight, padding=spec.arguments[1][0])
    return whole * scales.view(-1, 1, 1) + bias.view(-1, 1, 1)


def by_hand(spec: LayerSpec, values: torch.Tensor) -> torch.Tensor:
    """The bytes before rounding."""
    assert spec.result is not None
    bytes_ = floats_by_hand(spec, values) / spec.result.scale + spec.result.zero
    return bytes_.clamp(spec.result.zero if spec.relu else 0, spec.result.top)


def draw(*size: int, top: int = 255) -> torch.Tensor:
    return torch.randint(0, top + 1, size, generator=torch.Generator().manual_seed(size[0] + top), dtype=torch.uint8)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


CONVOLUTIONS = [
    (3, (48, 32, 3, 3), 8, 8, 1),
    (2, (16, 3, 3, 3), 5, 7, 1),
    (1, (10, 1, 5, 5), 28, 28, 2),
    (5, (33, 6, 1, 1), 9, 4, 0),
    (4, (64, 20, 5, 5), 7, 14, 0),
    (40, (32, 16, 3, 3), 16, 16, 2),
]
LINEAR = [(1, (10, 392)), (7, (256, 4096)), (130, (32, 30)), (8, (16, 4))]


@here
@pytest.mark.parametrize(("batch", "weight", "height", "width", "padding"), CONVOLUTIONS)
def test_the_bytes_are_those_of_whole_numbers(
    threads: int, batch: int, weight: tuple[int, ...], height: int, width: int, padding: int
) -> None:
    check_convolution(batch, weight, height, width, padding)


def check_convolution(batch: int, weight: tuple[int, ...], height: int, width: int, padding: int) -> None:
    for relu, top, pool in ((False, 127, False), (True, 127, True), (True, 255, False), (False, 255, True)):
        spec = spec_of(weight, padding, relu, top)
        assert can_compute(spec)
        layer = VnniLayer(spec, integers=True)
        layer.pool = pool
        values = draw(batch, weight[1], height, width, top=top)
        expected, found = by_hand(spec, values), layer(values)
        if pool:
            expected = nn.functional.max_pool2d(expected, 2)
        assert found.dtype == torch.uint8
        assert found.shape == expected.shape
        # float32 may round a half the other way.
        assert (found - expected).abs().max() <= 0.501
        assert expected.std() > 5, "the test says nothing: all bytes are alike"


@here
@pytest.mark.parametrize(("batch", "weight"), LINEAR)
def test_linear_layers_give_bytes_or_floats(threads: int, batch: int, weight: tuple[int, int]) -> None:
    check_linear(batch, weight)


def check_linear(batch: int, weight: tuple[int, int]) -> None:
    spec, values = spec_of(weight, 0, True, 127), draw(batch, weight[1], top=127)
    assert (VnniLayer(spec, integers=True)(values) - by_hand(spec, values)).abs().max() <= 0.501
    wanted = floats_by_hand(spec, values)
    torch.testing.assert_close(
        VnniLayer(spec, integers=False)(values).double(), wanted.clamp(min=0), rtol=1e-6, atol=1e-5
    )
    last = VnniLayer(spec._replace(relu=False), integers=False)
    torch.testing.assert_close(last(values).double(), wanted, rtol=1e-6, atol=1e-5)
    assert wanted.min() < 0


@here
def test_the_largest_numbers_do_not_overflow() -> None:
    spec = spec_of((16, 1 << 16), 0, False, 255)._replace(
        weight=torch.full((16, 1 << 16), -127, dtype=torch.int8), source=Numbers(0.05, 0, 255)
    )
    values = torch.full((3, 1 << 16), 255, dtype=torch.uint8)
    found = VnniLayer(spec, integers=False)(values)
    torch.testing.assert_close(found.double(), floats_by_hand(spec, values), rtol=1e-6, atol=1e-6)
    assert not can_compute(spec_of((16, (1 << 16) + 1), 0, False, 255))


@here
@pytest.mark.parametrize("size", [(1, 3, 32, 32), (5, 1, 7, 3), (2, 16, 4, 4)])
def test_images_as_bytes(threads: int, size: tuple[int, ...]) -> None:
    numbers = Numbers(0.013, 60, 127)
    values = torch.randn(size, generator=torch.Generator().manual_seed(3))
    values.view(-1)[:4] = torch.tensor([1e20, -1e20, torch.inf, -torch.inf])
    found = VnniBytes(numbers)(values)
    assert torch.equal(found, input_integers(values, numbers))
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(VnniBytes(numbers)(values.flatten(1)), input_integers(values.flatten(1), numbers))


def test_other_layers_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of((16, 16, 3, 3), 1, True, 127)
    assert can_compute(spec)
    assert not can_compute(spec._replace(source=None))
    assert not can_compute(spec._replace(arguments=[[2, 2], [1, 1], [1, 1], 1]))
    assert not can_compute(spec._replace(arguments=[[1, 1], [1, 0], [1, 1], 1]))
    assert not can_compute(spec._replace(arguments=[[1, 1], [3, 3], [1, 1], 1]))
    assert not can_compute(spec_of((16, 16, 3, 1), 0, True, 127))
    monkeypatch.setattr(kernels, "cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(InputError, match="--engine vnni: it needs a CPU with AVX512-VNNI; here are: onednn, "):
        engines.check("vnni")


@here
@pytest.mark.slow
@pytest.mark.skipif(sanitizer() is None, reason="there is no compiler with AddressSanitizer")
def test_nothing_is_read_or_written_beside_the_operands(tmp_path: Path) -> None:
    library = tmp_path / "vnni.so"
    # -O1: at -O0 gcc does not know which lanes its own vector functions take.
    flags = ["-O1" if flag == "-O3" else flag for flag in vnni.FLAGS]
    words = [compiler(), *flags, "-fsanitize=address", "-shared", *map(str, vnni.LIBRARY.sources), "-o", str(library)]
    subprocess.run(words, check=True)
    words = [sys.executable, __file__, str(library)]
    done = subprocess.run(words, env=sanitized(), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"{len(CONVOLUTIONS) + len(LINEAR)} layers"


def main(library: str) -> None:
    made = vnni.functions_of(ctypes.CDLL(library))
    vnni._functions = lambda: made  # type: ignore[assignment]
    for convolution in CONVOLUTIONS:
        check_convolution(*convolution)
    for linear in LINEAR:
        check_linear(*linear)
    VnniBytes(Numbers(0.013, 60, 127))(torch.randn(5, 3, 7, 3))
    print(f"{len(CONVOLUTIONS) + len(LINEAR)} layers")


if __name__ == "__main__":
    main(sys.argv[1])
