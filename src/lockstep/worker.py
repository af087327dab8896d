"""What one rank does, top to bottom. Every launcher starts it the same way: `python -m lockstep.worker RUN_DIR`.

It finds its rank in its launcher's environment, reads the recipe from the run folder, and writes what happened there.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.backends.ranks import Rank, detect
from lockstep.errors import InputError, LockstepError, RunFailed
from lockstep.machine import facts, trial
from lockstep.measure.recorder import write_failure
from lockstep.placement import elsewhere
from lockstep.process import die_with_parent, end_now, import_torch, pin, redirect_output
from lockstep.recipe import Recipe
from lockstep.resolve.checks import check_number_formats
from lockstep.run import KERNELS, KERNELS_OF_RUN, QUEUE_AGAIN, FolderError, Run, Spec, folder_problem, write_atomic

if TYPE_CHECKING:
    from lockstep.training.context import Context


def work(run: Run, spec: Spec, rank: Rank) -> None:
    """Data, model, strategy, training, results."""
    os.environ[KERNELS_OF_RUN] = str(run.folder / KERNELS)
    if elsewhere(spec.placement) and spec.placement.device == "cpu":
        _ask_this_node(spec.recipe)
    import_torch()
    import torch

    from lockstep.backends import group
    from lockstep.measure.environment import fingerprint
    from lockstep.training.context import Context

    placement = spec.placement
    assert placement.threads is not None
    torch.set_num_threads(placement.threads)
    device = torch.device("cuda", rank.local_rank) if placement.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank.is_first:
        write_atomic(run.folder / "environment.json", fingerprint(device))
    context = Context(run, spec, rank, device)
    if spec.options.script:
        from lockstep.training.start import run_script

        run_script(context)
        return
    _train(context)
    group.leave()
    if rank.is_first and placement.launcher in ("slurm", "ray"):
        return  # it holds the meeting point: a server that leaves before its clients blocks its port for a minute
    end_now(0)


def _ask_this_node(recipe: Recipe) -> None:
    """A node of a cluster is not the machine that submitted, so it is tried itself, once for all jobs. It refuses what it cannot compute, and
    gets its own cap, which torch reads when it is imported."""
    with suppress(trial.NotKnown):  # that is an error only for a format that has to be known
        facts.get()
    os.environ.update(facts.rank_environment())
    check_number_formats(recipe)


def _train(context: Context) -> None:
    """What is made here is gone at the end: DDP's reducer must not outlive the group."""
    run, rank, options = context.run, context.rank, context.options
    if options.probe:
        from lockstep.training import probe

        probe.measure(run, context.spec, rank, context.device)
        return
    from lockstep.training.assemble import assemble
    from lockstep.training.leaving import Leave

    trainer = assemble(context)
    try:
        trainer.race() if options.turns else trainer.fit()
    except Leave:
        _give_way(run, rank)
        return
    if rank.is_first:
        run.write_done()


def _give_way(run: Run, rank: Rank) -> None:
    """Say that the run waits for its nodes, and ask the job's script to queue it again."""
    if not rank.is_first:
        return
    status = run.recorded_status()
    kept = {key: status[key] for key in ("host", "job") if key in status}
    run.write_status("starting", cause="gave its nodes back, and goes on when Slurm queues it again", **kept)
    (run.folder / QUEUE_AGAIN).touch()


def main() -> None:
    run = Run.open(Path(sys.argv[1]))
    spec = run.spec()
    rank = detect(spec.placement)
    folder = run.rank_folder(rank.rank)
    die_with_parent()
    redirect_output(folder / "log.txt")
    # A signal that ends us leaves the stack in the log: gloo aborts where ranks' collectives do not match, and launchers end the others.
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    for name in ("failure.json", "exit.json"):  # of an attempt before this one; its log stays
        (folder / name).unlink(missing_ok=True)
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
    from lockstep.backends.group import exit_now, is_peer_loss, message_of
    from lockstep.measure.callsite import call_site, of_error
    from lockstep.measure.records import steps_taken
    from lockstep.torch_private import collectives_begun

    step = steps_taken(run.rank_folder(rank.rank))
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
    if not isinstance(error, LockstepError):  # those say themselves what is wrong, and where
        with suppress(Exception):  # whatever it is that cannot be found out, the account must be written
            site = call_site(of_error(error.__traceback__)) | {"calls": collectives_begun()}
            if account["consequence"]:  # DDP waits in C++, where there is no frame
                site.setdefault("collective", "exchange of gradients")
            account["site"] = site
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


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lockstep.worker RUN_DIR")
    try:
        main()
    except InputError as problem:
        print(f"lockstep: {problem}", file=sys.stderr)
        os._exit(problem.exit_code)
