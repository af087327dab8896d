"""What a script saves while `lockstep verify -- COMMAND` watches it: kept beside the records of that run, and deleted with them.

So no checkpoint of the user's is overwritten, and none of a few steps is left, from which the next run, or the user's next training, would go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .standins import in_place_of

FOLDER = "saved"
# The arguments that are paths, by name.
WORDS = "f", "filename"


class Saved:
    """Of one run, by all its ranks."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(os.path.abspath(folder), FOLDER)

    def _place(self, path: Any) -> Any:
        """Where what is saved at this path is. A file that the script has opened itself is no path."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        return os.path.join(self._folder, os.path.abspath(os.fsdecode(path)).lstrip(os.sep))

    def _new(self, path: Any) -> Any:
        place = self._place(path)
        if place is not path:
            os.makedirs(os.path.dirname(place), exist_ok=True)
        return place

    def _found(self, path: Any) -> Any:
        place = self._place(path)
        return place if place is not path and os.path.exists(place) else path

    def saves(self, function: Any) -> Any:
        """What stands in for a function whose second argument is the path at which it saves the first."""
        return _elsewhere(function, 1, self._new)

    def loads(self, function: Any) -> Any:
        """For one that loads what may have been saved in this run."""
        return _elsewhere(function, 0, self._found)

    def moves(self, function: Any) -> Any:
        """For one that moves a file: many save under another name first."""

        @in_place_of(function)
        def move(source: Any, target: Any, *args: Any, **keywords: Any) -> Any:
            found = self._found(source)
            return function(found, target if found is source else self._new(target), *args, **keywords)

        return move


def _elsewhere(function: Any, position: int, other: Callable[[Any], Any]) -> Any:
    """The same function, with another path."""

    @in_place_of(function)
    def stands_in(*args: Any, **keywords: Any) -> Any:
        keywords = {word: other(value) if word in WORDS else value for word, value in keywords.items()}
        if len(args) > position:
            args = (*args[:position], other(args[position]), *args[position + 1 :])
        return function(*args, **keywords)

    return stands_in
