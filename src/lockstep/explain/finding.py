"""What an analyzer says: verdict, why (a number), next step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.explain.evidence import Evidence


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. Every number in its text is in `figures` too, for programs."""

    question: str = ""
    """The analyzer's name, which `explain` puts in."""
    verdict: str
    why: str
    next: str = ""
    cost: float = 0.0
    """The share of the training time that would be saved without it, 0 to 1: findings come in this order. 0 where that was not measured."""
    interval: tuple[float, float] | None = None
    """The cost's 95 % interval; None where it is not known."""
    cause: str = ""
    """What it blames, in one word, where something surely stands out; empty where nothing does."""
    inflates: bool = False
    """It makes longer what other findings measure, so it comes before them whatever its own cost."""
    wrong: bool = False
    """It changes what is learned or what is measured of it, which weighs more than time: it comes first."""
    figures: dict[str, Any] = {}


@dataclass(frozen=True)
class Analyzer:
    """One question, and the function that answers it; no finding if the run has no data about it."""

    name: str
    question: str
    definition: str
    """One sentence: how the number is computed."""
    answer: Callable[[Evidence], Iterable[Finding]]
    timed: bool = True
    """Whether it speaks of times, which a starved machine spoils."""
