"""Where a short job runs (launch/pool.py): the words of a placement, without those of a training."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lockstep.errors import InputError
from lockstep.launch.emulated import network as emulate
from lockstep.launch.emulated.link import parse_link
from lockstep.launch.slurm.launcher import allocation, check_commands
from lockstep.placement import Placement, one_command_per_host
from lockstep.resolve import checks
from lockstep.words import read_words

KEYS = ("launcher", "hosts", "link", "ranks", "threads", "pin", "device", "backend", "mpi", "slurm")


def where(words: Sequence[str], command: str, ranks_of_a_host: int) -> Placement:
    """The hosts, launcher and number of ranks that the words name. Unstated, every host has `ranks_of_a_host`."""
    for word in words:
        key = word.partition("=")[0].strip().replace("-", "_").partition(".")[0]
        if "=" in word and key not in KEYS:
            raise InputError(f"{word}: {command} trains nothing: leave it out; it takes {', '.join(KEYS)}")
    _, placement = read_words(words)
    if placement.launcher == "ray":
        raise InputError(
            f"launcher=ray: {command} does not start its ranks through Ray: choose launcher=spawn or launcher=slurm"
        )
    if placement.hosts > 1 and not placement.emulated and placement.launcher == "auto" and allocation():
        placement = msgspec.structs.replace(placement, launcher="slurm")
    if placement.hosts > 1 and placement.launcher == "auto" and not placement.emulated:
        raise InputError(
            f"hosts={placement.hosts}: say how they are reached: launcher=slurm, or hosts=emulated:{placement.hosts}"
        )
    if one_command_per_host(placement):
        raise InputError(
            f"hosts={placement.hosts} launcher=torchrun has a command on each host, and {command} is one command: choose launcher=slurm "
            "(slurm.ranks_by=torchrun), or hosts=emulated:2"
        )
    stated = any(word.startswith("ranks=") for word in words) or placement.ranks > 1
    if not stated:
        placement = msgspec.structs.replace(placement, ranks=placement.hosts * ranks_of_a_host)
    checks.check_hosts_divide(placement)
    launcher = "spawn" if placement.launcher == "auto" else placement.launcher
    checks.check_placement(
        msgspec.structs.replace(placement, launcher=launcher, strategy="flat", backend="gloo", device="cpu")
    )
    if placement.emulated:
        parse_link(placement.link)
        if problem := emulate.problem():
            raise InputError(problem)
    if launcher == "slurm":
        check_commands("srun" if allocation() else "salloc")
    return placement
