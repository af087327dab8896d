"""Run what was prepared: start the ranks, watch them, and leave nothing behind but the results."""

from __future__ import annotations

import shutil
import threading
from contextlib import nullcontext

from lockstep.errors import DataError, InputError, LockstepError, RunCancelled, RunLeft
from lockstep.launch import launchers
from lockstep.launch.emulated import launcher as emulated
from lockstep.launch.emulated import network as emulate
from lockstep.launch.slurm import launcher as slurm
from lockstep.launch.supervise import Progress, supervise
from lockstep.measure.records import steps_taken
from lockstep.placement import one_command_per_host
from lockstep.run import DATA, Run, Spec, folder_error, write_atomic


def execute(
    run: Run,
    spec: Spec,
    host_index: int = 0,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Run:
    """Run what was prepared. Returns the finished run, or raises the one-line error that says which rank failed and why.

    `stop`: for another thread to stop the ranks as Ctrl-C would. A batch job is stopped by Ctrl-C alone.
    """
    left = False
    try:
        with emulate.network(spec.placement) if spec.placement.emulated else nullcontext() as network:
            if spec.placement.launcher == "slurm":
                slurm.follow(run, spec, progress, stop)
                return run
            if network is not None:
                write_atomic(run.folder / "network.json", network.document())
                starts = emulated.starts(spec, run.folder, network)
            else:
                starts = launchers.starts_of(spec, run.folder, host_index)
            supervise(run, spec, starts, host_index, progress, stop)
    except KeyboardInterrupt:
        _did_not_start(run, host_index, "cancelled", "stopped by the user")
        raise RunCancelled(f"stopped before the run in {run.folder} began") from None
    except OSError as error:
        problem = folder_error(run.folder, error)
        _did_not_start(run, host_index, "failed", str(problem))
        raise problem from None
    except RunLeft:
        left = True
        raise
    except LockstepError as error:
        if isinstance(error, InputError | DataError) and _never_ran(run, spec):
            run.remove()
        else:
            _did_not_start(run, host_index, "failed", str(error))
        raise
    finally:
        if run.made_here and not left:
            clear_up(run)
    return run


def clear_up(run: Run) -> None:
    """What was there only for a run under way."""
    run.release_reserve()
    shutil.rmtree(run.folder / DATA, ignore_errors=True)


def _never_ran(run: Run, spec: Spec) -> bool:
    """Wrong input that only a rank could find (a model that does not fit, a file that cannot be imported) is no run: nothing was measured,
    and the error says it all. Hosts with commands of their own still look at the folder."""
    mine = run.made_here and not one_command_per_host(spec.placement)
    return mine and not any(steps_taken(folder) for folder in run.rank_folders())


def _did_not_start(run: Run, host_index: int, state: str, cause: str) -> None:
    """Who supervises a run says how it ended; before that, it is said here."""
    if host_index == 0 and run.recorded_status()["state"] == "planned" and (run.folder / "run.json").exists():
        run.write_final_status(state, cause=cause)
