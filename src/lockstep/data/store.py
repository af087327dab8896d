"""Opens a known data set: from the cache if it is there, else by making it once, under a lock, for all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.data import resident, sources
from lockstep.data.catalog import Entry
from lockstep.data.collect import collect, warn_about
from lockstep.data.decode import Rejected, check, to_arrays
from lockstep.data.download import Unwritable
from lockstep.data.logger import Logger
from lockstep.data.resident import Damage, Meta, Resident, RootFact
from lockstep.data.sources import Collected
from lockstep.data.workspace import set_aside, working_folder
from lockstep.errors import DataError, InputError
from lockstep.files import home_path, locked
from lockstep.machine.cache import cache_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DRAWN = "drawn by Lockstep"


def is_offline(asked: bool = False) -> bool:
    return asked or os.environ.get("LOCKSTEP_OFFLINE", "").lower() not in ("", "0", "no", "false")


def open_entry(entry: Entry, root: Path | None, logger: Logger, offline: bool) -> tuple[Resident, str]:
    """The resident set, made first where needed, and one line that says where it came from."""
    root = _checked_root(entry, root)
    folder = cache_folder() / entry.name
    found = _usable(entry, resident.open_folder(folder))
    if isinstance(found, Resident) and _root_is_current(entry, found.meta, root):
        return found, _origin(found.meta, root, logger)
    with _workspace(entry, logger) as work:
        # Whoever held the lock before us may have done it all.
        found = _usable(entry, resident.open_folder(folder))
        if not (isinstance(found, Resident) and _root_is_current(entry, found.meta, root)):
            found = _prepare(entry, root, folder, found, work, logger, offline)
    return found, _origin(found.meta, root, logger)


def _checked_root(entry: Entry, root: Path | None) -> Path | None:
    if root is None or entry.kind == "drawn":
        return None
    root = home_path(root)
    if not os.path.isdir(root):  # noqa: PTH112 - a name that nothing can have is no folder, where Path.is_dir raises
        raise InputError(f"--data-root {root}: there is no such folder")
    return root


def _usable(entry: Entry, found: Resident | Damage | None) -> Resident | Damage | None:
    """A sound folder of another set, or of an older drawing program, is as good as none."""
    if isinstance(found, Resident):
        if found.meta.edition != _edition(entry):
            return None
        if (found.meta.shape, found.meta.counts) != (entry.shape, {"train": entry.train, "test": entry.test}):
            return Damage(found.folder / resident.META, f"does not describe {entry.name}")
    return found


def _edition(entry: Entry) -> int:
    if entry.kind != "drawn":
        return 0
    from lockstep.data.embedded import EDITION

    return EDITION


def _root_is_current(entry: Entry, meta: Meta, root: Path | None) -> bool:
    """Whether the files of the data root were read before and have not changed since."""
    if root is None:
        return True
    fact = meta.roots.get(str(root))
    return fact is not None and fact.stamp == sources.stamp(entry, root)


def _origin(meta: Meta, root: Path | None, logger: Logger) -> str:
    fact = meta.roots.get(str(root)) if root else None
    if fact and fact.problem:
        logger.info(f"data root {root} is not used: {fact.problem}")
    return fact.origin if fact and fact.origin else meta.origin


@contextlib.contextmanager
def _workspace(entry: Entry, logger: Logger) -> Iterator[Path]:
    """A working folder in the cache, under the lock of the set; trouble with the disk becomes one line."""
    cache = cache_folder()
    try:
        with (
            locked(cache / ".locks" / f"{entry.name}.lock", f"preparing {entry.name}", logger.info),
            working_folder(cache / ".tmp" / entry.name) as work,
        ):
            yield work
    except Unwritable as error:
        raise InputError(f"{error}; set LOCKSTEP_DATA to a folder with room") from None
    except OSError as error:
        where = error.filename or cache
        raise InputError(
            f"the data cache cannot be written ({where}: {error.strerror or error}); "
            "set LOCKSTEP_DATA to a folder that can"
        ) from None


def _prepare(
    entry: Entry,
    root: Path | None,
    folder: Path,
    found: Resident | Damage | None,
    work: Path,
    logger: Logger,
    offline: bool,
) -> Resident:
    """Make the set, or only look into a new data root where the cache has the set already."""
    collected = Collected(entry)
    roots: dict[str, RootFact] = {}
    if root is not None:
        roots[str(root)] = _read_root(collected, root, logger)
    if isinstance(found, Resident):
        # Both are checked against the same checksums, so the content is the same: only note the outcome.
        found.meta.roots.update(roots)
        resident.write_meta(folder, found.meta)
        return found
    collected.fail(f"cache {folder}", _set_aside_damage(found, logger) if isinstance(found, Damage) else "not there")
    made = work / "made"
    made.mkdir()
    arrays, origin = _make(entry, collected, work, logger, offline)
    meta = resident.describe(entry.name, entry.class_names, arrays, origin)
    meta.edition, meta.roots = _edition(entry), roots
    resident.write(made, meta, arrays)
    resident.install(made, folder)
    _drop_downloads(entry)
    opened = resident.open_folder(folder)
    if not isinstance(opened, Resident):
        raise DataError(f"{folder} was written and cannot be read back; is the disk sound?")
    logger.info(f"{entry.name} is ready in {folder} ({came(origin)})")
    return opened


def _read_root(collected: Collected, root: Path, logger: Logger) -> RootFact:
    fact = RootFact(sources.stamp(collected.entry, root))
    bad = sources.from_folder(collected, root, "data root")
    warn_about(bad, logger)
    if collected.missing:
        fact.problem = collected.tried[-1][1]
        if not bad:
            logger.warning(f"data root {root} does not have {collected.entry.name} ({fact.problem}); looking elsewhere")
    else:
        fact.origin = "; ".join(collected.origins)
    return fact


def _set_aside_damage(damage: Damage, logger: Logger) -> str:
    """Move a bad file of the cache out of the way, and say so."""
    reason = f"{damage.file.name}: {damage.reason}"
    if damage.file.exists():
        aside = set_aside(damage.file)
        logger.warning(f"{damage.file} is not used: {damage.reason}. Moved aside to {aside}; making the set again")
        return f"{reason} (moved aside to {aside.name})"
    logger.warning(f"{damage.file} is missing; making the set again")
    return reason


def came(origin: str) -> str:
    """Where a set is from, in a sentence."""
    return origin if origin.startswith(DRAWN) else f"from {origin}"


def _make(
    entry: Entry, collected: Collected, work: Path, logger: Logger, offline: bool
) -> tuple[dict[str, NDArray[np.uint8]], str]:
    if entry.kind == "drawn":
        return _draw(entry), f"{DRAWN}, edition {_edition(entry)}"
    collect(collected, _downloads(entry), work, logger, offline)
    try:
        return to_arrays(entry, collected.contents), "; ".join(collected.origins)
    except Rejected as error:
        raise DataError(f"data set '{entry.name}' does not have the form that the catalog says: {error}") from None


def _draw(entry: Entry) -> dict[str, NDArray[np.uint8]]:
    from lockstep.data import embedded, text

    name = entry.name.partition("@")[0]
    draw = text.draw if name == "embedded-text" else embedded.draw
    train, test = draw(name, "train", entry.train), draw(name, "test", entry.test)
    return dict(zip(resident.ARRAYS, (*train, *test), strict=True))


def _downloads(entry: Entry) -> Path:
    return cache_folder() / ".downloads" / entry.name


def _drop_downloads(entry: Entry) -> None:
    """The set is made: its downloads have done their work. Rejected files stay where they were said to be."""
    folder = _downloads(entry)
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if ".corrupt" not in path.name:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: rejected files are kept
        folder.rmdir()


def published_damage(entry: Entry, found: Resident) -> list[Damage]:
    """Lay arrays out as published and check that; draw drawn ones again."""
    import numpy as np

    from lockstep.data.encode import parts_of

    if entry.kind == "drawn":
        drawn = _draw(entry)
        return [
            Damage(found.folder / f"{name}.npy", "is not what this version draws")
            for name, array in found.arrays.items()
            if not np.array_equal(array, drawn[name])
        ]
    bad = []
    for part, content in parts_of(entry, found.arrays):
        try:
            check(part, content)
        except Rejected as error:
            bad.append(Damage(found.folder / f"{part.split}-images.npy", f"as {part.name}: {error}"))
    return bad
