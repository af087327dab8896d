"""A contender: anything that can be started, asked for a window of steps, parked without using a processor, and ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class ContenderFailed(Exception):
    """A contender did not start, or ended in mid-race. Which one, and why, is a result like any other."""


@dataclass(frozen=True)
class Taken:
    """What one window took."""

    samples: float
    """Over all ranks."""
    wall: float
    """Seconds until the slowest rank was done."""
    cpu: float
    """Processor seconds of all threads of all ranks."""
    used: float = 0.0
    """The same for the steps before the window as well."""
    waited: float | None = None
    """Seconds of that time in which its threads could have run and had no processor; None where that is not known."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase, the mean over ranks."""


class Contender(Protocol):
    name: str
    whole_steps: int
    """How many steps belong together, known once it is ready: a strategy that exchanges every N steps is timed over multiples of N."""

    def start(self, number: int) -> None:
        """Begin to start for the `number`-th time, and return at once: contenders start side by side."""

    def ready(self) -> None:
        """Wait until it is parked. Raises ContenderFailed."""

    def take(self, lead: int, steps: int) -> Taken:
        """`lead` steps that are not timed, then a window of `steps`. Raises ContenderFailed."""

    def end(self) -> None:
        """Leave nothing behind, whatever state it is in; also where it has been ended before."""
