"""What one rank of a measurement does: `python -m lockstep.comms.worker FOLDER`.

It joins the others, then carries out the orders that come over its line (lockstep/lines.py). When that closes, whoever gave them is gone, and
the rank ends at once, even inside a collective that hangs.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.backends.costs.plan import Task
from lockstep.backends.mpi import segments
from lockstep.backends.ranks import Rank, detect
from lockstep.errors import InputError
from lockstep.lines import Leash
from lockstep.process import die_with_parent, pin, redirect_output
from lockstep.run import Run

if TYPE_CHECKING:
    import torch

    from lockstep.comms.case import Case

# Timed calls between two checks of the result.
SEGMENT = 100
_UNSUPPORTED = ("not support", "unsupported", "not implemented", "no backend type", "not available")


def main() -> None:
    folder = Path(sys.argv[1])
    task = msgspec.json.decode((folder / "task.json").read_bytes(), type=Task)
    placement = task.placement
    die_with_parent()
    rank = detect(placement)
    mine = Run(folder).rank_folder(rank.rank)
    redirect_output(mine / "log.txt")
    (mine / "pid").write_text(str(os.getpid()))
    line = Leash(Run(folder), rank.rank)
    if placement.pin and placement.device == "cpu":
        # Emulated hosts share this machine's cores, so there the rank's place in the whole world counts.
        place = (rank.rank, rank.world) if placement.emulated else (rank.local_rank, rank.local_world)
        pin(*place, placement.threads or 1)
    try:
        _serve(task, rank, folder, line)
    except BaseException as error:
        traceback.print_exc()
        line.answer(_account(error))
        from lockstep.backends.group import exit_now

        exit_now(3)


def _serve(task: Task, rank: Rank, folder: Path, line: Leash) -> None:
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
    if task.messages_alone:
        from lockstep.comms.messages_alone import refuse_collectives

        refuse_collectives()
    if task.own:
        try:
            Own.function = staticmethod(load_object(task.own, option="--own"))
        except InputError as error:
            line.answer({"input_error": str(error)})
            line.order()
    group.join(placement, rank, folder)
    line.answer({"ready": os.getpid()})
    while (order := line.order())["do"] == "measure":
        case = CASES[order["collective"]](order["collective"], order["size"], rank, device)
        line.answer(measure(case, order["calls"], order["seed"], device))
        del case
    group.leave()
    line.answer({"left": True})


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
