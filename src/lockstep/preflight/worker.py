"""What one node does: `python -m lockstep.preflight.worker FOLDER`, started once on each by the placement's launcher.

It carries out the orders that come over its line (lockstep/lines.py), one at a time, and ends when that closes. Each order is about this node
alone or about one other, so a node that fails keeps nobody else from answering.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lockstep.backends.ranks import detect
from lockstep.lines import Leash
from lockstep.placement import Placement
from lockstep.preflight import node, peer
from lockstep.preflight.seen import VARIABLE, Task
from lockstep.process import die_with_parent, pin, redirect_output
from lockstep.run import Run


class Worker:
    def __init__(self, task: Task, folder: Path, rank: int) -> None:
        self._task, self._folder, self._mine = task, folder, Run(folder).rank_folder(rank)
        self._cores = _cores(task.placement, rank)
        self._listener: socket.socket | None = None

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "facts":
                return node.facts(self._folder, self._mine, self._task.token)
            case "clock":
                return {"time": time.time()}
            case "compute":
                return node.compute(self._cores, order["seconds"])
            case "memory":
                return node.memory(self._cores, order["seconds"])
            case "disk":
                return node.disk(self._mine)
            case "listen":
                self._listener = peer.listen(node.address())
                host, port = self._listener.getsockname()[:2]
                return {"address": host, "port": port}
            case "serve":
                assert self._listener is not None
                return peer.serve(self._listener, self._token(order))
            case "call":
                return peer.call(order["address"], order["port"], self._token(order), order["seconds"])
        raise ValueError(f"no such order: {order}")

    def _token(self, order: dict[str, Any]) -> str:
        """Of one meeting."""
        return f"{self._task.token} {order['meeting']:08d}"


def _cores(placement: Placement, rank: int) -> list[int]:
    """Those of this node that are ours. Emulated hosts divide this machine's, also where its ranks cannot be pinned."""
    cores, threads = node.usable(), placement.threads or 1
    if placement.emulated:
        return sorted({cores[(rank * threads + place) % len(cores)] for place in range(threads)})
    # No more than it may use at a time: a container's share of the processors can be less than the cores that it sees.
    return cores[:threads]


def main() -> None:
    folder = Path(sys.argv[1])
    task = msgspec.json.decode(os.environ.pop(VARIABLE), type=Task)
    die_with_parent()
    rank = detect(task.placement)
    mine = Run(folder).rank_folder(rank.rank)
    with suppress(OSError):
        (mine / "pid").write_text(str(os.getpid()))
    line = Leash(Run(folder), rank.rank)
    redirect_output(mine / "log.txt")
    if task.placement.emulated:
        pin(rank.rank, rank.world, task.placement.threads or 1)
    worker = Worker(task, folder, rank.rank)
    line.answer({"name": task.names[rank.rank] if task.names else node.name()})
    while (order := line.order())["do"] != "leave":
        begin = time.perf_counter()
        try:
            answer = worker.do(order)
            answer["took"] = time.perf_counter() - begin
        except Exception as error:  # what does not work on a node is what we are here to find out
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
        line.answer(answer)
    line.answer({"left": True})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lockstep.preflight.worker FOLDER")
    main()
