"""What one rank does, top to bottom. Every launcher starts it the same way: `python -m lockstep.worker RUN_DIR`.

It finds its rank in its launcher's environment, reads the recipe from the run folder, and writes what happened there.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import InputError, LockstepError, RunFailed
from lockstep.measure.recorder import write_failure
from lockstep.parallel.ranks import Rank, detect
from lockstep.process import die_with_parent, end_now, import_torch, pin, redirect_output
from lockstep.run import FolderError, Run, Spec, folder_problem, write_atomic

if TYPE_CHECKING:
    import torch


def work(run: Run, spec: Spec, rank: Rank) -> None:
    """Data, model, strategy, training, results."""
    import_torch()
    import torch

    from lockstep.measure.environment import fingerprint
    from lockstep.parallel import group

    placement = spec.placement
    assert placement.threads is not None
    torch.set_num_threads(placement.threads)
    device = torch.device("cuda", rank.local_rank) if placement.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank.is_first:
        write_atomic(run.folder / "environment.json", fingerprint(device))
    if spec.options.script:
        from lockstep.own_loop.start import run_script

        run_script(run, spec, rank)
        return
    _train(run, spec, rank, device)
    group.leave()
    if rank.is_first and placement.launcher == "slurm":
        return  # it holds the meeting point: a server that leaves before its clients blocks its port for a minute
    end_now(0)


def _train(run: Run, spec: Spec, rank: Rank, device: torch.device) -> None:
    """What is made here is gone at the end: DDP's reducer must not outlive the group."""
    from lockstep.parallel import group
    from lockstep.training import capture
    from lockstep.training.assemble import assemble
    from lockstep.training.state import whole_state

    if spec.options.probe:
        from lockstep.training import probe

        probe.measure(run, spec, rank, device)
        return
    made = assemble(run, spec, rank, device)
    if rank.is_first:
        watcher = {k: v for k, v in run.recorded_status().items() if k in ("supervisor_pid", "host", "job", "cores")}
        run.write_status("running", **watcher)
    summary = {**made.trainer.fit(), "compile_seconds": made.compile_seconds}
    state = whole_state(made.model)

    def write_results() -> None:
        if spec.options.save_model:
            capture.weights(run, state)
        write_atomic(run.folder / "summary.json", summary)
        # Done it is, and its results are worth nothing: whoever reads the status reads both.
        lost = summary["not_finite"]
        run.write_status("done", **({"cause": f"it ended with {lost}"} if lost else {}))

    group.first_alone(write_results)


def main() -> None:
    run = Run.open(Path(sys.argv[1]))
    spec = run.spec()
    rank = detect(spec.placement)
    folder = run.rank_folder(rank.rank)
    die_with_parent()
    redirect_output(folder / "log.txt")
    (folder / "failure.json").unlink(missing_ok=True)  # of an attempt before this one; its log stays
    if spec.placement.pin and spec.placement.device == "cpu":
        # Emulated hosts share this machine's cores, so there the rank's place in the whole world counts.
        place = (rank.rank, rank.world) if spec.placement.emulated else (rank.local_rank, rank.local_world)
        pin(*place, spec.placement.threads or 1)
    try:
        work(run, spec, rank)
    except BaseException as error:
        if not isinstance(error, LockstepError):
            with suppress(OSError):  # the log may be on a full disk
                traceback.print_exc()
        _fail(run, rank, error)


def _fail(run: Run, rank: Rank, error: BaseException) -> None:
    """Leave an account for the supervisor, then end at once: a rank that waits for a dead peer would hang."""
    from lockstep.parallel.group import exit_now, is_peer_loss, message_of

    step = _last_step(run.rank_folder(rank.rank))
    kind, message, code = type(error).__name__, message_of(error), RunFailed.exit_code
    lost = _folder_lost(run, error)
    if lost is not None:
        # Before the first step it is a place that does not do; after that, a run that failed.
        kind, message, code = "", str(lost), RunFailed.exit_code if step else lost.exit_code
    elif isinstance(error, LockstepError):
        message, code = str(error), error.exit_code
    account = {
        "rank": rank.rank,
        "kind": kind,
        "message": message,
        "exit_code": code,
        "consequence": lost is None and is_peer_loss(error),
        "step": step,
    }
    if not write_failure(run, account):
        with suppress(OSError):
            print(f"could not write the account of the failure: {account}", file=sys.stderr)
    exit_now(code)


def _folder_lost(run: Run, error: BaseException) -> FolderError | None:
    """Whether the run folder is gone or full is what this error comes down to. torch has its own words for a failed write."""
    if isinstance(error, FolderError):
        return error
    if isinstance(error, OSError) or "inline_container" in str(error):
        return folder_problem(run.folder)
    return None


def _last_step(folder: Path) -> int:
    from lockstep.measure.records import read_steps

    return len(read_steps(folder / "steps.bin"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lockstep.worker RUN_DIR")
    try:
        main()
    except InputError as problem:
        print(f"lockstep: {problem}", file=sys.stderr)
        os._exit(problem.exit_code)
