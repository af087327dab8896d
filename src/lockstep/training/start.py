"""The user's own training loop: `with lockstep.session() as s:` around it, and a few dozen changed lines (docs/own-loop.md).

Started by `lockstep run train.py ranks=2`, the script runs on every rank of the placement and leaves a run folder like any
other. Started by plain `python train.py`, it runs in that one process and leaves nothing.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.backends import group
from lockstep.backends.ranks import Rank
from lockstep.errors import InputError, RunFailed
from lockstep.inside.launchers import MPICH, OPEN_MPI, TORCHRUN
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.run import Options, Run, Spec
from lockstep.training.context import Context
from lockstep.training.session import Session
from lockstep.training.step import Step
from lockstep.training.turns import Parted

__all__ = ["Session", "Step", "run_script", "session"]


@dataclass
class _Started:
    """What `lockstep run` has told this process; the session is the one that its script has opened."""

    context: Context
    session: Session | None = None


_started: _Started | None = None


def session() -> Session:
    """The session of this process: that of the run which started it, else one of its own that leaves nothing behind."""
    if _started is None:
        return _plain_session()
    if _started.session is not None:
        raise InputError("lockstep.session(): a run has one session; keep to the first one")
    _started.session = Session(_started.context)
    return _started.session


def run_script(context: Context) -> None:
    """Run the script of this run on this rank, as Python would run it."""
    global _started
    run, rank, options = context.run, context.rank, context.options
    assert options.script is not None
    script = Path(options.script)
    _started = _Started(context)
    sys.argv = [str(script), *options.script_args]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Parted:
        _started.session = None
        if rank.is_first:
            run.write_done()
        group.leave()
        return
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RunFailed(f"{script.name} ended with exit code {end.code}") from None
    if options.turns:
        raise RunFailed(f"{script.name} came to its end in mid-race: let it train longer")
    opened = _started.session
    if opened is None:
        raise InputError(
            f"{script.name} did not open lockstep.session(): nothing of what it did was measured, and unless it joined its ranks "
            "by other means, each trained by itself: see docs/own-loop.md"
        )
    if not opened.finished:
        raise InputError(f"{script.name} ended inside lockstep.session(): use it as 'with lockstep.session() as s:'")
    if rank.is_first:
        run.write_done()
    group.leave()


def _plain_session() -> Session:
    """One process, started by hand. It keeps its records in a folder that goes when the process does."""
    _refuse_other_launchers()
    recipe, placement, why = resolve(Recipe(), Placement(), script=True)
    folder = tempfile.TemporaryDirectory(prefix="lockstep-")
    spec = Spec(
        id=Path(folder.name).name,
        created=time.time(),
        lockstep="",
        recipe=recipe,
        placement=placement,
        plan=plan(recipe, placement, 1, 1),
        options=Options(save_model=False),
        why=why,
    )
    run = Run(Path(folder.name))
    run.rank_folder(0).mkdir(parents=True)
    atexit.register(folder.cleanup)
    device = torch.device("cuda", 0) if placement.device == "cuda" else torch.device("cpu")
    return Session(Context(run, spec, Rank(0, 1, 0, 1), device), recorded=False)


def _refuse_other_launchers() -> None:
    """Several processes that do not know of each other would each train alone, and nobody would notice."""
    for name in (TORCHRUN[1], OPEN_MPI[1], MPICH[1], "SLURM_STEP_NUM_TASKS"):
        count = os.environ.get(name, "1")
        if count.isdigit() and int(count) > 1:
            raise InputError(
                f"lockstep.session(): {count} processes were started ({name}), but not by Lockstep: "
                f"use 'lockstep run {Path(sys.argv[0]).name} ranks={count} launcher=…'"
            )
