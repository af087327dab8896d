"""Tensors that lie oddly in memory: every operand of the fused convolution as views with gaps, overlaps, other orders and other signs.

The same cases run under AddressSanitizer, in a process of their own: `python test_kernels_strides.py LIBRARY ISA CASES`.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lockstep.kernels import FusedConvReLU, build, native, op
from lockstep.kernels.way import Way
from lockstep.machine.native_code import compiler
from sanitizing import sanitized, sanitizer

HERE = Path(__file__)
ABLE = build.able()


def _gaps(t: Tensor) -> Tensor:
    """Every second number of each dimension of a larger tensor, which starts in the middle of its memory."""
    large = torch.randn([2 * n + 1 for n in t.shape], dtype=t.dtype)
    view = large[tuple(slice(1, None, 2) for _ in t.shape)]
    return view.copy_(t)


def _slice(t: Tensor) -> Tensor:
    """The first half of the second dimension: of a weight, its rows are twice as far apart as they are long."""
    return torch.cat([t, t], 1 if t.dim() > 1 else 0)[:, : t.shape[1]] if t.dim() > 1 else torch.cat([t, t])[: len(t)]


def _turned(t: Tensor) -> Tensor:
    """Dimensions in the opposite order in memory."""
    order = list(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def _expanded(t: Tensor) -> Tensor:
    """All numbers along the last dimension are one number in memory, and along the first too."""
    first = t[:1, ..., :1] if t.dim() > 1 else t[:1]
    return first.expand_as(t)


def _overlapping(t: Tensor) -> Tensor:
    """Windows that share their numbers with the next."""
    return torch.randn(sum(t.shape) + 1, dtype=t.dtype).as_strided(t.shape, [1] * t.dim(), 1)


def _negated(t: Tensor) -> Tensor:
    """A view whose numbers have the other sign in memory."""
    return torch.complex(t, -t).conj().imag


def _odd_offset(t: Tensor) -> Tensor:
    """Without gaps, but nowhere near the beginning of a cache line."""
    return torch.cat([torch.zeros(3, dtype=t.dtype), t.reshape(-1)])[3:].view(t.shape)


def _wild_ones(t: Tensor) -> Tensor:
    """Dimensions of size one may have any stride, since nothing lies behind the first."""
    strides = [stride if size > 1 else 12345 for size, stride in zip(t.shape, t.contiguous().stride(), strict=True)]
    return t.contiguous().as_strided(t.shape, strides)


def _last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "channels-last": _last,
    "gaps": _gaps,
    "slice": _slice,
    "turned": _turned,
    "expanded": _expanded,
    "overlapping": _overlapping,
    "negated": _negated,
    "odd offset": _odd_offset,
    "wild ones": _wild_ones,
}
OPERANDS = ("x", "weight", "bias", "grad")


def check(seed: int, views: dict[str, str], winograd: bool, double: bool) -> None:
    """One case, drawn from its seed: result and all gradients against PyTorch's operators in double precision."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kernel = 3 if winograd else draw.choice([1, 3, 5])
    padding, pool = draw.randrange(kernel), draw.random() < 0.5
    channels, width = draw.randint(1, 6), draw.randint(1, 9)
    channels, width = (channels + 15, width + 15) if winograd else (channels, width)
    least = (2 if pool else 1) + kernel - 1 - 2 * padding
    height, breadth = (max(draw.randint(1, 11), least, 1) for _ in range(2))
    dtype = torch.float64 if double else torch.float32
    shapes = {
        "x": (draw.randint(1, 3), channels, height, breadth),
        "weight": (width, channels, kernel, kernel),
        "bias": (width,),
    }
    given = {name: VIEWS[views[name]](torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()}
    # Leaves that keep the view's strides, as `nn.Parameter(view)` does.
    ours = {name: nn.Parameter(tensor) for name, tensor in given.items()}
    exact = {name: tensor.double().clone().requires_grad_() for name, tensor in given.items()}
    way = Way.WINOGRAD if winograd else Way.DIRECT
    y = op.fused(ours["x"], ours["weight"], ours["bias"], padding, pool, way)
    before = functional.conv2d(exact["x"], exact["weight"], exact["bias"], padding=padding)
    wanted = functional.relu(functional.max_pool2d(before, 2) if pool else before)
    grad = VIEWS[views["grad"]](torch.randn(y.shape, dtype=dtype))
    what = f"seed {seed}, {views}, {way.name}, {dtype}"
    # Rounding: sums of `terms` numbers are off by at most terms x eps of the sum of their sizes; Winograd's transforms multiply that
    # by the norms of their matrices, of which the tests of test_kernels.py know that they cost a digit.
    terms = channels * kernel * kernel
    eps = torch.finfo(dtype).eps * (10 if winograd else 1)
    sizes = functional.conv2d(exact["x"].abs(), exact["weight"].abs(), exact["bias"].abs(), padding=padding).detach()
    bound = eps * terms * (functional.max_pool2d(sizes, 2) if pool else sizes).max()
    assert (y.double() - wanted).abs().max() <= bound, what
    # Which output the ReLU cuts off, or which of four is the largest, is decided by rounding where they are that close: then the
    # gradients go elsewhere, and both are right. Such cases (ties of expanded images) are judged by the result alone.
    if _decided(before, pool, bound):
        y.backward(grad)
        wanted.backward(grad.double())
        for name in ours:
            found, right = ours[name].grad, exact[name].grad
            assert found is not None
            assert right is not None
            count = terms + y.numel()
            assert (found.double() - right).norm() <= eps * count * (right.norm() + grad.double().norm()), (name, what)


def _decided(before: Tensor, pool: bool, bound: Tensor) -> bool:
    if not pool:
        return bool((before.abs() > 2 * bound).all())
    windows = functional.unfold(
        before[:, :, : before.shape[2] // 2 * 2, : before.shape[3] // 2 * 2].flatten(0, 1)[:, None], 2, stride=2
    )
    largest = windows.topk(2, dim=1).values
    return bool((largest[:, 0].abs() > 2 * bound).all() and ((largest[:, 0] - largest[:, 1]) > 2 * bound).all())


@pytest.mark.skipif(native.load() is None, reason="there is no C++ compiler")
@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.fixed_dictionaries({name: st.sampled_from(list(VIEWS)) for name in OPERANDS}),
    st.booleans(),
    st.booleans(),
)
def test_operands_that_lie_oddly_in_memory(seed: int, views: dict[str, str], winograd: bool, double: bool) -> None:
    check(seed, views, winograd, double)


@pytest.mark.skipif(native.load() is None, reason="there is no C++ compiler")
def test_a_module_whose_weight_is_a_view_learns_as_pytorchs() -> None:
    for name, view in VIEWS.items():
        torch.manual_seed(1)
        conv = FusedConvReLU(4, 8, 3, padding=1)
        conv.weight = nn.Parameter(view(torch.randn(8, 4, 3, 3)))
        x = torch.randn(64, 4, 14, 14)
        weight = conv.weight.detach().clone().requires_grad_()
        conv(x).sum().backward()
        functional.relu(functional.conv2d(x, weight, conv.bias, padding=1)).sum().backward()
        torch.testing.assert_close(conv.weight.grad, weight.grad, rtol=1e-4, atol=1e-2, msg=name)


@pytest.mark.skipif(native.load() is None, reason="there is no C++ compiler")
def test_operands_that_do_not_go_together_are_said_to_be_wrong_and_not_read() -> None:
    x, weight, bias = torch.randn(2, 4, 8, 8), torch.randn(8, 4, 3, 3), torch.randn(8)
    backward = torch.ops.lockstep.conv_relu_backward
    y = op.fused(x, weight, bias, 1)
    for operands in (
        (x, weight, bias[:3]),
        (x, weight.double(), bias),
        (x, weight, bias.double()),
        (x, weight.to("meta"), bias),
        (x, weight.to_sparse(), bias),
        (x[:, :, :0], weight, bias),
        (x[:, :0], weight[:, :0], bias),
        (x, weight[:0], bias[:0]),
    ):
        with pytest.raises(RuntimeError, match="conv_relu: "):
            op.fused(*operands, 1)
    for grad, kept in ((y[:1], y), (y, y[:, :4]), (y.double(), y), (y, y.byte())):
        with pytest.raises(RuntimeError, match="conv_relu: "):
            backward(grad, x, weight, kept, 1, False, int(Way.DIRECT), True)


@pytest.mark.parametrize("shape", [(2, 4, 0, 8), (2, 4, 8, 0), (0, 4, 8, 8), (2, 4, 0, 0)], ids=str)
@pytest.mark.parametrize("padding", [1, 2])
def test_images_without_pixels_are_pytorchs_affair(shape: tuple[int, ...], padding: int) -> None:
    conv, plain = FusedConvReLU(4, 8, 3, padding=padding), nn.Conv2d(4, 8, 3, padding=padding)
    plain.load_state_dict(conv.state_dict())

    def answer(module: nn.Module) -> tuple[object, ...]:
        try:
            y = module(torch.zeros(shape)).relu()
        except RuntimeError as error:
            return (str(error).splitlines()[0],)
        y.sum().backward()
        return y.shape, y.sum().item(), *(p.grad.sum().item() for p in module.parameters() if p.grad is not None)

    assert answer(conv) == answer(plain)


@pytest.mark.skipif(native.load() is None, reason="there is no C++ compiler")
def test_without_gradients_nothing_is_kept_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = native.Native.forward

    def forward(self: native.Native, *operands: object) -> object:
        asked.append(bool(operands[-1]))
        return real(self, *operands)  # type: ignore[arg-type]

    monkeypatch.setattr(native.Native, "forward", forward)
    x, weight = torch.randn(2, 1, 8, 8), torch.randn(4, 1, 3, 3, requires_grad=True)
    trained = op.fused(x, weight, None, 1, True)
    with torch.no_grad():
        assert torch.equal(op.fused(x, weight, None, 1, True), trained)
    with torch.inference_mode():
        assert torch.equal(op.fused(x, weight, None, 1, True), trained)
    assert torch.equal(op.fused(x, weight.detach(), None, 1, True), trained)
    assert asked == [True, False, False, False]


@pytest.mark.slow
@pytest.mark.skipif(sanitizer() is None, reason="there is no compiler with AddressSanitizer")
@pytest.mark.parametrize("isa", [name for name in ABLE if name != "portable"] or ABLE)
def test_no_operand_makes_the_kernels_read_or_write_beside_it(isa: str, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    # -O0: half the time to compile, and nothing is optimised away that the sanitizer should see.
    flags = [flag for flag in build.FLAGS if flag != "-O2"] + ["-O0", "-fsanitize=address", *build.TARGETS[isa].words]

    def compiled(source: Path) -> str:
        made = tmp_path / f"{source.stem}.o"
        subprocess.run([compiler(), *flags, "-c", str(source), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, build.SOURCES.glob("*.cpp")))
    subprocess.run([compiler(), "-shared", "-fsanitize=address", *objects, "-o", str(library)], check=True)
    done = subprocess.run(
        [sys.executable, str(HERE), str(library), isa, "150"], env=sanitized(), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["150", "cases", "on", isa]


def main(library: str, isa: str, cases: int) -> None:
    """Cases by the hundred with these kernels."""
    kernels = native.Native(isa, Path(library))
    native.load = lambda double=False: kernels  # type: ignore[assignment]
    draw = random.Random(0)
    for seed in range(cases):
        check(seed, {name: draw.choice(list(VIEWS)) for name in OPERANDS}, draw.random() < 0.5, False)
    print(f"{cases} cases on {isa}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
