"""Checkpoints: all that is needed to go on as if nothing had happened. Written whole or not at all, loaded without unpickling.

    checkpoints/step-00000045.pt      tensors and plain values, read with weights_only=True
    checkpoints/step-00000045.json    its SHA-256 and what it is; written last: without it the other file does not count
    checkpoints/best.pt, best.json    the same file as the best epoch's, under a name that is never deleted

The last few are kept. One that cannot be read is passed over for the one before it, with a warning that names it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from lockstep.errors import InputError
from lockstep.run import CHECKPOINTS, Run, folder_error, read_json, write_atomic

FORMAT = 1
BEST = "best"


@dataclass
class Position:
    """How far training had come: epochs that are whole, steps in all, and what there is of the epoch under way."""

    epoch: int = 0
    steps: int = 0
    visited: int = 0
    """Samples of the next epoch that were visited already."""
    totals: dict[str, float] = field(default_factory=dict)
    partial: dict[str, float] = field(default_factory=dict)
    """Sums of the epoch under way, over all ranks."""


class Keeper:
    """Writes checkpoints into a run folder and deletes old ones."""

    def __init__(self, run: Run, keep: int) -> None:
        self._run, self._keep = run, keep
        self._folder = run.folder / CHECKPOINTS

    def save(self, content: dict[str, Any], position: Position, about: dict[str, Any], best: bool) -> None:
        """One rank calls it; `content` is tensors and plain values."""
        name = f"step-{position.steps:08d}"
        try:
            self._folder.mkdir(exist_ok=True)
            whole = {"format": FORMAT, **content, "position": asdict(position)}
            digest = save_whole(self._folder / f"{name}.pt", whole)
            about = {"format": FORMAT, "sha256": digest, "steps": position.steps, "epoch": position.epoch, **about}
            write_atomic(self._folder / f"{name}.json", about)
            if best:
                self._link_best(name, about)
            for old in checkpoints_in(self._folder)[self._keep :]:
                (self._folder / f"{old}.json").unlink(missing_ok=True)
                (self._folder / f"{old}.pt").unlink(missing_ok=True)
        except OSError as error:
            raise folder_error(self._run.folder, error) from None

    def _link_best(self, name: str, about: dict[str, Any]) -> None:
        temporary = self._folder / f".{BEST}.tmp"
        temporary.unlink(missing_ok=True)
        os.link(self._folder / f"{name}.pt", temporary)
        (self._folder / f"{BEST}.json").unlink(missing_ok=True)
        temporary.replace(self._folder / f"{BEST}.pt")
        write_atomic(self._folder / f"{BEST}.json", about)


def checkpoints_in(folder: Path) -> list[str]:
    """Names of the whole ones, newest first."""
    return sorted((path.stem for path in folder.glob("step-*.json")), reverse=True)


def save_whole(path: Path, content: Any) -> str:
    """A file of tensors, whole or not at all; returns its SHA-256."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w+b") as file:
            writer = _Writer(file)
            try:
                torch.save(content, writer)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise writer.error or error from None  # torch says "unexpected pos" where a write failed, and not why
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk its room is needed for the account of the failure
        raise
    return digest


class _Writer:
    """A file that remembers the error of a write, which torch loses."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def load(run: Path, warn: Callable[[str], None] | None = None) -> dict[str, Any]:
    """The newest checkpoint of a run folder that is whole and ours, with its position as a `Position`."""
    warn = warn or (lambda text: print(f"warning: {text}", file=sys.stderr))
    folder, problems = run / CHECKPOINTS, []
    for name in checkpoints_in(folder):
        path = folder / f"{name}.pt"
        try:
            content = _read(path)
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
            warn(f"checkpoint {path} cannot be used ({error}): taking the one before it")
            continue
        return {**content, "position": Position(**content["position"])}
    reason = f": {problems[0]}" if problems else " (it was run without --checkpoint-every)"
    raise InputError(f"run {run} has no checkpoint that can be used{reason}")


def _read(path: Path) -> dict[str, Any]:
    about = read_json(path.with_suffix(".json")) or {}
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != about.get("sha256"):
            raise ValueError("its contents are not those that were written")
        file.seek(0)
        try:
            content: Any = torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:  # torch raises many kinds for files that are not its own
            raise ValueError(str(error).partition("\n")[0][:200] or type(error).__name__) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or "position" not in content:
        raise ValueError("it was not written by this version of Lockstep")
    return content
