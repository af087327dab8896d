"""What one rank does, top to bottom. Every launcher starts it the same way: `python -m lockstep.worker RUN_DIR`.

It finds its rank in its launcher's environment, reads the recipe from the run folder, and writes what happened there.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import InputError, LockstepError, RunFailed
from lockstep.measure.recorder import write_failure
from lockstep.parallel.ranks import Rank, detect
from lockstep.process import die_with_parent, end_now, import_torch, pin, redirect_output
from lockstep.run import Run, Spec, write_atomic

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
    from lockstep.training import capture
    from lockstep.training.assemble import assemble
    from lockstep.training.state import whole_state

    if spec.options.probe:
        from lockstep.training import probe

        probe.measure(run, spec, rank, device)
        return
    made = assemble(run, spec, rank, device)
    if spec.options.capture_gradients:
        capture.gradients(run, rank, made.model, made.stepper, made.train, spec)
    if rank.is_first:
        watcher = {k: v for k, v in run.recorded_status().items() if k in ("supervisor_pid", "host", "job")}
        run.write_status("running", **watcher)
    summary = {**made.trainer.fit(), "compile_seconds": made.compile_seconds}
    state = whole_state(made.model)
    if rank.is_first:
        if spec.options.save_model:
            capture.weights(run, state)
        write_atomic(run.folder / "summary.json", summary)
        run.write_status("done")


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
    except LockstepError as error:
        _fail(folder, rank, type(error).__name__, str(error), error.exit_code)
    except BaseException as error:
        traceback.print_exc()
        _fail(folder, rank, type(error).__name__, str(error).partition("\n")[0], RunFailed.exit_code, error)


def _fail(folder: Path, rank: Rank, kind: str, message: str, code: int, error: BaseException | None = None) -> None:
    """Leave an account for the supervisor, then end at once: a rank that waits for a dead peer would hang."""
    from lockstep.parallel.group import exit_now, is_peer_loss

    consequence = error is not None and is_peer_loss(error)
    try:
        write_failure(
            folder,
            {
                "rank": rank.rank,
                "kind": kind,
                "message": message,
                "exit_code": code,
                "consequence": consequence,
                "step": _last_step(folder),
            },
        )
    except OSError as problem:
        print(f"could not write the account of the failure: {problem}", file=sys.stderr)
    exit_now(code)


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
