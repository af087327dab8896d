"""One collective on buffers of one size: filling them, calling it, and saying whether the result is right.

`call` is what is timed and does nothing but the call. `fill` makes the inputs new and spoils the outputs; `check(calls)` compares
all of the result with what `calls` calls since the last fill must have made.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from lockstep.backends.costs.plan import elements
from lockstep.backends.ranks import Rank

# A prime, so that a part in the wrong place does not look right.
PERIOD = 251


def pattern(count: int, source: int, seed: int, device: torch.device) -> torch.Tensor:
    """Small whole numbers, 1 to 251, different for every rank and seed; their sums are exact in float32."""
    tile = (torch.arange(PERIOD) * 7 + source * 31 + seed * 17) % PERIOD + 1
    return tile.to(device, torch.float32).repeat(-(-count // PERIOD))[:count]


def difference(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 0.0) -> str | None:
    """One line about the first element that is wrong; None if all are right. NaN is wrong."""
    right = (found - wanted).abs() <= tolerance * wanted.abs()
    if bool(right.all()):
        return None
    at = int((~right).to(torch.uint8).argmax())
    return (
        f"element {at} is {float(found[at]):g} instead of {float(wanted[at]):g}; "
        f"{int((~right).sum())} of {found.numel()} are wrong"
    )


class Case(ABC):
    """One collective on buffers of one size. The message of a divided one is `whole` long, a rank's part `part`."""

    moments: list[int] | None = None
    """When this rank came and when it went, for collectives whose result is only that."""

    def __init__(self, collective: str, size: int, rank: Rank, device: torch.device) -> None:
        self.rank, self.world, self.device = rank.rank, rank.world, device
        self.whole = elements(collective, size, rank.world)
        self.part = self.whole // rank.world

    def fill(self, seed: int) -> None:
        self.seed = seed
        self.input, self.output = self.buffers()
        # What the list forms take; made here, because a call is timed.
        self.inputs, self.outputs = self.parts(self.input), self.parts(self.output)

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output."""
        return self.of(self.rank), self.spoilt(self.whole)

    @abstractmethod
    def call(self) -> None: ...

    def wanted(self) -> torch.Tensor | None:
        """What the output must be; None on a rank that gets none, and for cases that check in their own way."""
        return None

    def check(self, calls: int) -> str | None:
        wanted = self.wanted()
        return None if wanted is None else difference(self.output, wanted)

    def longest_chain(self) -> int:
        """Calls after which the result can still be checked."""
        return 1 << 30

    # ---- helpers

    def of(self, source: int) -> torch.Tensor:
        """The whole input of one rank."""
        return pattern(self.whole, source, self.seed, self.device)

    def part_of(self, source: int, part: int) -> torch.Tensor:
        return self.of(source)[part * self.part : (part + 1) * self.part]

    def sum(self) -> torch.Tensor:
        total = self.of(0)
        for source in range(1, self.world):
            total += self.of(source)
        return total

    def spoilt(self, count: int) -> torch.Tensor:
        return torch.full((count,), math.nan, device=self.device)

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has of a divided message."""
        return list(torch.split(tensor, max(self.part, 1)))
