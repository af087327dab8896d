"""Runs as offline runs of Weights & Biases: DIR/wandb/offline-run-*, which `wandb sync` sends to a server.

W&B's own library writes them, in a process that it starts for that. Nothing is sent: the runs are made with mode="offline".
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.errors import InputError, first_line
from lockstep.export.facts import Chosen, Facts, facts
from lockstep.export.writers import Store
from lockstep.units import counted

NO_STUDY = "lockstep"
"""The project of runs that were named one by one."""
# What W&B would record of this machine and this process; the run was elsewhere, at another time.
_NOT_OURS = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


def write(chosen: Sequence[Chosen], folder: Path) -> Store:
    """Write offline runs into `folder`, which is created if missing; those of an earlier export are replaced."""
    wandb = _wandb()
    folder.mkdir(exist_ok=True)
    for one in chosen:
        found = facts(one)
        for earlier in (folder / "wandb").glob("offline-run-*"):
            if earlier.name.split("-", 3)[-1] == _plain(found.id):  # behind the time of that export
                shutil.rmtree(earlier)
        try:
            _run(wandb, found, folder)
        except wandb.Error as error:
            raise InputError(f"-o {folder}: W&B: {first_line(error)}") from None
    place = folder / "wandb"
    return Store(f"{counted(len(chosen), 'run')} in {place}", f"wandb sync {shlex.quote(str(place))}/offline-run-*")


def _wandb() -> Any:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # an export sends nothing
    try:
        return import_module("wandb")
    except ImportError:
        raise InputError("--format wandb needs Weights & Biases: pip install 'lockstep-bench[wandb]'") from None


def _run(wandb: Any, found: Facts, folder: Path) -> None:
    known = {key: value for key, value in _NOT_OURS.items() if key in wandb.Settings.model_fields}
    run = wandb.init(
        mode="offline",
        dir=str(folder),
        project=_plain(found.labels.get("study", NO_STUDY)),
        group=found.labels.get("cell"),
        id=_plain(found.id),
        name=found.id,
        config={**found.settings, "lockstep": found.labels},
        settings=wandb.Settings(**known),
        reinit="create_new",
    )
    for point in found.curve:
        run.log({**point.values, "epoch": point.epoch, "_timestamp": point.at}, step=point.step)
    run.summary.update({f"final_{key}": value for key, value in found.final.values.items()})
    run.finish(exit_code=0 if found.state == "done" else 1)


def _plain(name: str) -> str:
    """A name that W&B takes for a run or a project, still another one for every other name."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:100]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
