"""What a script does to files while `lockstep verify -- COMMAND` watches it: noted before it is done, so that it can be undone.

The script saves, copies, moves and deletes as always, and finds what it did. Before a file that was there is overwritten, moved or deleted, it is
copied. A checkpoint that is new is noted, and so are its copies and new folders. verify/foreign/undo.py puts back the one and deletes the other.

PROOF.kept/ENTRY/path     which file this is, or which folder, with a slash behind it
PROOF.kept/ENTRY/copy     what was there; without it, nothing was
PROOF.kept/ENTRY.old      this file was there, though it has changed since the run began

An entry is made whole and then renamed, which fails where there is one. So of all processes that save at a path, the first to look has looked before
anybody changed anything, and whoever is killed leaves no half of an entry.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from .proof_files import OVER
from .standins import in_place_of

KEPT, PATH, COPY, OLD = ".kept", "path", "copy", ".old"
# Nobody's files.
_SYSTEM = ("/proc/", "/sys/", "/dev/")


def kept(records: str) -> str:
    """Where it is noted: beside the folder of the proof, which is deleted at the end, whatever has happened."""
    return os.path.dirname(os.path.realpath(records)) + KEPT


class Saved:
    """Of one run, by all its processes."""

    def __init__(self, records: str, began: int) -> None:
        """`began`: when, in nanoseconds, by the clock of the file system. What has not changed since then was there before."""
        self._kept, self._began = kept(records), began
        self._over = os.path.join(records, OVER)
        self._others = (*_SYSTEM, os.path.dirname(os.path.realpath(records)))
        self._thread = threading.local()
        self._told: dict[str, Callable[..., None]] = {
            "open": self._opens,
            "os.remove": lambda path, at: self._keep(_place(path, at)),
            "os.truncate": lambda path, _: self._keep(_content(path)),
            "os.rename": lambda source, target, at, to: self._moves(_place(source, at), _place(target, to)),
            "shutil.copyfile": lambda source, target: self._follows(_content(source), _content(target)),
            "os.link": self._links,
            "os.symlink": self._points,
            "os.mkdir": lambda path, _, at: self._makes(_place(path, at)),
            "os.chmod": lambda path, *more: self._changes(_place(path, more[-1])),
            "os.chown": lambda path, *more: self._changes(_place(path, more[-1])),
            "os.utime": lambda path, *more: self._changes(_place(path, more[-1])),
        }

    def watch(self) -> None:
        """Python tells what it is about to do to files, by whatever name the script calls it."""
        told, hears, ending = self._told, self._hears, sys.is_finalizing

        def hook(event: str, args: tuple[Any, ...]) -> None:  # there are many events, also of other kinds
            if event in told and not ending():
                hears(told[event], args)

        sys.addaudithook(hook)

    def saves(self, function: Any) -> Any:
        """What stands in for a function that saves its first argument at the path that is its second. It need not be written in Python."""

        @in_place_of(function)
        def stands_in(*args: Any, **keywords: Any) -> Any:
            path = args[1] if len(args) > 1 else keywords.get("f", keywords.get("filename"))
            path = path if _is_path(path) else getattr(path, "name", None)  # a file that the script has opened
            self._hears(lambda path: self._keep(_content(path), new=True), (path,))
            return function(*args, **keywords)

        return stands_in

    def _hears(self, told: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not _is_path(args[0]) or getattr(self._thread, "noting", False):
            return
        self._thread.noting = True  # what we do ourselves
        try:
            told(*args)
        finally:
            self._thread.noting = False

    def _opens(self, path: Any, _: Any, flags: int) -> None:
        if flags & os.O_TRUNC:
            self._keep(_content(path))
        elif flags & (os.O_WRONLY | os.O_RDWR):
            self._changes(os.fsdecode(path))

    def _moves(self, source: str, target: str) -> None:
        if os.path.islink(source) or not os.path.isdir(source):
            self._keep(source)
            self._follows(source, target)
            return
        for folder, folders, files in os.walk(source):
            for path in [os.path.join(folder, name) for name in (*folders, *files)]:
                if os.path.islink(path) or not os.path.isdir(path):
                    self._moves(path, target + path[len(source) :])
                    if self._noted(path):
                        self._keep(os.path.join(target, ""), new=True)
            folder = os.path.join(folder, "")
            self._follows(folder, target + folder[len(source) :])

    def _links(self, source: Any, target: Any, at: int, to: int) -> None:
        self._changes(_place(source, at))
        self._follows(_place(source, at), _place(target, to))

    def _points(self, source: Any, target: Any, at: int) -> None:
        place = _place(target, at)
        self._follows(_content(os.path.join(os.path.dirname(place), os.fsdecode(source))), place)

    def _makes(self, folder: str) -> None:
        if not os.path.lexists(folder):
            self._keep(os.path.join(folder, ""), new=True)

    def _follows(self, source: str, target: str) -> None:
        """What comes of something that we have noted is noted, too."""
        self._keep(target, new=self._noted(source))

    # --- what we note ---

    def _entry(self, path: str) -> str:
        return os.path.join(self._kept, hashlib.sha256(os.fsencode(path)).hexdigest()[:32])

    def _noted(self, path: str) -> bool:
        return os.path.isdir(self._entry(path))

    def _was_there(self, path: str) -> bool:
        """A file or a link that was there before the run."""
        try:
            found = os.lstat(path)
        except OSError:
            return False
        known = found.st_ctime_ns <= self._began or os.path.exists(self._entry(path) + OLD)
        return known and (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode))

    def _changes(self, path: str) -> None:
        """It changes, but keeps what is in it, or gets more. It is still not of this run."""
        path = os.path.realpath(path)
        if self._was_there(path) and not path.startswith(self._others):
            os.makedirs(self._kept, exist_ok=True)
            open(self._entry(path) + OLD, "wb").close()

    def _keep(self, path: str, new: bool = False) -> None:
        """Something is about to be done to this path, for the first time or not. `new`: if nothing is there, what will be is to be deleted."""
        if path.startswith(self._others):
            return
        if os.path.exists(self._over):  # all is undone already, or is about to be
            os._exit(0)
        there = self._was_there(path)
        if self._noted(path):
            return
        if not there and not (new and (os.path.isfile(path) or not os.path.lexists(path))):
            return
        os.makedirs(self._kept, exist_ok=True)
        made = tempfile.mkdtemp(prefix=".", dir=self._kept)
        try:
            with open(os.path.join(made, PATH), "wb") as file:
                file.write(os.fsencode(path))
            if there:
                shutil.copy2(path, os.path.join(made, COPY), follow_symlinks=False)
            os.rename(made, self._entry(path))
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not self._noted(path):  # else another process was first
                raise


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, bytes, os.PathLike))


def _place(path: Any, folder: int = -1) -> str:
    """Where a file or a link itself is. `folder`: an open one that the path begins at."""
    text = os.fsdecode(path).rstrip(os.sep) or os.sep
    if folder >= 0:
        text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    return os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))


def _content(path: Any) -> str:
    """Where what is read and written at a path is."""
    return os.path.realpath(os.fsdecode(path))
