"""Where to look: the nodes that words name, the allocation that we are in, or this machine alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import msgspec

from lockstep.errors import InputError
from lockstep.launch.slurm.launcher import allocation
from lockstep.launch.where import where
from lockstep.machine.cores import cores
from lockstep.placement import Placement
from lockstep.words import read_words


def placed(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> Placement:
    """One worker on each node, with all of its cores."""
    if allocation() and not _states_where(words):
        words = (*words, "launcher=slurm", f"hosts={environment.get('SLURM_JOB_NUM_NODES', '1')}")
    found = where(words, "preflight", 1)
    if found.ranks != found.hosts:
        raise InputError(
            f"ranks={found.ranks}: preflight starts one worker on each of {found.hosts} hosts: leave ranks out"
        )
    by_slurm = found.launcher == "slurm"
    given = _given(environment.get("SLURM_JOB_CPUS_PER_NODE", "")) if by_slurm and allocation() else None
    own = max(1, cores() // found.hosts) if found.emulated else cores()
    return msgspec.structs.replace(
        found,
        launcher="spawn" if found.launcher == "auto" else found.launcher,
        threads=found.threads or given or own,
        device="cpu",
        backend="gloo",
        strategy="single" if found.ranks == 1 else "flat",
        memory_format="contiguous",
    )


def _states_where(words: Sequence[str]) -> bool:
    """Whether launcher or hosts are stated, by a word or in a file (where one host is as good as none)."""
    _, placement = read_words(words)
    stated = {word.partition("=")[0].strip() for word in words if "=" in word}
    return bool(stated & {"launcher", "hosts"}) or placement.launcher != "auto" or placement.hosts > 1


def _given(text: str) -> int | None:
    """The cores that every node of the allocation has, from Slurm's text: 2(x3),4 are three nodes of two and one of four."""
    numbers = [int(number) for number in re.findall(r"(?:^|,)(\d+)", text)]
    return min(numbers) if numbers else None
