"""What was seen of each node and each link: figures by round, so that nothing has to be judged by one of them."""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.placement import Placement

VARIABLE = "LOCKSTEP_PREFLIGHT"
"""Holds the task: a node that does not see our folder has to know its place all the same."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers are told at their start."""

    placement: Placement
    token: str
    """What the file in the shared folder says, and what a node tells another that it calls."""
    names: list[str] = []
    """Of emulated hosts; real ones know their own."""


class Node(msgspec.Struct, kw_only=True):
    name: str
    rank: int
    facts: dict[str, Any] = {}
    """Versions, CPU, memory, free space; empty where it gave none."""
    cores: dict[int, list[float]] = {}
    """GFLOP/s of each core, by round."""
    granted: dict[int, list[float]] = {}
    """The share of its time that each core gave us, by round."""
    memory: list[float] = []
    """GB/s of all cores together, read and written."""
    shared: bool | None = None
    """Whether it sees our folder, and we see what it writes there; None where it was not asked."""
    write: list[float] = []
    """MB/s into the shared folder, by round."""
    create_ms: list[float] = []
    """Making and renaming a small file there."""
    skew_s: float | None = None
    """How far its clock is ahead of ours."""
    skew_within_s: float | None = None
    late: str | None = None
    """What it answered long after the others."""
    lost: str | None = None
    """Why nothing more was asked of it."""


class Link(msgspec.Struct, kw_only=True):
    """One direction between two nodes."""

    source: int
    target: int
    gbit: list[float] = []
    latency_us: list[float] = []
    """Half a round trip, the median of some."""
    problem: str | None = None


class Seen(msgspec.Struct, kw_only=True):
    nodes: list[Node]
    links: list[Link] = []
    rounds: int = 0
    seconds: float = 0.0
    folder: str = ""
    """The folder that the nodes should share."""
