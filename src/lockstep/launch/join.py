"""Several hosts, one command on each: the first makes the run's folder, the others take their places in it."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from lockstep.errors import InputError
from lockstep.launch.kernels import kernels_made
from lockstep.launch.specification import Draft, complete
from lockstep.placement import Placement, one_command_per_host
from lockstep.run import ENDED, PLANNING, FolderExists, Run, Spec

# How long a host waits for another one that is making the run folder they share: to see that it does, and until it is done,
# which may take it as long as its data.
SEEN_S, JOIN_S = 10.0, 600.0


def check_host(placement: Placement, host_index: int | None, name: str | None) -> None:
    hosts = placement.hosts
    if host_index is not None and not 0 <= host_index < hosts:
        raise InputError(f"--host-index {host_index}: hosts={hosts} are numbered 0 to {hosts - 1}")
    if not one_command_per_host(placement):
        if host_index:
            raise InputError(f"--host-index {host_index}: one command starts all of these hosts: leave it out")
    elif host_index is None or name is None:
        raise InputError(
            f"hosts={hosts}: every host starts its own command with the same --name and its own --host-index; "
            "--dry-run prints them"
        )


def join(draft: Draft, host_index: int, check: Callable[[Spec], None] | None) -> tuple[Run, Spec]:
    """Of several hosts that share a file system one makes the run's folder, and the others take their places in it.

    Each host has cores of its own, and may have a data cache of its own: both are looked at before its ranks start.
    """
    folder = draft.folder
    with kernels_made(draft), tempfile.TemporaryDirectory(prefix="lockstep-data-") as scratch:
        here = complete(draft, Path(scratch))
    if check:
        check(here)
    began = time.monotonic()
    while folder.exists() and not (folder / "run.json").exists():
        if time.monotonic() - began > (JOIN_S if (folder / PLANNING).exists() else SEEN_S):
            break
        time.sleep(0.05)
    run = Run.open(folder)
    there = run.spec()
    # Hosts may differ in their number of cores, and so in threads; in nothing else.
    same = msgspec.structs.replace(there.placement, threads=draft.placement.threads) == draft.placement
    if there.recipe != draft.recipe or not same:
        raise InputError(f"run folder {folder} holds another recipe or placement: choose another --name")
    state = run.status()["state"]
    if state in ENDED:
        raise FolderExists(f"run folder {folder} holds a run that has ended ({state}): choose another --name")
    register_host(run, host_index)
    return run, msgspec.structs.replace(there, placement=draft.placement)


def register_host(run: Run, host_index: int) -> None:
    """Each host of a run is there once: who finds the place taken has the wrong name or the wrong --host-index."""
    try:
        with (run.folder / f"host-{host_index}").open("x") as file:
            file.write(f"{platform.node()} {os.getpid()}\n")
    except FileExistsError:
        raise FolderExists(
            f"host {host_index} of run {run.folder} was started before: choose another --name, or another --host-index"
        ) from None
