"""How much processor time a container may use: the quotas of Linux's control groups, which no affinity shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores' worth of time that the control groups of this process allow, or None where nothing limits it.

    A group shares what its parents are allowed, so the smallest quota on the way up counts. `root` is where `proc` and `sys` are.
    """
    limits = [limit for folder in _folders(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _folders(root: Path) -> Iterator[Path]:
    """The control groups for processor time that this process is in, and their parents."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has one tree (in a folder of its own beside those of version 1), version 1 a tree for each controller.
        tops = (mount / controllers, mount / "cpu") if controllers else (mount, mount / "unified")
        # A container may see its own group as the top while the path is the host's, or one above what it sees ("/../x").
        steps = [step for step in path.split("/") if step]
        depths = range(len(steps), -1, -1) if ".." not in steps else (0,)
        for top in tops:
            yield from (top.joinpath(*steps[:depth]) for depth in depths)


def _limit(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        # "max" and -1 mean that there is none.
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):
        return None
