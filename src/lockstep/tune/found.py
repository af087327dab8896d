"""What a search has found: the way that was chosen, and what it would cost to choose otherwise."""

from __future__ import annotations

import msgspec

from lockstep.placement import Placement
from lockstep.recipe import Recipe


class Otherwise(msgspec.Struct, frozen=True, kw_only=True):
    """One other choice, and what it costs: a multiple of what the chosen way takes."""

    factor: str
    words: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    around: str = ""
    """The way that it was changed in, where that is not the chosen one."""
    reason: str = ""
    """Why it was not measured, or did not work."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    words: list[str]
    recipe: Recipe
    placement: Placement
    step_seconds: float
    images_per_second: float
    default: str
    """The words of what would have run without tuning."""
    default_ratio: float | None
    """What that takes, as a multiple; None if it did not run."""
    default_low: float | None
    default_high: float | None
    one_host: bool
    """Several hosts were asked about, and one is better."""
    otherwise: list[Otherwise]
    races: list[str]
    """Their folders, one for each stage."""
    seconds: float
