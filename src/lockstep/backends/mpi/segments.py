"""Shared memory that MPI leaves behind where its ranks are ended before all have met: files in /dev/shm with names of its own.

(Once they have met, the names are taken away at once: group.py.) Imports no MPI. A file is known by its inode too, so what has
meanwhile got the same name stays.
"""

from __future__ import annotations

from pathlib import Path

ROOM = Path("/dev/shm")
NAMES = ("mpich_shm_", "sm_segment.", "vader_segment.")
"""How the MPIs' files begin."""


def of_process(pid: int) -> list[tuple[str, int]]:
    """Name and inode of each of MPI's files that a process has open."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return []
    found = set()
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)  # addresses, permissions, offset, device, inode, name
        path = Path(fields[5]) if len(fields) == 6 else Path()
        if path.parent == ROOM and path.name.startswith(NAMES) and not path.name.endswith(" (deleted)"):
            found.add((str(path), int(fields[4])))
    return sorted(found)


def of_rank(pid: int, folder: Path) -> list[tuple[str, int]]:
    """The same of a rank that works in `folder`; nothing where the process of that number is another one by now."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return of_process(pid) if str(folder).encode() in words else []


def remove(name: str, inode: int) -> None:
    path = Path(name)
    try:
        if path.lstat().st_ino == inode:
            path.unlink()
    except OSError:
        return
