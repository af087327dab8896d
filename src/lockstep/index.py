"""A small index over the run folders, so that ten thousand of them are listed in well under a second.

The folders are the truth. The index (`.index.sqlite` beside them) only remembers what a run that has ended looked like, together
with the time its folder was last changed: every file of a run that matters here is replaced by a rename, which changes that time. A run
that has not ended is read anew each time. So the index can be deleted at any moment, and is rebuilt by the next call; so is one that
is damaged, which a checksum of every row shows.
"""

from __future__ import annotations

import os
import sqlite3
import time
import zlib
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from lockstep.reading import Damaged, exists
from lockstep.run import DAMAGED, ENDED, Run, is_run_name
from lockstep.text import is_text

NAME = ".index.sqlite"
# A higher number makes every older index void.
FORMAT = 5
BUSY_S = 5.0
# Two changes within one tick of the file system's clock leave the same time: what has just changed is not remembered yet.
SETTLED_NS = 1_000_000_000
_RESULTS = ("epochs", "test_accuracy", "test_loss", "train_seconds", "images_per_second", "fit_seconds")
Row = dict[str, Any]
# What keeps a sound index from being used for now; any other error of SQLite's means that the file is damaged.
PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}


def line(run: Run) -> Row:
    """What a list says of one run; one that is damaged is listed as such, not passed over."""
    status = run.status()
    try:
        spec = run.spec()
    except Damaged:
        unknown = dict.fromkeys(("ranks", "global_batch", *_RESULTS, "study", "cell"))
        return {"id": run.id, "state": DAMAGED, "created": 0.0, **unknown, "tags": run.tags}
    summary, recipe, placement = run.summary() or {}, spec.recipe, spec.placement
    return {
        "id": run.id,
        "state": status["state"],
        "created": spec.created,
        "model": recipe.model,
        "data": recipe.data,
        "launcher": placement.launcher,
        "ranks": spec.plan.ranks,
        "threads": placement.threads,
        "global_batch": spec.plan.global_batch or None,
        "precision": recipe.precision,
        **{key: summary.get(key) for key in _RESULTS},
        "study": spec.part.study if spec.part else None,
        "cell": spec.part.cell if spec.part else None,
        "tags": run.tags,
    }


def rows(root: Path) -> list[Row]:
    """One line for every run folder below `root`, oldest first; those that cannot be read come before all others."""
    try:
        # One stat a folder, no file opened: what is left of the work once all runs are known.
        with os.scandir(root) as entries:
            changed = dict(filter(None, map(_changed, entries)))
    except OSError:
        return []
    known = _read(root)
    settled = time.time_ns() - SETTLED_NS
    fresh: dict[str, Row | None] = {}
    found: list[Row] = []
    for name in sorted(changed):
        if not is_text(name) or not is_run_name(name):
            continue  # no run of ours: it could be written neither into the index nor into any document, or is on its way out
        stamp, row = known.get(name, (0, None))
        if stamp != changed[name]:
            run = Run(root / name)
            row = line(run) if exists(run.folder / "run.json") else None
            # A folder without run.json may become a run, and then changes. What is kept is what the folder says: that a run
            # under way is silent, or its watcher gone, is a judgement of this moment.
            if changed[name] < settled and (
                row is None or (row["state"] != DAMAGED and run.recorded_status()["state"] in ENDED)
            ):
                fresh[name] = row
        if row is not None:
            found.append(row)
    gone = known.keys() - changed.keys()
    if fresh or gone:
        _write(root, {name: (changed[name], row) for name, row in fresh.items()}, gone)
    return sorted(found, key=lambda row: (row["created"], row["id"]))


def _changed(entry: os.DirEntry[str]) -> tuple[str, int] | None:
    """When a folder was changed last; None for what is no folder, or has gone since it was listed."""
    try:
        return (entry.name, entry.stat().st_mtime_ns) if entry.is_dir(follow_symlinks=False) else None
    except OSError:
        return None


def _open(root: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(root / NAME, timeout=BUSY_S, isolation_level=None)
    if connection.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DROP TABLE IF EXISTS runs")
        connection.execute("CREATE TABLE runs (name TEXT PRIMARY KEY, changed INTEGER, row BLOB, sum INTEGER)")
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
    return connection


def _sum(name: str, changed: int, row: bytes) -> int:
    return zlib.crc32(row, zlib.crc32(f"{name} {changed} ".encode()))


def _read(root: Path) -> dict[str, tuple[int, Row | None]]:
    """What is remembered; nothing where the index cannot be read, which costs time and no truth."""
    decode = msgspec.json.Decoder(Row | None).decode
    known: dict[str, tuple[int, Row | None]] = {}
    try:
        with closing(_open(root)) as connection:
            for name, changed, row, stored in connection.execute("SELECT name, changed, row, sum FROM runs"):
                if _sum(name, changed, row) != stored:
                    raise ValueError("the row is not what was written")
                known[name] = (changed, decode(row))
    except (sqlite3.Error, ValueError, TypeError) as error:  # TypeError: a column of another type
        _give_up(root, error)
        return {}
    return known


def _write(root: Path, fresh: dict[str, tuple[int, Row | None]], gone: set[str]) -> None:
    lines = [(name, changed, msgspec.json.encode(row)) for name, (changed, row) in fresh.items()]
    try:
        with closing(_open(root)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("DELETE FROM runs WHERE name = ?", [(name,) for name in gone])
            connection.executemany(
                "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?)", [(*line, _sum(*line)) for line in lines]
            )
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        _give_up(root, error)


def _give_up(root: Path, error: Exception) -> None:
    """Do without the index this time; one that is damaged is thrown away."""
    code = getattr(error, "sqlite_errorcode", None)
    if not isinstance(error, sqlite3.Error) or code is None or code & 0xFF not in PASSING:
        forget(root)


def forget(root: Path) -> None:
    """Throw the index away; the next `rows` makes it anew."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        with suppress(OSError):
            (root / f"{NAME}{suffix}").unlink()
