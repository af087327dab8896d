"""The hooks of `lockstep attach`, taken out and put back in while a script trains: windows of steps with and without, in turns.

They stand in one process, on the same memory, so what differs is the hooks. Two processes differ by several per cent for their whole life.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from lengths import UNCOUNTED, WARM_UP, WINDOW
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

OURS = "lockstep_attached"


class Switch:
    """Called once a step. Writes all windows as JSON when the last one is over: [on, steps, wall, CPU]."""

    def __init__(self, path: str, windows: int) -> None:
        self._path, self._left = path, windows
        self._steps, self._on = -WARM_UP, True
        self._windows: list[tuple[bool, int, float, float]] = []
        self._began = (0.0, 0.0)
        self._parts: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def stepped(self) -> None:
        self._steps += 1
        if self._steps == 0:
            self._parts = found()
            self._turn()
        elif self._steps == UNCOUNTED:
            self._began = (time.perf_counter(), time.process_time())
        elif self._steps == WINDOW + UNCOUNTED:
            wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
            self._windows.append((self._on, WINDOW, wall, cpu))
            self._turn()

    def _turn(self) -> None:
        if len(self._windows) == self._left:
            if not self._on:
                self._set(True)
            if os.environ.get("RANK", "0") == "0":
                Path(self._path).write_text(json.dumps({"parts": len(self._parts), "windows": self._windows}))
            self._steps = -sys.maxsize
            return
        # On, off, off, on: a machine that becomes slower does so for both.
        self._set(len(self._windows) % 4 in (0, 3))
        self._steps = 0

    def _set(self, on: bool) -> None:
        if on != self._on:
            for put, take in self._parts:
                (put if on else take)()
            self._on = on


def found() -> list[tuple[Callable[[], None], Callable[[], None]]]:
    """How each hook is put in, and taken out: functions that stand in for others, PyTorch's own tables of hooks, and the collector's."""
    codes = sys.modules[f"{OURS}.standins"]._OURS
    parts = [_function(owner, name, value) for owner, name, value in _standing_in(codes)]
    tables = [table for place in (modules, optimizers) for name, table in vars(place).items() if "_global_" in name]
    for table in tables:
        if isinstance(table, dict):
            parts += [_entry(table, key, hook) for key, hook in table.items() if _is_ours(hook)]
    return parts + [_callback(one) for one in gc.callbacks if _is_ours(one)]


def _standing_in(codes: Any) -> list[tuple[Any, str, Any]]:
    places: dict[int, Any] = {}
    for module in list(sys.modules.values()):
        places[id(module)] = module
        for value in list(getattr(module, "__dict__", {}).values()):
            if isinstance(value, type):
                places[id(value)] = value
    places[id(torch.Tensor)] = torch.Tensor
    return [
        (place, name, value)
        for place in places.values()
        for name, value in list(getattr(place, "__dict__", {}).items())
        if isinstance(value, FunctionType) and value.__code__ in codes
    ]


def _function(owner: Any, name: str, ours: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    return lambda: setattr(owner, name, ours), lambda: setattr(owner, name, ours.__wrapped__)


def _entry(table: dict[Any, Any], key: Any, hook: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    return lambda: table.__setitem__(key, hook), lambda: table.__delitem__(key)


def _callback(hook: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    return lambda: gc.callbacks.append(hook), lambda: gc.callbacks.remove(hook)


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "__func__", hook)
    return str(getattr(hook, "__module__", "")).startswith(OURS)
