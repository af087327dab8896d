"""What stands in for a function: made so that neither the compiler nor a traceback can tell."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

_OURS: set[Any] = set()
"""The code of all that stand in for something."""
_HERE = os.path.dirname(os.path.abspath(__file__))


def in_place_of(function: Any, file: str = "") -> Callable[[Any], Any]:
    """A decorator for what stands in for a function of PyTorch or of a framework. `file`: for a function that was not written in Python.

    It says that it comes from that function's own file. The compiler passes over PyTorch's files, and so over it; else `torch.compile` would
    find other places to begin at than it does without us, and compiled code has other rounding.
    """

    def decorate(ours: Any) -> Any:
        code = getattr(function, "__code__", None)
        if code is not None:
            ours.__code__ = ours.__code__.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
        elif file:
            ours.__code__ = ours.__code__.replace(co_filename=file)
        _OURS.add(ours.__code__)
        return wraps(function)(ours)

    return decorate


class Iterators:
    """The iterators of loaders, whose classes are PyTorch's own affair: `stand_in` makes what stands in for the `__next__` of each."""

    def __init__(self, stand_in: Callable[[Any], Any]) -> None:
        self._stand_in = stand_in
        self._known: set[type] = set()

    def meet(self, iterator: Any) -> None:
        kind: Any = type(iterator)
        if kind not in self._known:
            self._known.add(kind)
            with suppress(TypeError):  # a generator's cannot be replaced
                kind.__next__ = self._stand_in(kind.__next__)


def leave_no_trace() -> None:
    """An error that nobody catches is printed without our frames: its traceback is the script's."""
    shown = sys.excepthook

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        try:
            trace = _strip(error, set())
        finally:
            shown(kind, error, trace)

    sys.excepthook = excepthook


def _strip(error: BaseException, known: set[int]) -> Any:
    """Take our frames out of an error's traceback, and out of those of the errors that it comes from."""
    known.add(id(error))
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept = [trace for trace in frames if not _is_ours(trace)]
    if any(trace.tb_frame.f_code.co_filename.startswith(_HERE) for trace in frames):
        # Python leaves its own frames of an import out, unless one of ours is between them.
        kept = [trace for trace in kept if not trace.tb_frame.f_code.co_filename.startswith("<frozen importlib")]
    for one, following in zip(kept, [*kept[1:], None]):  # noqa: B905  # Python 3.9 has no strict
        one.tb_next = following
    error.__traceback__ = kept[0] if kept else None
    for other in (error.__cause__, error.__context__):
        if other is not None and id(other) not in known:
            _strip(other, known)
    return error.__traceback__


def _is_ours(trace: Any) -> bool:
    code = trace.tb_frame.f_code
    return code in _OURS or code.co_filename.startswith(_HERE)
