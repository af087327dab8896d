"""One run folder: made, written and read."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lockstep import shapes
from lockstep.errors import InputError
from lockstep.reading import Damaged, exists, is_file, read_record, read_records, read_shape
from lockstep.run.errors import NO_ROOM, FolderExists, folder_error, writing
from lockstep.run.finding import find_folder, find_folders
from lockstep.run.json_files import read_json, read_struct, write_atomic
from lockstep.run.names import run_folders
from lockstep.run.spec import Spec
from lockstep.run.status import DAMAGED, current_status
from lockstep.run.tags import tags_of
from lockstep.text import is_text

CHECKPOINTS = "checkpoints"
RESERVE = ".reserve"
"""Room that is kept for the last words of a run on a disk that has filled up; gone when the run has ended."""
RESERVE_BYTES = 4096
PLANNING = ".planning"
"""There while a folder is on its way to becoming a run."""
DATA = "data"
"""A user's own data set as its ranks read it; gone when the run has ended."""
MODEL_NOTES = "model.json"
ORDERS, ANSWERS, DESK = "orders", "answers", "desk.json"
"""Named pipes in the folder of a rank that takes turns: what it is asked to do, and what that took."""
QUEUE_AGAIN = "queue-again"
"""There when a Slurm job's script is to queue it again."""
HANG = "hang.json"
"""There since a run under way had ranks that waited for one that did not come."""
KERNELS = "kernels.json"
KERNELS_OF_RUN = "LOCKSTEP_KERNELS_OF_RUN"
"""In the environment of a rank: the path of that file."""


class Run:
    """One run folder, for writing by its ranks and its supervisor and for reading by everyone else."""

    made_here = False
    """This process made the folder. Whoever did not never deletes in it."""
    _made_root = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, root: Path, spec: Spec) -> Run:
        """Make the folder with everything that is known before the start."""
        run = cls.claim(root / spec.id)
        run.plan(spec)
        return run

    @classmethod
    def claim(cls, folder: Path) -> Run:
        """Make an empty folder, which is then nobody else's."""
        if not is_text(str(folder.absolute())):
            raise InputError(
                f"'{folder.absolute()}' is not valid text (UTF-8), and could not be written down: choose another --runs"
            )
        run = cls(folder)
        run._made_root = not exists(folder.parent)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise FolderExists(f"run folder {folder} exists already: choose another --name") from None
        except OSError as error:
            raise folder_error(folder, error) from None
        run.made_here = True
        with suppress(OSError):  # only hosts that share the folder look at it
            (folder / PLANNING).touch()
        return run

    def plan(self, spec: Spec) -> None:
        """Write down everything that is known before the start. run.json makes the folder a run, so it comes last."""
        with writing(self.folder):
            for rank in range(spec.plan.ranks):
                self.rank_folder(rank).mkdir(parents=True)
            with (self.folder / RESERVE).open("wb") as file:
                # A block for each rank's failure report, and some for the status and the launcher's.
                os.posix_fallocate(file.fileno(), 0, (spec.plan.ranks + 8) * RESERVE_BYTES)
            self.write_status("planned")
            self.write_spec(spec)
            (self.folder / PLANNING).unlink(missing_ok=True)

    def remove(self) -> None:
        """Take back a folder that was made here, where the run is not going to start."""
        assert self.made_here
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._made_root:
            with suppress(OSError):  # another run may be there by now
                self.folder.parent.rmdir()

    @classmethod
    def open(cls, folder: Path) -> Run:
        run = cls(folder)
        if not is_file(folder / "run.json"):
            raise InputError(f"{folder} is not a run folder (it has no run.json): 'lockstep runs' lists the runs")
        return run

    @classmethod
    def find(cls, name: str, root: Path) -> Run:
        """A run by path, by id, by its tag, by the beginning or the end of its id, or 'last'."""
        return cls(find_folder(name, root))

    @classmethod
    def find_all(cls, name: str, root: Path) -> list[Run]:
        """As `find`, where several runs may be meant: all that have the tag."""
        return [cls(folder) for folder in find_folders(name, root)]

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def tags(self) -> list[str]:
        """The names that people gave it."""
        return tags_of(self.folder)

    @property
    def has_checkpoint(self) -> bool:
        return any((self.folder / CHECKPOINTS).glob("step-*.json"))

    def rank_folder(self, rank: int) -> Path:
        return self.folder / "ranks" / f"{rank:04d}"

    def write_spec(self, spec: Spec) -> None:
        write_atomic(self.folder / "run.json", msgspec.to_builtins(spec))

    def spec(self) -> Spec:
        return read_struct(self.folder / "run.json", Spec, "run")

    def write_done(self) -> None:
        """Done it is; where its results are worth nothing, whoever reads the status reads that too."""
        lost = (self.summary() or {}).get("not_finite")
        self.write_status("done", **({"cause": f"it ended with {lost}"} if lost else {}))

    def write_status(self, state: str, **more: Any) -> None:
        """The run's own state; `since` lets readers show how long it has been so."""
        write_atomic(self.folder / "status.json", {"state": state, "since": time.time(), **more})

    def write_final(self, path: Path, content: Any) -> bool:
        """Write last words, with the room that was kept for them where there is no other. False where that is not possible."""
        for attempt in range(2):
            try:
                write_atomic(path, content)
                return True
            except OSError as error:
                if attempt or error.errno not in NO_ROOM:
                    return False
                self.release_reserve()
        return False

    def release_reserve(self) -> None:
        """Let go of the room that was kept for last words."""
        with suppress(OSError):
            (self.folder / RESERVE).unlink()

    def write_final_status(self, state: str, **more: Any) -> bool:
        """How the run ended; nothing that happens here may hide why it did."""
        return self.write_final(self.folder / "status.json", {"state": state, "since": time.time(), **more})

    def recorded_status(self) -> dict[str, Any]:
        """What the folder itself says; a status that cannot be read is a state of its own."""
        try:
            return read_record(self.folder / "status.json", shapes.Status) or {"state": "planned"}
        except Damaged as error:
            return {"state": DAMAGED, "cause": str(error)}

    def damage(self) -> list[str]:
        """What of the run as a whole cannot be read, each file with the reason. Its ranks' files: `measure.records.damage`."""
        found = []
        for name, read in (
            ("run.json", lambda path: read_shape(path, Spec)),
            ("status.json", lambda path: read_record(path, shapes.Status)),
            ("summary.json", lambda path: read_record(path, shapes.Summary)),
            ("epochs.jsonl", lambda path: read_records(path, shapes.Epoch)),
            ("environment.json", lambda path: read_record(path, shapes.Environment)),
        ):
            try:
                read(self.folder / name)
            except Damaged as error:
                found.append(str(error))
        return found

    def status(self) -> dict[str, Any]:
        """The state as it is now, which may be another than the one that was written down last (status.py)."""
        return current_status(self.recorded_status(), self.damage(), self.rank_statuses)

    def rank_statuses(self) -> list[dict[str, Any]]:
        """The last sign of life of every rank that gave one, in the order of ranks."""
        return [beat for folder in self.rank_folders() if (beat := read_json(folder / "status.json", shapes.Beat))]

    def failures(self) -> list[dict[str, Any]]:
        found = (read_json(folder / "failure.json", shapes.Failure) for folder in self.rank_folders())
        return [failure for failure in found if failure]

    def rank_folders(self) -> list[Path]:
        return sorted((self.folder / "ranks").glob("[0-9]*"))

    def epochs(self, rank: int | None = None) -> list[dict[str, Any]]:
        """The epochs over all ranks, or those of one rank."""
        folder = self.folder if rank is None else self.rank_folder(rank)
        try:
            records = read_records(folder / "epochs.jsonl", shapes.Epoch)
        except Damaged:
            return []
        # A restarted run may have written an epoch twice; the later one counts.
        return list({record["epoch"]: record for record in records}.values())

    def summary(self) -> dict[str, Any] | None:
        return read_json(self.folder / "summary.json", shapes.Summary)

    def model_notes(self, kind: str) -> list[str]:
        """Of a user's own model: "remarks", what was changed about it; "cautions", why N ranks may not compute what one does."""
        notes = (read_json(self.folder / MODEL_NOTES) or {}).get(kind)
        return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []

    def environment(self) -> dict[str, Any]:
        return read_json(self.folder / "environment.json", shapes.Environment) or {}


def list_runs(root: Path) -> list[Run]:
    """Every run below `root`, by name."""
    return [Run(folder) for folder in run_folders(root)]
