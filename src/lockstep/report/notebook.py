"""An output of a notebook's cell that changes in place while the cell runs. IPython is used where it runs already, and never imported elsewhere."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from lockstep.text import printable


def in_notebook() -> bool:
    """Whether a kernel runs this, so that outputs can be shown and changed; IPython on a terminal is a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


class CellOutput:
    """Lines that stay, and below them a text that is replaced by the next one: what a terminal would show, as plain text."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._text, self._shown = "", ""
        self._handle: Any = None

    def say(self, line: str) -> None:
        self._lines.append(line)
        self._draw()

    def show(self, text: str) -> None:
        self._text = text
        self._draw()

    def _draw(self) -> None:
        text = printable("\n".join([*self._lines, *([self._text] if self._text else [])]))
        if (
            not text or text == self._shown
        ):  # an output cannot be taken away: the last text stays where nothing else does
            return
        self._shown = text
        content = {"text/plain": text}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
