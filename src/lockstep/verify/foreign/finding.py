"""What was found: one sentence about one step, and where it stands in the chain of causes."""

from __future__ import annotations

from dataclasses import dataclass

# The chain of causes within a step: what comes first explains what comes after it.
START, BATCH, SAMPLES, BETWEEN, BUFFERS, EXCHANGE, GRADIENT, LOSS, CLIPPING, SETTINGS, UPDATE, RANKS = range(12)
ORDER_OF = "order of samples"


@dataclass(frozen=True)
class Finding:
    """Something that differs."""

    step: int
    """From 1."""
    place: int
    """Where in the chain."""
    key: str
    """Which cause it is: one or two words."""
    text: str
    open: bool = False
    """It is no fault, but nothing can be compared beyond it."""
    once: bool = False
    """It is about this step, not about all from it on."""
