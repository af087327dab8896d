"""The child that tries: `python -m lockstep.machine.child` imports torch once and forks a process for each group of cases.

It prints one JSON object: each case, and what went wrong with it ("" for nothing).

Inputs are small whole numbers, drawn so that every sum of products is a whole number that all formats represent exactly. So a
right result differs from float64's by less than 1/4, whatever the order of adding, and a wrong one by 1 or more.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.errors import first_line
from lockstep.process import die_with_parent

if TYPE_CHECKING:
    from torch import Tensor

Case = Callable[[], None]
# All cases of a format take a fraction of a second; a machine under load that needs a hundred times as long is not called broken.
CASE_SECONDS = 60.0


# What ends a process from outside (by hand, for lack of memory) says nothing about the machine.
EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WrongNumbers(Exception):
    """A result that differs from float64's."""


def try_all(cases: Mapping[str, Case], seconds: float = CASE_SECONDS) -> dict[str, str]:
    """Each case's problem. Cases of one format (the first word) share a process; where it fails, each gets its own."""
    groups: dict[str, dict[str, Case]] = {}
    for name, case in cases.items():
        groups.setdefault(name.split()[0], {})[name] = case
    started = {kind: IsolatedCall(partial(_each, group.values()), seconds) for kind, group in groups.items()}
    works = {kind for kind, process in started.items() if not process.problem()}
    return {
        name: "" if name.split()[0] in works else IsolatedCall(case, seconds).problem() for name, case in cases.items()
    }


def _each(cases: Iterable[Case]) -> None:
    for case in cases:
        case()


class IsolatedCall:
    """A call in a forked process, so that a case that crashes does not affect the next."""

    def __init__(self, work: Callable[[], Any], seconds: float) -> None:
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self._reader, writer = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(parent)  # a case that hangs is not left behind
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # as an exception it would look like a case that fails
            os.close(self._reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(writer, _attempt(work).encode() or b"\n")
            os._exit(0)
        os.close(writer)

    def problem(self) -> str:
        """Wait for it; what went wrong, "" for nothing."""
        said = _read(self._reader, self._until)
        os.close(self._reader)
        if said is None:
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        if said is None:
            return f"do not end within {self._seconds:g} s"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in EXTERNAL_SIGNALS:
            sys.exit(
                f"a case was ended by {signal.Signals(os.WTERMSIG(status)).name}, which says nothing about the machine"
            )
        if os.WIFSIGNALED(status):
            return f"end with {signal.Signals(os.WTERMSIG(status)).name}"
        return said.decode(errors="replace").strip()


def _attempt(work: Callable[[], Any]) -> str:
    try:
        work()
    except WrongNumbers:
        return "give wrong numbers"
    except BaseException as error:
        return f"fail ({first_line(error)[:200]})"
    return ""


def _read(descriptor: int, until: float) -> bytes | None:
    """All that is written until the other end is closed; None if that takes too long."""
    parts: list[bytes] = []
    while True:
        if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
            return None
        part = os.read(descriptor, 4096)
        if not part:
            return b"".join(parts)
        parts.append(part)


def cases() -> dict[str, Case]:
    """Every format, operation and size. The names complete the sentence "NAME end with SIGILL on this machine"."""
    found: dict[str, Case] = {}
    for kind in ("fp32", "bf16", "fp16"):
        for size in ("small", "large"):
            found[f"{kind} {size} convolutions"] = partial(_convolution, kind, size)
            found[f"{kind} {size} linear layers"] = partial(_linear, kind, size)
            found[f"{kind} {size} matrix products"] = partial(_product, kind, size)
    for size in ("small", "large"):
        found[f"int8 {size} convolutions"] = partial(_int8_convolution, size)
        found[f"int8 {size} linear layers"] = partial(_int8_linear, size)
        found[f"int8 {size} matrix products"] = partial(_int8_product, size)
    return found


def numbers(*shape: int, low: int = -1, high: int = 1) -> Tensor:
    import torch

    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _check(work: Callable[..., Tensor], kind: str, *inputs: Tensor) -> None:
    """Forward and backward in the format, against float64."""
    import torch

    results = []
    for dtype in ({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind], torch.float64):
        given = [value.to(dtype).requires_grad_() for value in inputs]
        result = work(*given)
        outer = numbers(*result.shape).to(dtype)
        results.append([result.detach(), *torch.autograd.grad(result, given, outer)])
    for found, exact in zip(*results, strict=True):
        compare(found, exact)


def compare(found: Tensor, exact: Tensor) -> None:
    if not bool(((found.double() - exact).abs() < 0.25).all()):  # NaN is not below it either
        raise WrongNumbers


def _convolution(kind: str, size: str) -> None:
    import torch
    from torch.nn import functional

    batch, channels, out_channels, side = {"small": (2, 4, 8, 8), "large": (4, 32, 64, 16)}[size]
    call = partial(functional.conv2d, padding=1)
    image, weight, bias = (
        numbers(batch, channels, side, side),
        numbers(out_channels, channels, 3, 3),
        numbers(out_channels),
    )
    _check(call, kind, image, weight, bias)
    channels_last = {"memory_format": torch.channels_last}
    _check(call, kind, image.contiguous(**channels_last), weight.contiguous(**channels_last), bias)


def _linear(kind: str, size: str) -> None:
    from torch.nn import functional

    batch, inner, outer = {"small": (8, 16, 10), "large": (64, 256, 256)}[size]
    _check(functional.linear, kind, numbers(batch, inner), numbers(outer, inner), numbers(outer))


def _product(kind: str, size: str) -> None:
    import torch

    rows, inner, columns = {"small": (8, 8, 8), "large": (64, 256, 96)}[size]
    _check(torch.matmul, kind, numbers(rows, inner), numbers(inner, columns))


def _int8_convolution(size: str) -> None:
    import torch
    from torch.nn import functional

    from lockstep.torch_private import onednn

    batch, channels, out_channels, side = {"small": (2, 4, 8, 8), "large": (4, 32, 64, 16)}[size]
    image, weight = numbers(batch, channels, side, side, low=0, high=3), numbers(out_channels, channels, 3, 3)
    scales, zeros, shape = (
        torch.ones(out_channels),
        torch.zeros(out_channels, dtype=torch.int64),
        ([1, 1], [1, 1], [1, 1], 1),
    )
    packed = onednn.qconv_prepack(weight.to(torch.int8), scales, 1.0, 0, *shape, None)
    after: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
    found = onednn.qconv_pointwise(image.to(torch.uint8), 1.0, 0, packed, scales, zeros, None, *shape, *after)
    compare(found, functional.conv2d(image, weight, padding=1))


def _int8_linear(size: str) -> None:
    import torch

    from lockstep.torch_private import onednn

    batch, inner, outer = {"small": (8, 16, 10), "large": (64, 256, 256)}[size]
    values, weight = numbers(batch, inner, low=0, high=3), numbers(outer, inner)
    scales, zeros = torch.ones(outer), torch.zeros(outer, dtype=torch.int64)
    packed = onednn.qlinear_prepack(weight.to(torch.int8), None)
    after: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
    found = onednn.qlinear_pointwise(values.to(torch.uint8), 1.0, 0, packed, scales, zeros, None, *after)
    compare(found, values @ weight.T)


def _int8_product(size: str) -> None:
    import torch

    from lockstep.torch_private import int_mm

    rows, inner, columns = {"small": (32, 16, 16), "large": (64, 256, 96)}[size]
    left, right = numbers(rows, inner), numbers(inner, columns)
    compare(int_mm(left.to(torch.int8), right.to(torch.int8)), left @ right)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    json.dump(try_all(cases()), sys.stdout)


if __name__ == "__main__":
    main()
