"""Times one layer in this process, with its threads, memory order and number format: every way in turns, in about a tenth of a second."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time

import torch
from torch import Tensor

from lockstep.kernels import op
from lockstep.kernels.table import PLAIN, Layer, Row
from lockstep.kernels.way import Way, possible
from lockstep.machine.cpu import waited_seconds
from lockstep.rounds import calls_in, rounds

# Beyond N milliseconds of one forward pass a larger batch is more of the same: it is not timed to its end.
ENOUGH_S = 3e-3
# One window of a contender in a round: short calls are repeated to fill it.
WINDOW_S = 2e-3
ROUNDS, LEAST_ROUNDS, SECONDS = 5, 2, 0.08
# Part of the time that threads may wait for a processor: a switch or two to the system's own threads is usual.
DISTURBED = 0.1
# Of many channels Winograd's method is always the faster one of ours: the other is not timed.
MANY = 4096

Call = Callable[[], Tensor]


def measure(layer: Layer, most: int = ROUNDS, seconds: float = SECONDS) -> Row:
    """`most` rounds, or as many as `seconds` are enough for.

    What counts is the shortest call of each contender: whatever else the machine does only makes calls longer. With one thread it is
    CPU time, which other processes disturb least; with several, threads that had to wait for a processor mark the times as disturbed.
    """
    began, waited = perf_counter(), waited_seconds()
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.set_grad_enabled(layer.learns):
        clock = thread_time if layer.threads == 1 else perf_counter
        operands = _enough(layer, clock)
        contenders = _contenders(layer, operands)
        for call in contenders.values():
            _shortest(call, operands, 1, clock)
        # As many calls of each, so that none has more chances to be lucky.
        count = calls_in(WINDOW_S, sum(_shortest(contenders[PLAIN], operands, 1, clock)), most=50)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for order in rounds(list(contenders), most, least=LEAST_ROUNDS, seconds=seconds):
            for name in order:
                times[name].append(_shortest(contenders[name], operands, count, clock))
    forward = {name: round(1e3 * min(f for f, _ in found), 5) for name, found in times.items()}
    backward = {name: round(1e3 * min(b for _, b in found), 5) for name, found in times.items()}
    disturbed = layer.threads > 1 and waited_seconds() - waited > DISTURBED * (perf_counter() - began)
    return Row(layer, forward, backward if layer.learns else {}, disturbed)


class _Operands:
    """Numbers of a usual size, drawn without touching the generator that the user's own numbers come from."""

    def __init__(self, layer: Layer, batch: int) -> None:
        generator = torch.Generator().manual_seed(1)
        dtype = getattr(torch, layer.dtype)
        order = torch.channels_last if layer.channels_last else torch.contiguous_format

        def drawn(*shape: int) -> Tensor:
            tensor = torch.randn(shape, generator=generator).to(dtype)
            return tensor.contiguous(memory_format=order) if tensor.dim() == 4 else tensor

        self.x = drawn(batch, layer.channels, layer.height, layer.width)
        self.weight = drawn(layer.out_channels, layer.channels, layer.kernel, layer.kernel)
        self.bias = drawn(layer.out_channels)
        halves = 2 if layer.pool else 1
        height, width = (
            (side + 2 * layer.padding - layer.kernel + 1) // halves for side in (layer.height, layer.width)
        )
        self.grad = drawn(batch, layer.out_channels, height, width)
        self.wanted = [self.weight, self.bias, *([self.x] if layer.grad_x else [])] if layer.learns else []
        for tensor in self.wanted:
            tensor.requires_grad_()


def _enough(layer: Layer, clock: Callable[[], float]) -> _Operands:
    """A batch that gives every thread an image, and takes long enough to be seen; at most the layer's own."""
    batch = min(layer.batch, layer.threads)
    while True:
        operands = _Operands(layer, batch)
        forward, _ = _shortest(_plain(layer, operands), operands, 2, clock)
        if batch == layer.batch or forward >= ENOUGH_S:
            return operands
        batch = min(layer.batch, 4 * batch)


def _contenders(layer: Layer, operands: _Operands) -> dict[str, Call]:
    ways = possible(layer.channels, layer.out_channels, layer.kernel, layer.padding, operands.x.dtype)
    many = Way.WINOGRAD in ways and layer.channels * layer.out_channels >= MANY
    found = {PLAIN: _plain(layer, operands)}
    for way in ways:
        if not (many and way is Way.DIRECT):
            found[way.name.lower()] = _fused(layer, operands, way)
    return found


def _plain(layer: Layer, o: _Operands) -> Call:
    return lambda: op.plain(o.x, o.weight, o.bias, 1, layer.padding, 1, 1, layer.tail)


def _fused(layer: Layer, o: _Operands, way: Way) -> Call:
    return lambda: op.fused(o.x, o.weight, o.bias, layer.padding, layer.tail, way)


def _shortest(call: Call, operands: _Operands, count: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of the shortest forward and of the shortest backward."""
    forward = backward = float("inf")
    for _ in range(count):
        begin = clock()
        y = call()
        middle = clock()
        forward = min(forward, middle - begin)
        if operands.wanted:
            torch.autograd.grad(y, operands.wanted, operands.grad)
            backward = min(backward, clock() - middle)
    return forward, backward if operands.wanted else 0.0
