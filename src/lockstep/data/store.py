"""Opens a known data set: from the cache if it is there, else by making it once, under a lock, for all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.data import places, resident
from lockstep.data.catalog import Entry
from lockstep.data.decode import Rejected, check, to_arrays
from lockstep.data.fetch import Unwritable
from lockstep.data.gather import gather
from lockstep.data.locks import hold, set_aside, working_folder
from lockstep.data.places import Gathered
from lockstep.data.resident import Damage, Meta, Resident, RootFact
from lockstep.data.voice import Voice
from lockstep.errors import DataError, InputError
from lockstep.machine.cache import cache_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def is_offline(asked: bool = False) -> bool:
    return asked or os.environ.get("LOCKSTEP_OFFLINE", "").lower() not in ("", "0", "no", "false")


def open_entry(entry: Entry, root: Path | None, voice: Voice, offline: bool) -> tuple[Resident, str]:
    """The resident set, made first where needed, and one line that says where it came from."""
    root = _checked_root(entry, root, voice)
    folder = cache_folder() / entry.name
    found = _usable(entry, resident.open_folder(folder))
    if isinstance(found, Resident) and _settled(entry, found.meta, root):
        return found, _origin(found.meta, root, voice)
    with _workshop(entry, voice) as work:
        # Whoever held the lock before us may have done it all.
        found = _usable(entry, resident.open_folder(folder))
        if not (isinstance(found, Resident) and _settled(entry, found.meta, root)):
            found = _prepare(entry, root, folder, found, work, voice, offline)
    return found, _origin(found.meta, root, voice)


def _checked_root(entry: Entry, root: Path | None, voice: Voice) -> Path | None:
    if root is None or entry.kind == "drawn":
        return None
    root = root.expanduser().absolute()
    if not root.is_dir():
        raise InputError(f"--data-root {root}: there is no such folder")
    return root


def _usable(entry: Entry, found: Resident | Damage | None) -> Resident | Damage | None:
    """A sound folder of another set, or of an older drawing program, is as good as none."""
    if isinstance(found, Resident):
        if found.meta.edition != _edition(entry):
            return None
        if tuple(found.meta.shape) != entry.shape or found.meta.counts != {
            "train": entry.train,
            "test": entry.test,
        }:
            return Damage(found.folder / resident.META, f"does not describe {entry.name}")
    return found


def _edition(entry: Entry) -> int:
    if entry.kind != "drawn":
        return 0
    from lockstep.data.embedded import EDITION

    return EDITION


def _settled(entry: Entry, meta: Meta, root: Path | None) -> bool:
    """Whether nothing is left to find out about the data root: its files were read and have not changed."""
    if root is None:
        return True
    fact = meta.roots.get(str(root))
    return fact is not None and fact.stamp == places.stamp(entry, root)


def _origin(meta: Meta, root: Path | None, voice: Voice) -> str:
    fact = meta.roots.get(str(root)) if root else None
    if fact and fact.problem:
        voice.note(f"data root {root} is not used: {fact.problem}")
    return fact.origin if fact and fact.origin else meta.origin


@contextlib.contextmanager
def _workshop(entry: Entry, voice: Voice) -> Iterator[Path]:
    """A working folder in the cache, under the lock of the set; trouble with the disk becomes one line."""
    cache = cache_folder()
    try:
        locks = cache / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (
            hold(locks / f"{entry.name}.lock", voice, entry.name),
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
    voice: Voice,
    offline: bool,
) -> Resident:
    """Make the set, or only look into a new data root where the cache has the set already."""
    gathered = Gathered(entry)
    roots: dict[str, RootFact] = {}
    if root is not None:
        roots[str(root)] = _ask_root(gathered, root, voice)
    if isinstance(found, Resident):
        # Both are checked against the same checksums, so the content is the same: only note the outcome.
        found.meta.roots.update(roots)
        resident.write_meta(folder, found.meta)
        return found
    gathered.fail(f"cache {folder}", _put_aside(found, voice) if isinstance(found, Damage) else "not there")
    made = work / "made"
    made.mkdir()
    arrays, origin = _make(entry, gathered, work, voice, offline)
    meta = resident.describe(entry.name, entry.class_names, arrays, origin)
    meta.edition, meta.roots = _edition(entry), roots
    resident.write(made, meta, arrays)
    resident.install(made, folder)
    _drop_downloads(entry)
    opened = resident.open_folder(folder)
    if not isinstance(opened, Resident):
        raise DataError(f"{folder} was written and cannot be read back; is the disk sound?")
    voice.note(f"{entry.name} is ready in {folder} (from {origin})")
    return opened


def _ask_root(gathered: Gathered, root: Path, voice: Voice) -> RootFact:
    fact = RootFact(places.stamp(gathered.entry, root))
    bad = places.from_folder(gathered, root, "data root")
    for path, reason in bad:
        voice.warn(f"{path} is not used: {reason}. It is left where it is")
    if gathered.missing:
        fact.problem = gathered.tried[-1][1]
        if not bad:
            voice.warn(f"data root {root} does not have {gathered.entry.name} ({fact.problem}); looking elsewhere")
    else:
        fact.origin = "; ".join(gathered.origins)
    return fact


def _put_aside(damage: Damage, voice: Voice) -> str:
    """Move a bad file of the cache out of the way, and say so."""
    reason = f"{damage.file.name}: {damage.reason}"
    if damage.file.exists():
        aside = set_aside(damage.file)
        voice.warn(f"{damage.file} is not used: {damage.reason}. Moved aside to {aside}; making the set again")
        return f"{reason} (moved aside to {aside.name})"
    voice.warn(f"{damage.file} is missing; making the set again")
    return reason


def _make(
    entry: Entry, gathered: Gathered, work: Path, voice: Voice, offline: bool
) -> tuple[dict[str, NDArray[np.uint8]], str]:
    if entry.kind == "drawn":
        return _draw(entry), f"drawn by Lockstep, edition {_edition(entry)}"
    gather(gathered, _downloads(entry), work, voice, offline)
    try:
        return to_arrays(entry, gathered.contents), "; ".join(gathered.origins)
    except Rejected as error:
        raise DataError(f"data set '{entry.name}' does not have the form that the catalog says: {error}") from None


def _draw(entry: Entry) -> dict[str, NDArray[np.uint8]]:
    from lockstep.data.embedded import draw

    name = entry.name.partition("@")[0]
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

    from lockstep.data.relay import parts_of

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
