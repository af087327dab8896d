"""The user's own training loop: `with lockstep.session() as s:` around it, and a few dozen changed lines (docs/own-loop.md).

Started by `lockstep run train.py ranks=2`, the script runs on every rank of the placement and leaves a run folder like any
other. Started by plain `python train.py`, it runs in that one process and leaves nothing.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.errors import InputError, RunFailed
from lockstep.own_loop.session import Session
from lockstep.own_loop.step import Step
from lockstep.parallel import group
from lockstep.parallel.ranks import MPICH, OPEN_MPI, TORCHRUN, Rank
from lockstep.placement import Placement, plan
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.run import Options, Run, Spec

__all__ = ["Session", "Step", "run_script", "session"]


@dataclass
class _Started:
    """What `lockstep run` has told this process; the session is the one that its script has opened."""

    run: Run
    spec: Spec
    rank: Rank
    session: Session | None = None


_started: _Started | None = None


def session() -> Session:
    """The session of this process: that of the run which started it, else one of its own that leaves nothing behind."""
    if _started is None:
        return _plain_session()
    if _started.session is not None:
        raise InputError("lockstep.session(): a run has one session; keep to the first one")
    spec, rank = _started.spec, _started.rank
    _started.session = Session(_started.run, spec, rank, _device(spec.placement, rank), recorded=True)
    return _started.session


def run_script(run: Run, spec: Spec, rank: Rank) -> None:
    """Run the script of this run on this rank, as Python would run it."""
    global _started
    assert spec.options.script is not None
    script = Path(spec.options.script)
    _started = _Started(run, spec, rank)
    sys.argv = [str(script), *spec.options.script_args]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RunFailed(f"{script.name} ended with exit code {end.code}") from None
    opened = _started.session
    if opened is None:
        raise InputError(
            f"{script.name} did not open lockstep.session(): nothing of what it did was measured, and unless it joined its ranks "
            "by other means, each trained by itself: see docs/own-loop.md"
        )
    if not opened.finished:
        raise InputError(f"{script.name} ended inside lockstep.session(): use it as 'with lockstep.session() as s:'")
    if rank.is_first:
        lost = (run.summary() or {}).get("not_finite")
        run.write_status("done", **({"cause": f"it ended with {lost}"} if lost else {}))
    group.leave()


def _plain_session() -> Session:
    """One process, started by hand. It keeps its records in a folder that goes when the process does."""
    _refuse_other_launchers()
    recipe, placement = resolve(Recipe(), Placement())
    folder = tempfile.TemporaryDirectory(prefix="lockstep-")
    spec = Spec(
        id=Path(folder.name).name,
        created=time.time(),
        lockstep="",
        recipe=recipe,
        placement=placement,
        plan=plan(recipe, placement, 1, 1),
        options=Options(save_model=False),
    )
    run, rank = Run(Path(folder.name)), Rank(0, 1, 0, 1)
    run.rank_folder(0).mkdir(parents=True)
    made = Session(run, spec, rank, _device(placement, rank), recorded=False)
    made.scratch = folder
    return made


def _refuse_other_launchers() -> None:
    """Several processes that do not know of each other would each train alone, and nobody would notice."""
    for name in (TORCHRUN[1], OPEN_MPI[1], MPICH[1], "SLURM_STEP_NUM_TASKS"):
        count = os.environ.get(name, "1")
        if count.isdigit() and int(count) > 1:
            raise InputError(
                f"lockstep.session(): {count} processes were started ({name}), but not by Lockstep: "
                f"use 'lockstep run {Path(sys.argv[0]).name} ranks={count} launcher=…'"
            )


def _device(placement: Placement, rank: Rank) -> torch.device:
    return torch.device("cuda", rank.local_rank) if placement.device == "cuda" else torch.device("cpu")
