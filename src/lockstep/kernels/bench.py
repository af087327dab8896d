"""Every way to compute a convolution + ReLU (+ pool), timed in turns on the same numbers, with the error of each beside its time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import msgspec
import torch
from torch import Tensor

from lockstep.kernels import dispatch
from lockstep.kernels.candidates import Candidate, Shape, candidates, exact, result_size
from lockstep.kernels.table import Layer
from lockstep.rounds import calls_in, rounds


class Timing(msgspec.Struct, frozen=True):
    """One way on one shape."""

    way: str
    forward_ms: float
    backward_ms: float | None
    """None where there is no way back."""
    error: float
    """How far result and gradients are from double precision, the worst of them: the norm of the difference over the norm. (Where an output is
    within rounding of 0, the ReLU may cut it off or not, and one gradient of many is another: the largest difference would show that only.)"""


class Cell(msgspec.Struct, frozen=True):
    """One shape at one batch and number of threads, with everything that computed it."""

    shape: Shape
    batch: int
    threads: int
    timings: list[Timing]
    chosen: tuple[str, str]
    """The ways that the dispatcher takes, forward and backward."""
    flop: float
    """Of the forward convolution by its definition; Winograd's method needs fewer."""
    bytes: float
    """What forward has to read and write at least."""


class How(msgspec.Struct, frozen=True):
    """How to measure."""

    rounds: int
    seconds: float
    """About so long for each way in each round."""
    compiled: bool = False
    brief: bool = False
    """Only PyTorch's operators as they are, and ours."""
    device: str = "cpu"


def measure(shape: Shape, batch: int, threads: int, how: How) -> Cell:
    """Each way in turn, over and over."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ways = candidates(shape, batch, how.compiled, how.brief, how.device)
        wanted = exact(msgspec.structs.replace(shape, channels_last=False), batch)
        errors = {way.name: _error(way, wanted) for way in ways}
        clock = _clock(threads, how.device)
        counts = {way.name: _count(way, clock, how.seconds) for way in ways}
        times: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
        for order in rounds(ways, how.rounds):
            for way in order:
                times[way.name].append(_time(way, clock, counts[way.name]))
        chosen = _chosen(shape, batch, threads, how.device)
    finally:
        torch.set_num_threads(before)
    timings = [
        Timing(
            way.name,
            1e3 * median(forward for forward, _ in times[way.name]),
            1e3 * median(backward for _, backward in times[way.name]) if way.trains else None,
            errors[way.name],
        )
        for way in ways
    ]
    return Cell(shape, batch, threads, timings, chosen, _flop(shape, batch), _bytes(shape, batch))


def layer_of(shape: Shape, batch: int, threads: int) -> Layer:
    """As the dispatcher knows it, in a training step."""
    sizes = (batch, shape.channels, shape.size, shape.size)
    weight = (shape.out_channels, shape.channels, shape.kernel, shape.kernel)
    return dispatch.layer_of(
        sizes, weight, shape.padding, shape.pool, shape.channels_last, torch.float32, threads, True, shape.grad_x
    )


def _chosen(shape: Shape, batch: int, threads: int, device: str) -> tuple[str, str]:
    ways = dispatch.choose(layer_of(shape, batch, threads)) if device == "cpu" else None
    return (ways[0].name.lower(), ways[1].name.lower()) if ways else ("torch", "torch")


def keep_memory() -> None:
    """Let glibc keep large blocks, as it does in Lockstep's ranks: else every way would mostly measure page faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, size in ((-3, 256 << 20), (-1, 1 << 30), (-2, 64 << 20)):  # mmap threshold, trim threshold, top pad
            mallopt(option, size)


class Roof(msgspec.Struct, frozen=True):
    """What this machine reaches, measured: a large product of matrices, and a copy of a large tensor."""

    threads: int
    flop_per_s: float
    bytes_per_s: float


def roof(threads: int, device: str = "cpu", rounds: int = 5) -> Roof:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b, c = (torch.randn(768, 768, device=device) for _ in range(3))
        big, other = torch.zeros(1 << 24, device=device), torch.ones(1 << 24, device=device)
        clock = _clock(threads, device)
        multiply = min(_once(lambda: torch.mm(a, b, out=c), clock) for _ in range(rounds + 1))
        copy = min(_once(lambda: big.copy_(other), clock) for _ in range(rounds + 1))
    finally:
        torch.set_num_threads(before)
    return Roof(threads, 2 * 768**3 / multiply, 2 * 4 * (1 << 24) / copy)


def _once(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    begin = clock()
    call()
    return clock() - begin


def _clock(threads: int, device: str) -> Callable[[], float]:
    """With one thread its CPU time, which other processes disturb least. A GPU is waited for."""
    if device == "cpu":
        return thread_time if threads == 1 else perf_counter

    def after_the_gpu() -> float:
        torch.cuda.synchronize()
        return perf_counter()

    return after_the_gpu


def _error(way: Candidate, exact: list[Tensor]) -> float:
    with way.around(), torch.set_grad_enabled(way.trains):
        y = way.run()
        found: list[tuple[Tensor, Tensor]] = [(y.detach(), exact[0])]
        if way.trains:
            y.backward(way.grad)  # type: ignore[no-untyped-call]
            found += [(t.grad, e) for t, e in zip(way.inputs, exact[1:], strict=True) if t.grad is not None]
    return max(float((a.cpu().double() - e).norm() / e.norm()) for a, e in found)


def _count(way: Candidate, clock: Callable[[], float], seconds: float) -> int:
    return calls_in(seconds, sum(_time(way, clock, 1)))


def _time(way: Candidate, clock: Callable[[], float], count: int) -> tuple[float, float]:
    """Mean seconds of one forward and one backward."""
    forward = backward = 0.0
    with way.around(), torch.set_grad_enabled(way.trains):
        for _ in range(count):
            for tensor in way.inputs:
                tensor.grad = None
            begin = clock()
            y = way.run()
            middle = clock()
            if way.trains:
                y.backward(way.grad)  # type: ignore[no-untyped-call]
                backward += clock() - middle
            forward += middle - begin
    return forward / count, backward / count


def _flop(shape: Shape, batch: int) -> float:
    return 2.0 * batch * shape.channels * shape.out_channels * shape.size**2 * shape.kernel**2


def _bytes(shape: Shape, batch: int) -> float:
    images = batch * (shape.channels * shape.size**2 + shape.out_channels * result_size(shape) ** 2)
    return 4.0 * (images + shape.channels * shape.out_channels * shape.kernel**2)
