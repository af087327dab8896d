"""The embedded text: sentences of a small grammar of our own, so it needs no network, no file and no licence of others.

What a sentence says can be known from how it began (who gives what to whom, how many are left, what two numbers come to), so a model
that looks back further predicts better. Sequence k of a split does not depend on the size of the set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.data.embedded import SEED, Dice

LENGTH = 64
_BLOCK = 500  # sequences written at once
_DRAWS = 4096

_NUMBERS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
)  # fmt: skip
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Klara", "Leo")
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown")
_THINGS = ("apple", "book", "coin", "marble", "shell", "stone", "ticket", "button", "lamp", "cup")
_ANIMALS = ("cat", "dog", "fox", "goat", "horse", "mouse", "owl", "rabbit", "sparrow", "wolf")
_DEEDS = ("sees", "follows", "hears", "wakes", "greets", "passes")
_PLACES = ("barn", "field", "forest", "garden", "kitchen", "valley", "village")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def draw(name: str, split: str, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The first `count` sequences of a split, and for each character the one that follows it."""
    rows = np.empty((count, LENGTH + 1), np.uint8)
    for block, start in enumerate(range(0, count, _BLOCK)):
        stop = min(start + _BLOCK, count)
        text = _write(_Picks((SEED, 64, split == "test", block)), _BLOCK * (LENGTH + 1))
        rows[start:stop] = np.frombuffer(text.encode("ascii"), np.uint8).reshape(_BLOCK, -1)[: stop - start]
    return rows[:, :-1], rows[:, 1:]


class _Picks:
    """Choices from the raw stream of PCG64, the same on every machine."""

    def __init__(self, key: tuple[int, ...]) -> None:
        self._dice = Dice(key)
        self._next = self._stream()

    def _stream(self) -> Iterator[int]:
        while True:
            yield from (self._dice.raw(_DRAWS) >> np.uint64(32)).tolist()

    def below(self, most: int) -> int:
        return next(self._next) % most

    def one(self, words: Sequence[str]) -> str:
        return words[self.below(len(words))]


def _write(picks: _Picks, length: int) -> str:
    """So many characters of sentences: the last one is cut."""
    parts: list[str] = []
    have = 0
    while have < length:
        parts.append(_KINDS[picks.below(len(_KINDS))](picks))
        have += len(parts[-1])
    return "".join(parts)[:length]


def _giving(picks: _Picks) -> str:
    who, whom = picks.one(_NAMES), picks.one(_NAMES)
    what = f"{picks.one(_COLOURS)} {picks.one(_THINGS)}"
    have = 2 + picks.below(9)
    given = 1 + picks.below(have)
    return (
        f"{who} has {_many(have, what)} and gives {_NUMBERS[given]} to {whom}. "
        f"Now {who} has {_many(have - given, what)} left.\n"
    )


def _meeting(picks: _Picks) -> str:
    return f"The {picks.one(_COLOURS)} {picks.one(_ANIMALS)} {picks.one(_DEEDS)} the {picks.one(_ANIMALS)} in the {picks.one(_PLACES)}.\n"


def _adding(picks: _Picks) -> str:
    one, two = 1 + picks.below(9), 1 + picks.below(9)
    return f"{_NUMBERS[one].capitalize()} and {_NUMBERS[two]} are {_NUMBERS[one + two]}.\n"


def _following(picks: _Picks) -> str:
    day = picks.below(len(_DAYS))
    who = picks.one(_NAMES)
    return f"After {_DAYS[day]} comes {_DAYS[(day + 1) % len(_DAYS)]}, and {who} goes to the {picks.one(_PLACES)}.\n"


_KINDS = (_giving, _meeting, _adding, _following)


def _many(count: int, what: str) -> str:
    return f"{_NUMBERS[count]} {what}{'' if count == 1 else 's'}"
