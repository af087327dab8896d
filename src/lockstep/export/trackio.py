"""Runs as a folder of trackio's: DIR/PROJECT.db, one project per study, which `trackio show` opens.

Trackio's own library writes it. It finds its folder in TRACKIO_DIR when it is imported, so one process writes one folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.export.facts import Chosen, Facts, facts
from lockstep.export.writers import Store
from lockstep.units import counted

NO_STUDY = "lockstep"
"""The project of runs that were named one by one."""


def write(chosen: Sequence[Chosen], folder: Path) -> Store:
    """Write into `folder`, which is created if missing; runs of an earlier export are replaced."""
    folder.mkdir(exist_ok=True)
    trackio = _trackio(folder)
    for one in chosen:
        _run(trackio, facts(one))
    place = shlex.quote(str(folder.absolute()))
    return Store(f"{counted(len(chosen), 'run')} in {folder}", f"TRACKIO_DIR={place} trackio show")


def _trackio(folder: Path) -> Any:
    os.environ["TRACKIO_DIR"] = str(folder.absolute())
    for name in [name for name in os.environ if name.startswith("TRACKIO_") and name != "TRACKIO_DIR"]:
        del os.environ[name]  # a Space or a server that it would send everything to: this is a folder of files
    try:
        return import_module("trackio")
    except ImportError:
        raise InputError("--format trackio needs trackio: pip install 'lockstep-bench[trackio]'") from None


def _run(trackio: Any, found: Facts) -> None:
    project = found.labels.get("study", NO_STUDY)
    with contextlib.redirect_stdout(io.StringIO()):  # it talks
        with contextlib.suppress(ValueError):  # there is no such project yet
            for earlier in [run for run in trackio.Api().runs(project) if run.name == found.id]:
                earlier.delete()
        trackio.init(
            project=project,
            name=found.id,
            group=found.labels.get("cell"),
            config={**found.settings, **{f"lockstep.{key}": value for key, value in found.labels.items()}},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        for point in found.curve:
            trackio.log({**point.values, "epoch": point.epoch}, step=point.step)
        if found.final.values:
            trackio.log({f"final_{key}": value for key, value in found.final.values.items()}, step=found.final.step)
        trackio.finish()
