"""What one rank of a measurement does: `python -m lockstep.comms.worker FOLDER`.

It joins the others, then carries out orders that come through a named pipe in its folder, and answers through another. When
the pipe of orders closes, whoever gave them is gone, and the rank ends at once, even inside a collective that hangs.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.backends.costs.plan import Task
from lockstep.backends.mpi import segments
from lockstep.backends.ranks import Rank, detect
from lockstep.errors import InputError
from lockstep.process import die_with_parent, pin, redirect_output

if TYPE_CHECKING:
    import torch

    from lockstep.comms.case import Case

# Timed calls between two checks of the result.
SEGMENT = 100
_UNSUPPORTED = ("not support", "unsupported", "not implemented", "no backend type", "not available")


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"{rank:04d}"


class Pipes:
    """Both pipes of a rank."""

    def __init__(self, folder: Path) -> None:
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        # Not blocking: if nobody holds the other end any more, reading ends at once instead of waiting forever.
        self._reader = os.open(folder / "orders", os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._reader, True)
        threading.Thread(target=self._listen, daemon=True).start()
        self._writer = os.open(folder / "answers", os.O_WRONLY)

    def _listen(self) -> None:
        pending = b""
        while data := os.read(self._reader, 65536):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._orders.put(json.loads(line))
        os._exit(0)

    def next(self) -> dict[str, Any]:
        return self._orders.get()

    def answer(self, content: dict[str, Any]) -> None:
        data = memoryview(json.dumps(content).encode() + b"\n")
        while data:
            data = data[os.write(self._writer, data) :]


def main() -> None:
    folder = Path(sys.argv[1])
    task = msgspec.json.decode((folder / "task.json").read_bytes(), type=Task)
    placement = task.placement
    die_with_parent()
    rank = detect(placement)
    mine = rank_folder(folder, rank.rank)
    redirect_output(mine / "log.txt")
    (mine / "pid").write_text(str(os.getpid()))
    pipes = Pipes(mine)
    if placement.pin and placement.device == "cpu":
        pin(rank.local_rank, rank.local_world, placement.threads or 1)
    try:
        _serve(task, rank, folder, pipes)
    except BaseException as error:
        traceback.print_exc()
        pipes.answer(_account(error))
        from lockstep.backends.group import exit_now

        exit_now(3)


def _serve(task: Task, rank: Rank, folder: Path, pipes: Pipes) -> None:
    import torch

    from lockstep.backends import group
    from lockstep.comms.collectives import CASES, Own
    from lockstep.plugins import load_object

    placement = task.placement
    torch.set_num_threads(placement.threads or 1)
    device = torch.device("cpu")
    if placement.device == "cuda":
        device = torch.device("cuda", rank.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if task.own:
        try:
            Own.function = staticmethod(load_object(task.own, option="--own"))
        except InputError as error:
            pipes.answer({"input_error": str(error)})
            pipes.next()
    group.join(placement, rank, folder)
    pipes.answer({"ready": os.getpid()})
    while (order := pipes.next())["do"] == "measure":
        case = CASES[order["collective"]](order["collective"], order["size"], rank, device)
        pipes.answer(measure(case, order["calls"], order["seed"], device))
        del case
    group.leave()
    pipes.answer({"left": True})


def measure(case: Case, calls: int, seed: int, device: torch.device) -> dict[str, Any]:
    """One checked call, then `calls` timed ones in segments, each checked at its end."""
    case.fill(seed)
    case.call()
    _wait(device)
    problem, checks = case.check(1), 1
    times: list[int] = []
    longest = min(SEGMENT, case.longest_chain() - 1)
    while len(times) < calls and problem is None:
        seed += 1
        case.fill(seed)
        some = min(longest, calls - len(times))
        # The first call also waits for ranks that took longer to fill and check, so it is not counted.
        times += _timed(case, some + 1, device)[1:]
        problem = case.check(some + 1)
        checks += 1
    return {"times_ns": times, "wrong": problem, "checks": checks, "moments": case.moments}


def _timed(case: Case, calls: int, device: torch.device) -> list[int]:
    clock, call, on_gpu = time.perf_counter_ns, case.call, device.type == "cuda"
    times = [0] * calls
    gc.disable()
    try:
        for i in range(calls):
            begin = clock()
            call()
            if on_gpu:
                _wait(device)
            times[i] = clock() - begin
    finally:
        gc.enable()
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _account(error: BaseException) -> dict[str, Any]:
    from lockstep.backends.group import is_peer_loss

    text = " ".join(str(error).split()) or type(error).__name__
    unsupported = isinstance(error, NotImplementedError) or any(sign in text.lower() for sign in _UNSUPPORTED)
    return {
        "error": f"{type(error).__name__}: {text}"[:300],
        "unsupported": unsupported,
        "lost": is_peer_loss(error),
        "segments": segments.of_process(os.getpid()),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lockstep.comms.worker FOLDER")
    main()
