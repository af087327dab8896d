"""What a run has done to files is undone when it is over, by whoever is left to do it. inside/saved.py has noted what there is to undo.

`python undo.py FOLDER PROGRAM ARGUMENT…` starts the guard of the program, and stands between it and us: if we are killed, this ends it, and undoes.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.files import Held, locked
from lockstep.inside.proof_files import OVER
from lockstep.inside.saved import COPY, KEPT, OLD, PATH, kept
from lockstep.process import die_with_parent
from lockstep.turns import guard

LOCK = "undo.lock"
"""In the folder of the proof: held while a run of it is under way."""


class Noted(NamedTuple):
    """An entry: a path, and the copy of what was there before the run."""

    entry: Path
    path: Path
    is_folder: bool
    copy: Path

    @property
    def was_there(self) -> bool:
        return os.path.lexists(self.copy)


def _noted(folder: Path) -> list[Noted]:
    found = []
    for entry in [entry for entry in folder.glob("[!.]*") if entry.is_dir()]:
        text = os.fsdecode((entry / PATH).read_bytes())
        found.append(Noted(entry, Path(text), text.endswith(os.sep), entry / COPY))
    return found


def undo(records: Path) -> list[str]:
    """Delete the checkpoints that are new, and put back what was there before. Gives what could not be put back, and where its copy is.

    Whoever is killed at it can be followed by another: an entry goes when its path is as it was.
    """
    folder = Path(kept(str(records)))
    noted, problems = _noted(folder), []
    new = [each for each in noted if not each.was_there]
    holds = {each.path.parent for each in new if not each.is_folder and os.path.lexists(each.path)}
    for each in sorted(new, key=lambda each: each.path, reverse=True):  # what is in a folder comes before it
        try:
            _delete(each, each.path in holds)
            _forget(each)
        except OSError as error:
            problems.append(f"{each.path}: {error.strerror}; it is new, and should not be left")
    for each in [each for each in noted if each.was_there]:
        try:
            _put_back(each)
            _forget(each)
        except OSError as error:
            problems.append(f"{each.path}: {error.strerror}; what it was is in {each.copy}")
    if not problems and folder.exists():
        for rest in [*folder.glob(f"*{OLD}"), *folder.glob(".*")]:
            rest.unlink() if rest.is_file() else shutil.rmtree(rest, ignore_errors=True)
        with suppress(OSError):  # a process on another host may still note something
            folder.rmdir()
    return problems


def _delete(noted: Noted, holds_checkpoint: bool) -> None:
    if noted.is_folder and holds_checkpoint:
        shutil.rmtree(noted.path)
    elif noted.is_folder:
        with suppress(OSError):
            noted.path.rmdir()  # if nothing else is in it
    elif not noted.path.is_dir():
        noted.path.unlink(missing_ok=True)


def _put_back(noted: Noted) -> None:
    path, copy = noted.path, noted.copy
    if _same(path, copy):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{noted.entry.name}")
    try:
        beside.unlink(missing_ok=True)
        shutil.copy2(copy, beside, follow_symlinks=False)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _forget(noted: Noted) -> None:
    """At once: an entry that has lost its copy alone would say that its path is new."""
    shutil.rmtree(noted.entry.rename(noted.entry.with_name(f".{noted.entry.name}")))


def _same(path: Path, copy: Path) -> bool:
    if path.is_symlink() or copy.is_symlink():
        return path.is_symlink() and copy.is_symlink() and path.readlink() == copy.readlink()
    return path.is_file() and filecmp.cmp(path, copy, shallow=False)


def left(root: Path) -> Iterator[str]:
    """What proofs in this folder could not undo, because they were killed with all that watches over them: a line for each file."""
    for folder in root.glob(f".*{KEPT}"):
        lock = folder.with_suffix("") / LOCK
        try:
            if lock.exists():
                with locked(lock, "undoing", wait=False):
                    pass
        except (Held, OSError):  # under way
            continue
        for each in _noted(folder):
            if each.was_there and not _same(each.path, each.copy):
                yield f"a proof that was killed has changed {each.path}: what it was is in {each.copy}; when you have looked, delete {folder}"
            elif not each.was_there and os.path.lexists(each.path):
                yield f"a proof that was killed has left {each.path}; when you have looked, delete {folder}"


def main() -> None:
    records, program = Path(sys.argv[1]), sys.argv[2:]
    process: subprocess.Popen[bytes] | None = None

    def end(number: int, frame: Any) -> None:
        if process is None:
            os._exit(128 + number)
        process.terminate()

    with locked(records.parent / LOCK, "looking for what a killed proof has left"):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, end)
        die_with_parent(sign=signal.SIGTERM)
        process = subprocess.Popen([sys.executable, "-P", guard.__file__, *program], env=guard.environment())
        code = process.wait()
        with suppress(OSError):  # somebody in a hurry may have deleted it
            (records / OVER).touch()
        undo(records)  # what goes wrong is said by who asks for it again; if nobody does, it is still there
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
