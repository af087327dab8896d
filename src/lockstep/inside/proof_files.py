"""The files of a rank for `lockstep verify -- COMMAND`. verify/foreign/records.py reads them.

ranks/0001/world          how many ranks there are
ranks/0001/3.f64          the sketches of step 3: own gradient, its absolute values, exchanged gradient, final gradient, update, weights before it
ranks/0001/steps.jsonl    a line for each step, written after its sketches
ranks/0001/done           all steps that were asked for are there
problems/4711             why the process of this id is not watched any more
over                      written from outside: all is there
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from . import launchers

OVER = "over"


class ProofFiles:
    """Makes the rank's folder with its first step: a process that never trains leaves nothing."""

    def __init__(self, folder: str) -> None:
        self._folder, self._rank_folder = folder, ""

    def write_step(self, sketches: bytes, line: dict[str, Any]) -> None:
        self._open()
        self._write(f"{line['step']}.f64", sketches, "wb")
        self._write("steps.jsonl", json.dumps(line).encode() + b"\n", "ab")

    def write_done(self) -> None:
        self._write("done", b"", "wb")

    def wait_until_over(self) -> None:
        """Until whoever started us has what it wants. It then ends all that it can reach; ranks of srun end by themselves."""
        while not os.path.exists(os.path.join(self._folder, OVER)):
            time.sleep(0.5)
        os._exit(0)

    def write_problem(self, error: BaseException) -> None:
        folder = os.path.join(self._folder, "problems")
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, str(os.getpid())), "w", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {error}")
        except OSError:
            pass

    def _open(self) -> None:
        if self._rank_folder:
            return
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        else:
            _, rank, world = launchers.place() or ("", 0, 1)
        folder = os.path.join(self._folder, "ranks", f"{rank:04d}")
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        os.mkdir(folder)  # FileExistsError: another process is this rank
        self._rank_folder = folder
        self._write("world", str(world).encode(), "wb")

    def _write(self, name: str, data: bytes, mode: str) -> None:
        with open(os.path.join(self._rank_folder, name), mode) as file:
            file.write(data)
