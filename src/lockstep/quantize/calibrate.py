"""Which range of a layer's inputs its integers cover, from calibration images: all that was seen, or less, so that the steps are finer.

What lies beyond the range counts as its end. One input far from all others makes every step of the others coarse; leaving it out is
`percentile`. `mse` tries how much to leave out, and takes the range whose squared rounding errors, beyond it and within, sum up to least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import product
from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.quantize.convert import Prepared, enter_numbers
from lockstep.quantize.scheme import Numbers, Scheme, from_range

BINS = 2048
BEYOND = 1e-4
"""percentile: this share of the inputs is left out, half of it at either end."""
TRIED = 50
"""mse: so many places for either end of the range, the farthest one being the farthest input."""

Range = tuple[float, float]


class Seen(Protocol):
    """Something that looks at the inputs of one layer, batch by batch."""

    def add(self, inputs: Tensor) -> None: ...


class Ends:
    """The smallest and the largest of them."""

    def __init__(self) -> None:
        self._low, self._high = torch.tensor(math.inf), torch.tensor(-math.inf)

    def add(self, inputs: Tensor) -> None:
        low, high = torch.aminmax(inputs)
        # NaN stays: a model whose numbers are not finite is refused for them.
        self._low, self._high = torch.minimum(self._low, low), torch.maximum(self._high, high)

    @property
    def range(self) -> Range:
        return self._low.item(), self._high.item()


class Counts:
    """How many lie in each of equal parts of the range from `low` to `high`."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self.of = torch.zeros(BINS, dtype=torch.float64)

    def add(self, inputs: Tensor) -> None:
        self.of += torch.histc(inputs.double(), BINS, self.low, self.high)  # float32 cannot count beyond 16 million


def calibrate(prepared: Prepared, batches: Callable[[], Iterable[Tensor]]) -> None:
    """The range of every chosen layer's inputs over these batches, as the scheme says, and so its integers. They may be asked for twice."""
    scheme = prepared.scheme
    ends: dict[str, Ends] = {}
    _look(prepared, batches(), lambda name: ends.setdefault(name, Ends()))
    ranges = {name: seen.range for name, seen in ends.items()}
    prepared.ranges = {name: from_range(*each, scheme) for name, each in ranges.items()}  # refuses what is not finite
    if scheme.ranges != "min-max":
        counts = {name: Counts(*each) for name, each in ranges.items() if each[0] < each[1]}
        _look(prepared, batches(), counts.get)
        for name, each in counts.items():
            chosen = _percentile(each) if scheme.ranges == "percentile" else _least_error(each, scheme)
            prepared.ranges[name] = from_range(*chosen, scheme)
    for row in prepared.rows:
        if row.layer in ranges:
            row.input_low, row.input_high = ranges[row.layer]
        elif row.quantized:
            row.quantized, row.why = False, "no calibration image came through it"
    enter_numbers(prepared)


def _look(prepared: Prepared, batches: Iterable[Tensor], of: Callable[[str], Seen | None]) -> None:
    """Pass all images through the model, and show each chosen layer's inputs to what is `of` it."""
    chosen = set(prepared.chosen)

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Tensor]], None]:
        def show(module: nn.Module, args: tuple[Tensor, ...], words: dict[str, Tensor]) -> None:
            seen = of(name)
            if seen is not None:
                seen.add(args[0] if args else words["input"])

        return show

    handles = [
        layer.register_forward_pre_hook(hook(name), with_kwargs=True)
        for name, layer in prepared.model.named_modules()
        if name in chosen
    ]
    try:
        with torch.inference_mode():
            for images in batches:
                prepared.model(images)
    finally:
        for handle in handles:
            handle.remove()


def _percentile(counts: Counts) -> Range:
    edges = torch.linspace(counts.low, counts.high, BINS + 1, dtype=torch.float64)
    below = counts.of.cumsum(0) / counts.of.sum()
    first = int((below <= BEYOND / 2).sum())
    last = int((below < 1 - BEYOND / 2).sum())
    return edges[min(first, BINS - 1)].item(), edges[min(last, BINS - 1) + 1].item()


def _least_error(counts: Counts, scheme: Scheme) -> Range:
    width = (counts.high - counts.low) / BINS
    values = counts.low + width * (torch.arange(BINS, dtype=torch.float64) + 0.5)
    lows, highs = ([end * tried / TRIED for tried in range(TRIED, 0, -1)] for end in (counts.low, counts.high))
    # Zero is always within: an end on the other side of it makes no difference.
    lows, highs = lows if counts.low < 0 else lows[:1], highs if counts.high > 0 else highs[:1]
    return min(product(lows, highs), key=lambda ends: _error(values, counts.of, from_range(ends[0], ends[1], scheme)))


def _error(values: Tensor, counts: Tensor, numbers: Numbers) -> float:
    """The sum of squares of what rounding to these integers changes."""
    scale, zero, top = numbers
    rounded = values.div(scale).round_().add_(zero).clamp_(0, top).sub_(zero).mul_(scale)
    return float(((rounded - values) ** 2 * counts).sum())
