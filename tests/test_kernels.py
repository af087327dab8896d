"""The fused convolution against a plain sum in double precision that knows nothing of it, and against PyTorch where it must agree."""

from __future__ import annotations

import copy
import gc
import io
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lockstep.kernels import FusedConvReLU, native
from lockstep.kernels.op import fused
from lockstep.kernels.way import Tail, Way

if native.load() is None:
    pytest.skip("there is no C++ compiler", allow_module_level=True)

DIRECT, WINOGRAD, TORCH = Way.DIRECT, Way.WINOGRAD, Way.TORCH
# Relative to the largest number. Winograd's transforms cost a digit.
TOLERANCE = {DIRECT: 2e-6, WINOGRAD: 5e-5, TORCH: 5e-6}


class Naive:
    """Convolution, what follows it, and their gradients by their definitions, tap by tap, in double precision."""

    def __init__(self, x: Tensor, w: Tensor, b: Tensor | None, padding: int, tail: int, grad: Tensor) -> None:
        x_, w_, g_ = (tensor.detach().double().numpy() for tensor in (x, w, grad))
        n, channels, height, width = x_.shape
        kernel = w_.shape[2]
        padded = np.zeros((n, channels, height + 2 * padding, width + 2 * padding))
        inner = np.s_[:, :, padding : padding + height, padding : padding + width]
        padded[inner] = x_
        h, w2 = height + 2 * padding - kernel + 1, width + 2 * padding - kernel + 1
        taps = [(i, j, np.s_[:, :, i : i + h, j : j + w2]) for i in range(kernel) for j in range(kernel)]
        out = sum(np.einsum("nchw,oc->nohw", padded[part], w_[:, :, i, j]) for i, j, part in taps)
        out = out if b is None else out + b.detach().double().numpy()[:, None, None]
        if tail == Tail.NOTHING:
            self.y, through = out, g_
        else:
            self.y, through = self._pool(out, g_) if tail == Tail.RELU_POOL else (np.maximum(out, 0), g_ * (out > 0))
        self.grad_b = through.sum((0, 2, 3))
        self.grad_w, grad_padded = np.zeros_like(w_), np.zeros_like(padded)
        for i, j, part in taps:
            self.grad_w[:, :, i, j] = np.einsum("nohw,nchw->oc", through, padded[part])
            grad_padded[part] += np.einsum("nohw,oc->nchw", through, w_[:, :, i, j])
        self.grad_x = grad_padded[inner]

    @staticmethod
    def _pool(out: np.ndarray, grad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n, channels, height, width = out.shape
        y, through = np.zeros((n, channels, height // 2, width // 2)), np.zeros_like(out)
        for index in np.ndindex(*y.shape):
            a, c, i, j = index
            window = out[a, c, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            k = int(np.argmax(window))
            y[index] = max(window.flat[k], 0)
            if window.flat[k] > 0:
                through[a, c, 2 * i + k // 2, 2 * j + k % 2] = grad[index]
        return y, through


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def check(way: Way, x: Tensor, w: Tensor, b: Tensor | None, padding: int, tail: int, tolerance: float) -> Tensor:
    """Forward and all gradients of the fused operator against the plain sum."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    b = None if b is None else b.detach().requires_grad_()
    y = fused(x, w, b, padding, tail, way)
    grad = drawn(*y.shape, seed=9, dtype=x.dtype)
    y.backward(grad)
    naive = Naive(x, w, b, padding, tail, grad)
    for name, found, wanted in (
        ("y", y, naive.y),
        ("grad_x", x.grad, naive.grad_x),
        ("grad_w", w.grad, naive.grad_w),
        ("grad_b", None if b is None else b.grad, naive.grad_b),
    ):
        if found is not None:
            error = np.abs(found.detach().double().numpy() - wanted).max(initial=0) / max(
                np.abs(wanted).max(initial=0), 1e-30
            )
            assert error < tolerance, (name, way, tuple(x.shape), tuple(w.shape), padding, tail, error)
    return y


# Every published shape, at a small batch: (channels, output channels, size).
PUBLISHED = [
    (1, 4, 28),
    (4, 8, 14),
    (4, 8, 28),
    (1, 32, 28),
    (3, 32, 32),
    (32, 32, 28),
    (32, 64, 32),
    (64, 128, 16),
    (256, 256, 8),
]


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_published_shapes_in_float32(shape: tuple[int, int, int], tail: Tail) -> None:
    channels, width, size = shape
    way = WINOGRAD if min(channels, width) >= 16 else DIRECT
    x, w, b = drawn(2, channels, size, size, seed=1), drawn(width, channels, 3, 3, seed=2), drawn(width, seed=3)
    check(way, x, w, b, 1, tail, TOLERANCE[way])


shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "height": st.integers(1, 19),
        "width": st.integers(1, 19),
        "kernel": st.sampled_from([1, 3, 5]),
        "padding": st.integers(0, 4),
        "tail": st.sampled_from(Tail),
        "last": st.booleans(),
        "bias": st.booleans(),
        "double": st.booleans(),
    }
)


@settings(max_examples=90, deadline=None, derandomize=True)
@given(shapes, st.integers(1, 11), st.integers(1, 19), st.booleans())
def test_any_shape_and_layout(shape: dict[str, int], channels: int, width: int, winograd: bool) -> None:
    kernel = 3 if winograd else shape["kernel"]
    padding, least = min(shape["padding"], kernel - 1), 2 if shape["tail"] == Tail.RELU_POOL else 1
    height, breadth = (max(shape[side], least + kernel - 1 - 2 * padding, 1) for side in ("height", "width"))
    channels, width = (channels + 15, width + 15) if winograd else (channels, width)
    dtype = torch.float64 if shape["double"] else torch.float32
    x = drawn(shape["batch"], channels, height, breadth, seed=1, dtype=dtype)
    w = drawn(width, channels, kernel, kernel, seed=2, dtype=dtype)
    if shape["last"]:
        x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
    way = WINOGRAD if winograd else DIRECT
    bias = drawn(width, seed=3, dtype=dtype) if shape["bias"] else None
    check(way, x, w, bias, padding, shape["tail"], 1e-12 if shape["double"] else TOLERANCE[way])


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize(("way", "channels", "width"), [(DIRECT, 2, 3), (WINOGRAD, 16, 17), (TORCH, 2, 3)])
def test_gradcheck_in_double_precision(way: Way, channels: int, width: int, tail: Tail) -> None:
    x, w, b = (
        drawn(*shape, seed=seed, dtype=torch.float64).requires_grad_()
        for seed, shape in enumerate([(2, channels, 5, 6), (width, channels, 3, 3), (width,)])
    )
    assert torch.autograd.gradcheck(lambda *a: fused(*a, 1, tail, way), (x, w, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *a: fused(*a, 1, tail, way), (x, w, b), fast_mode=True)


@pytest.mark.parametrize("way", [DIRECT, WINOGRAD])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38], ids=str)
def test_what_is_not_a_number_goes_where_pytorch_lets_it_go(way: Way, value: float) -> None:
    for where in ("x", "w", "grad"):
        for tail in Tail:
            x, w, b = drawn(2, 16, 12, 12, seed=1), drawn(16, 16, 3, 3, seed=2), drawn(16, seed=3)
            grad = drawn(*((2, 16, 6, 6) if tail == Tail.RELU_POOL else (2, 16, 12, 12)), seed=4)
            {"x": x, "w": w, "grad": grad}[where].view(-1)[37] = value
            ours, theirs = ([t.clone().requires_grad_() for t in (x, w, b)] for _ in range(2))
            y = fused(*ours, 1, tail, way)
            expected = functional.conv2d(*theirs, padding=1)
            expected = expected if tail == Tail.NOTHING else functional.relu(expected)
            expected = functional.max_pool2d(expected, 2) if tail == Tail.RELU_POOL else expected
            y.backward(grad)
            expected.backward(grad)
            for a, c in zip([y, *(t.grad for t in ours)], [expected, *(t.grad for t in theirs)], strict=True):
                assert torch.equal(a.isnan(), c.isnan()), (where, tail)
                assert torch.equal(a.isinf(), c.isinf()), (where, tail)
                both = a.isfinite() & (c.abs() < 1e30)
                torch.testing.assert_close(a[both], c[both], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", [DIRECT, WINOGRAD])
@pytest.mark.parametrize("value", [1e2, 1e3, 1e4, 1e6, 1e8, 1e12])
def test_one_large_number_does_not_reach_outputs_that_it_has_no_part_in(way: Way, value: float) -> None:
    """In x for the result, in the gradient for the gradient of x; pixel 7, 7 is in the 3x3 outputs around it alone."""
    x, w = drawn(2, 16, 16, 16, seed=1), drawn(16, 16, 3, 3, seed=2)
    grad = drawn(2, 16, 16, 16, seed=3)
    around = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    around[0, :, 6:9, 6:9] = False

    def untouched(x: Tensor, grad: Tensor, which: int) -> tuple[Tensor, Tensor]:
        ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        bias = torch.full((16,), 50.0)  # nothing is cut off, so that every gradient passes
        y, wanted = (
            fused(ours, w, bias, 1, False, way),
            functional.conv2d(exact, w.double(), bias.double(), padding=1).relu(),
        )
        y.backward(grad)
        wanted.backward(grad.double())
        found = [(y.detach(), wanted.detach()), (ours.grad, exact.grad)][which]
        return found[0] * around, found[1] * around

    # What csrc/simd.h promises: 2 eps of the largest number that is let through, times the sum of the weights' sizes; and float32's own
    # rounding of 144 usual numbers and the bias.
    eps, weights = torch.finfo(torch.float32).eps, float(w.abs().sum((1, 2, 3)).max())
    usual = 0.8  # the mean size of normal numbers
    bound = 2 * eps * min(value, 1024 * usual) * weights + 144 * eps * 50
    for which in (0, 1):
        large_x, large_grad = x.clone(), grad.clone()
        (large_x if which == 0 else large_grad)[0, 3, 7, 7] = value
        found, wanted = untouched(large_x, large_grad, which)
        assert float((found.double() - wanted).abs().max()) < bound, which


@pytest.mark.parametrize("way", [DIRECT, WINOGRAD])
def test_layouts_of_input_weight_and_gradient_do_not_matter(way: Way) -> None:
    x, w, b = drawn(3, 16, 10, 9, seed=1), drawn(24, 16, 3, 3, seed=2), drawn(24, seed=3)
    wanted = check(way, x, w, b, 1, False, TOLERANCE[way])
    grad = drawn(*wanted.shape, seed=4)

    def grads(x: Tensor, w: Tensor, grad: Tensor) -> list[Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = fused(x, w, b, 1, False, way)
        y.backward(grad)
        return [y, x.grad, w.grad]

    plain = grads(x, w, grad)
    last = torch.channels_last
    views = {
        "channels_last": (x.contiguous(memory_format=last), w, grad),
        "weight channels_last": (x, w.contiguous(memory_format=last), grad),
        "gradient channels_last": (x, w, grad.contiguous(memory_format=last)),
        "transposed": (x.transpose(2, 3).contiguous().transpose(2, 3), w, grad),
        "every second": (x.repeat_interleave(2, 3)[..., ::2], w, grad),
        "expanded gradient": (x, w, grad[:1, :1, :1, :1].expand_as(grad)),
    }
    for name, (x2, w2, grad2) in views.items():
        y, gx, gw = grads(x2, w2, grad2)
        assert y.is_contiguous(
            memory_format=last if x2.is_contiguous(memory_format=last) else torch.contiguous_format
        ), name
        assert gw.stride() == w2.stride(), name
        reference = plain if grad2 is grad or name.startswith("gradient") else grads(x, w, grad2.contiguous())
        for a, c in zip((y, gx, gw), reference, strict=True):
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4, msg=name)


def test_an_empty_batch_gives_an_empty_result_and_zero_gradients() -> None:
    for way in (DIRECT, WINOGRAD):
        for pool in (False, True):
            x, w, b = torch.zeros(0, 16, 8, 8, requires_grad=True), drawn(16, 16, 3, 3, seed=1), torch.ones(16)
            w, b = w.requires_grad_(), b.requires_grad_()
            y = fused(x, w, b, 1, pool, way)
            assert y.shape == (0, 16, *((4, 4) if pool else (8, 8)))
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape
            assert w.grad is not None
            assert not w.grad.any()
            assert b.grad is not None
            assert not b.grad.any()


@pytest.mark.parametrize("way", [DIRECT, WINOGRAD])
def test_bfloat16_is_computed_in_float32_and_rounded_once(way: Way) -> None:
    x, w, b = (
        drawn(*shape, seed=seed).bfloat16() for seed, shape in enumerate([(2, 16, 9, 10), (20, 16, 3, 3), (20,)])
    )
    wide = fused(x.float(), w.float(), b.float(), 1, False, way)
    short = fused(x, w, b, 1, False, way)
    assert short.dtype == torch.bfloat16
    assert torch.equal(short, wide.bfloat16())
    assert torch.isnan(fused(torch.full_like(x, float("nan")), w, b, 1, False, way)).all()


def test_autocast_computes_in_bfloat16_and_leaves_float32_gradients() -> None:
    conv = FusedConvReLU(4, 8, 3, padding=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = conv(drawn(8, 4, 14, 14, seed=1))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.dtype == torch.float32
    expected = functional.conv2d(drawn(8, 4, 14, 14, seed=1), conv.weight, conv.bias, padding=1).relu()
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "words",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": 1, "pool": True},
        {"kernel_size": 5, "padding": 2, "bias": False},
        {"kernel_size": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "dilation": 2},
        {"kernel_size": 3, "groups": 4, "padding": 1},
        {"kernel_size": (3, 5), "padding": "same"},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
        {"kernel_size": 3, "padding": 1, "dtype": torch.float64},
    ],
    ids=str,
)
def test_the_module_is_a_drop_in_for_conv_and_relu(words: dict[str, object]) -> None:
    pool = bool(words.pop("pool", False))
    torch.manual_seed(5)
    ours = FusedConvReLU(4, 8, **words, pool=pool)
    torch.manual_seed(5)
    theirs = nn.Conv2d(4, 8, **words)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    ours.load_state_dict(theirs.state_dict())
    words["pool"] = pool
    x = drawn(32, 4, 14, 14, seed=1, dtype=theirs.weight.dtype).requires_grad_()
    x2 = x.detach().clone().requires_grad_()
    expected = theirs(x2).relu()
    expected = functional.max_pool2d(expected, 2) if pool else expected
    y = ours(x)
    y.backward(expected.detach())
    expected.backward(expected.detach())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    pairs = zip([x, *ours.parameters()], [x2, *theirs.parameters()], strict=True)
    for a, c in pairs:
        torch.testing.assert_close(a.grad, c.grad, rtol=1e-3, atol=1e-3)
    unbatched = ours(x[0].detach())
    torch.testing.assert_close(unbatched, expected[0].detach(), rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 3, 5]),
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.sampled_from([1, 2, 4]), st.integers(0, 2)),
    st.sampled_from(["planar", "last", "sliced", "transposed"]),
    st.integers(1, 34),
    st.booleans(),
)
def test_the_module_with_any_stride_and_layout(
    kernel: int, words: tuple[int, int, int, int], layout: str, batch: int, pool: bool
) -> None:
    stride, dilation, groups, padding = words
    conv = FusedConvReLU(4, 8, kernel, stride, padding, dilation, groups, pool=pool)
    x = drawn(batch, 4, 14, 15, seed=1)
    x = {
        "planar": x,
        "last": x.contiguous(memory_format=torch.channels_last),
        "sliced": x.repeat(1, 2, 1, 1)[:, ::2],
        "transposed": x.transpose(2, 3),
    }[layout].detach()
    double = copy.deepcopy(conv).double()
    wide = x.double().requires_grad_()
    wanted = functional.conv2d(wide, double.weight, double.bias, stride, padding, dilation, groups).relu()
    wanted = functional.max_pool2d(wanted, 2) if pool else wanted
    y = conv(x.requires_grad_())
    grad = drawn(*wanted.shape, seed=2)
    y.backward(grad)
    wanted.backward(grad.double())
    pairs = [
        (y, wanted),
        (x.grad, wide.grad),
        (conv.weight.grad, double.weight.grad),
        (conv.bias.grad, double.bias.grad),
    ]
    for found, other in pairs:
        assert (found.double() - other).norm() <= 1e-5 * other.norm() + 1e-12


def test_copies_and_pickles_work(tmp_path: Path) -> None:
    conv = FusedConvReLU(1, 4, 3, padding=1, pool=True)
    x = drawn(8, 1, 28, 28, seed=1)
    buffer = io.BytesIO()
    torch.save(conv, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(conv), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), conv(x))
    assert "pool=True" in repr(conv)


BAD = {
    "channels": torch.zeros(2, 5, 8, 8),
    "type": torch.zeros(2, 4, 8, 8, dtype=torch.float64),
    "whole numbers": torch.zeros(2, 4, 8, 8, dtype=torch.int64),
    "dimensions": torch.zeros(4, 8),
    "too small": torch.zeros(2, 4, 2, 2),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_pytorchs_own_words(what: str) -> None:
    conv, plain = FusedConvReLU(4, 8, 3), nn.Conv2d(4, 8, 3)
    with pytest.raises(RuntimeError) as theirs:
        plain(BAD[what])
    with pytest.raises(RuntimeError) as ours:
        conv(BAD[what])
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_tensors_of_another_device_go_to_pytorch() -> None:
    conv = FusedConvReLU(4, 8, 3, padding=1, pool=True, device="meta")
    assert conv(torch.zeros(2, 4, 8, 8, device="meta")).shape == (2, 8, 4, 4)


def test_a_penalty_on_the_gradient_has_pytorchs_second_derivative() -> None:
    conv = FusedConvReLU(16, 16, 3, padding=1)
    plain = nn.Conv2d(16, 16, 3, padding=1)
    plain.load_state_dict(conv.state_dict())
    found = []
    for layer in (conv, lambda x: plain(x).relu()):
        x = drawn(2, 16, 6, 6, seed=1).requires_grad_()
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert conv.weight.grad is not None
    torch.testing.assert_close(conv.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-3)


def test_one_module_used_twice_sums_its_gradients() -> None:
    conv = FusedConvReLU(8, 8, 3, padding=1)
    x = drawn(16, 8, 14, 14, seed=1)
    conv(conv(x)).sum().backward()
    plain = nn.Conv2d(8, 8, 3, padding=1)
    plain.load_state_dict(conv.state_dict())
    plain(plain(x).relu()).relu().sum().backward()
    assert conv.weight.grad is not None
    torch.testing.assert_close(conv.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("way", [DIRECT, WINOGRAD])
def test_threads_divide_the_work_and_callers_do_not_disturb_each_other(way: Way) -> None:
    x, w, b = drawn(7, 16, 12, 12, seed=1), drawn(16, 16, 3, 3, seed=2), drawn(16, seed=3)

    def grads() -> list[Tensor]:
        w2 = w.clone().requires_grad_()
        y = fused(x, w2, b, 1, True, way)
        y.sum().backward()
        return [y.detach(), w2.grad]

    before, wanted = torch.get_num_threads(), grads()
    failed: list[int] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y, gw = grads()
            assert torch.equal(y, wanted[0])
            torch.testing.assert_close(gw, wanted[1], rtol=1e-4, atol=1e-3)
            again = grads()
            assert torch.equal(again[1], gw)  # the same number of threads, the same bits
    finally:
        torch.set_num_threads(before)

    def caller(number: int) -> None:
        for _ in range(20):
            if not torch.equal(grads()[0], wanted[0]):
                failed.append(number)

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not failed


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_ten_thousand_calls_leave_no_memory_behind() -> None:
    x, w, b = drawn(2, 2, 12, 12, seed=1), drawn(4, 2, 3, 3, seed=2).requires_grad_(), torch.zeros(4)

    def call(times: int) -> None:
        for _ in range(times):
            fused(x, w, b, 1, True, DIRECT).sum().backward()
            w.grad = None

    call(500)
    gc.collect()
    before = resident_bytes()
    call(10_000)
    gc.collect()
    assert resident_bytes() - before < 4 << 20  # 10,000 results of 1.2 kB are 11 MiB


@pytest.mark.parametrize(("channels", "width", "pool"), [(1, 4, True), (16, 16, False)])
def test_torch_compile_keeps_it_in_one_graph(channels: int, width: int, pool: bool) -> None:
    conv = FusedConvReLU(channels, width, 3, padding=1, pool=pool)
    # aot_eager: the same tracing of forward and backward as inductor's, without its minute of compiling.
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for batch in (4, 6):
        x = drawn(batch, channels, 16, 16, seed=1)
        y = compiled(x)
        conv.zero_grad()
        y.sum().backward()
        found = conv.weight.grad.clone()
        conv.zero_grad()
        expected = conv(x)
        expected.sum().backward()
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found, conv.weight.grad, rtol=1e-4, atol=1e-2)


def test_the_operators_pass_torchs_own_checks() -> None:
    checks = ("test_schema", "test_faketensor")
    for last in (torch.contiguous_format, torch.channels_last):
        x, w = drawn(2, 2, 8, 8, seed=1).contiguous(memory_format=last), drawn(3, 2, 3, 3, seed=2)
        for pool in (False, True):
            forward, backward = torch.ops.lockstep.conv_relu_forward, torch.ops.lockstep.conv_relu_backward
            torch.library.opcheck(forward.default, (x, w, None, 1, pool, 1, True), test_utils=checks)
            y, code = forward(x, w, None, 1, pool, 1, True)
            grad = torch.ones_like(y)
            torch.library.opcheck(
                backward.default, (grad, x, w, code if pool else y, 1, pool, 1, True), test_utils=checks
            )
