"""The run folder: one run on disk, written so that a kill at any moment leaves it readable.

    run.json            recipe, placement, plan, launch command, options: written once, before anything starts
    status.json         planned, starting, running, done, failed (with the first cause), cancelled
    environment.json    what the run ran on
    epochs.jsonl        one line an epoch, over all ranks
    summary.json        the totals, written at the end
    model.pt            the trained weights (a plain state dict)
    model.json          of a user's own model: what was changed about it, and what ranks may compute otherwise than one process
    checkpoints/        where asked for: the last ones and the best (training/checkpoint.py)
    ranks/0000/         of each rank: steps.bin (measure/records.py), epochs.jsonl, status.json, failure.json, log.txt
    tensorboard/        event files of each rank

Small JSON files are replaced atomically; appended records tolerate a cut last line. Everything downstream only reads.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lockstep import shapes
from lockstep.errors import InputError
from lockstep.placement import Placement, Plan
from lockstep.reading import Damaged, exists, is_file, read_record, read_records, read_shape
from lockstep.recipe import Recipe
from lockstep.text import finite, is_text

T = TypeVar("T")
FORMAT = 1
CHECKPOINTS = "checkpoints"
RESERVE = ".reserve"
"""Room that is kept for the last words of a run on a disk that has filled up; gone when the run has ended."""
RESERVE_BYTES = 4096
TRIAL_BYTES = 1 << 20
PLANNING = ".planning"
"""There while a folder is on its way to becoming a run."""
DATA = "data"
"""A user's own data set as its ranks read it; gone when the run has ended."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MODEL_NOTES = "model.json"
ENDED = ("done", "failed", "stalled", "cancelled")
# The state of a run with a file that cannot be read: named, shown, and left out of every comparison.
DAMAGED = "damaged"
# States in which nothing more is written.
OVER = (*ENDED, DAMAGED)
# A rank shows a sign of life about twice a second; one that is silent for so long is stalled (or its host is).
STALLED_AFTER_S = 30.0
LONGEST_NAME = 200


class FolderExists(InputError):
    """The folder of a new run is there already."""


class FolderError(InputError):
    """The run folder cannot be written."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Instead of training, measure ways to take a step against each other (training/probe.py)."""

    batches: list[int] = []
    """Further sizes of one rank's batch, beside the recipe's own and its double."""
    seconds: float = 12.0


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Write down every step for `lockstep verify` (training/witness.py)."""

    reference: str | None = None
    """The folder of the run whose states this one starts its steps from; None: this run is that reference."""
    keep: bool = True
    """Keep tensors; false: digests alone, which is enough to see whether two runs are the same bits."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does beside training: neither the mathematics nor the place."""

    data_root: str | None = None
    time_limit_s: float | None = None
    proof: Proof | None = None
    save_model: bool = True
    checkpoint_every: int | None = None
    """Keep a checkpoint after so many epochs, and at the end."""
    checkpoint_steps: int | None = None
    """Keep one after so many steps, too."""
    keep_checkpoints: int = 2
    resume_from: str | None = None
    """The run folder whose last checkpoint this run goes on from."""
    script: str | None = None
    """The user's own training loop, instead of the recipe's."""
    script_args: list[str] = []
    probe: Probe | None = None
    trace: int | None = None
    """Keep the timeline of so many steps after warm-up (docs/timeline.md)."""
    profile: int | None = None
    """Let torch's profiler look at so many steps after those."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a run in a study. Times are compared between runs of one block alone."""

    study: str
    cell: str
    block: int


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a run before it starts: the contents of run.json."""

    format: int = FORMAT
    id: str
    created: shapes.Moment
    lockstep: str
    recipe: Recipe
    placement: Placement
    plan: Plan
    options: Options = Options()
    data_origin: str = ""
    why_backend: str = ""
    """How backend=auto came to its choice."""
    command: list[list[str]] = []
    """The exact launch command, environment included: one list of words per process that the first host starts."""
    part: Part | None = None
    """Of which study it is a run, where it is one."""

    def __post_init__(self) -> None:
        if self.plan.ranks != self.placement.ranks or self.placement.ranks % self.placement.hosts:
            raise ValueError(
                f"{self.plan.ranks} planned ranks, {self.placement.ranks} on {self.placement.hosts} hosts do not go together"
            )


def runs_root(given: Path | None = None) -> Path:
    """Where runs go: --runs, else LOCKSTEP_RUNS, else ./runs."""
    root = given or Path(os.environ.get("LOCKSTEP_RUNS") or "runs")
    if not is_text(str(root)) or "\0" in str(root):
        raise InputError(
            f"the folder of runs, '{root}', has a name that is not valid text (UTF-8): choose another with --runs"
        )
    return root


def check_name(option: str, name: str, what: str) -> None:
    """A name becomes a folder, and is written into files and pages. File systems allow 255 bytes; what goes before and after needs some."""
    if not name or name.startswith(".") or "/" in name or not is_text(name) or not name.isprintable():
        raise InputError(f"{option}{name!r}: a {what}'s name is one plain word, without '/' and not starting with '.'")
    if len(name.encode()) > LONGEST_NAME:
        raise InputError(
            f"{option}{name[:20]}…: a {what}'s name has at most {LONGEST_NAME} bytes, and this has {len(name.encode())}"
        )


def new_id(recipe: Recipe, placement: Placement) -> str:
    """A readable name that sorts by time; the random tail keeps two starts in one second apart."""
    model = recipe.model.rpartition(":")[2] if ":" in recipe.model else recipe.model
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in model)[:40]
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}-{placement.launcher}-{placement.ranks}r-{secrets.token_hex(2)}"


def write_atomic(path: Path, content: Any, durable: bool = True) -> None:
    """Replace a small JSON file so that a reader sees the old one or the new one, never half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = json.dumps(finite(content), indent=1, allow_nan=False).encode()
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line, in a single write unless the disk has not room for all of it."""
    data = json.dumps(finite(dict(record)), allow_nan=False).encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        while data:
            data = data[file.write(data) or 0 :]


def read_json(path: Path, shape: Any = dict[str, Any]) -> dict[str, Any] | None:
    """A JSON file's object, or None where it is not there or damaged."""
    try:
        return read_record(path, shape)
    except Damaged:
        return None


def read_struct(path: Path, kind: type[T], what: str) -> T:
    """A JSON file of ours as what it was written from; the error names the folder that it belongs to."""
    try:
        found = read_shape(path, kind)
    except Damaged as error:
        raise Damaged(f"{what} {path.parent.name} is damaged, or of another version of Lockstep: {error}") from None
    if found is None:
        raise Damaged(f"{what} {path.parent}: there is no {path.name}")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file of any shape; a last line that was cut off is passed over."""
    return read_records(path, dict[str, Any])


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
        run._made_root = not folder.parent.exists()
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
        try:
            for rank in range(spec.plan.ranks):
                self.rank_folder(rank).mkdir(parents=True)
            with (self.folder / RESERVE).open("wb") as file:
                # A block for each rank's account, and some for the status and the launcher's.
                os.posix_fallocate(file.fileno(), 0, (spec.plan.ranks + 8) * RESERVE_BYTES)
            self.write_status("planned")
            self.write_spec(spec)
            (self.folder / PLANNING).unlink(missing_ok=True)
        except OSError as error:
            raise folder_error(self.folder, error) from None

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
        """A run by path, by id, by the beginning of its id, or 'last'."""
        if is_file(Path(name) / "run.json"):
            return cls(Path(name))
        if name != "last" and "/" not in name and is_file(root / name / "run.json"):
            return cls(root / name)  # the whole id: no need to look at all the others
        there = list_runs(root)
        if not there:
            raise InputError(f"no runs in {root}: start one with 'lockstep run', or name another folder with --runs")
        if name == "last":
            return newest(there)
        ids = [run.id for run in there]
        matches = [i for i in ids if i == name] or [i for i in ids if i.startswith(name)]
        if len(matches) == 1:
            return cls(root / matches[0])
        if matches:
            raise InputError(f"'{name}' fits {len(matches)} runs ({matches[0]}, {matches[1]}, …): write more of the id")
        raise InputError(f"no run '{name}' in {root}: 'lockstep runs' lists them")

    @property
    def id(self) -> str:
        return self.folder.name

    def rank_folder(self, rank: int) -> Path:
        return self.folder / "ranks" / f"{rank:04d}"

    def write_spec(self, spec: Spec) -> None:
        write_atomic(self.folder / "run.json", msgspec.to_builtins(spec))

    def spec(self) -> Spec:
        return read_struct(self.folder / "run.json", Spec, "run")

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
        """The state as it is now: a run with a damaged file is damaged; one whose supervisor is gone, or whose ranks are silent, is not
        running."""
        status, damaged = self.recorded_status(), self.damage()
        if damaged:
            return {**status, "state": DAMAGED, "cause": "; ".join(damaged)}
        if status["state"] not in ("starting", "running"):
            return status
        pid, host = status.get("supervisor_pid"), status.get("host")
        if pid and host == os.uname().nodename and not _alive(pid):
            return {**status, "state": "failed", "cause": f"the process that watched the run (pid {pid}) is gone"}
        silent = [
            beat
            for beat in self.rank_statuses()
            if time.time() - beat["time"] > STALLED_AFTER_S and beat.get("state") == "running"
        ]
        if silent:
            oldest = min(silent, key=lambda beat: float(beat["time"]))
            age = time.time() - oldest["time"]
            return {
                **status,
                "state": "stalled",
                "cause": f"rank {oldest['rank']} gave no sign of life for {age:.0f} s",
            }
        return status

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
    """Every run folder below `root`, by name."""
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [Run(root / name) for name in names if exists(root / name / "run.json")]


class _Created(msgspec.Struct):
    """The one field of run.json that says when; the others are skipped, which reads ten thousand files in half a second."""

    created: float


def newest(runs: list[Run]) -> Run:
    """The run that was created last. Names do not tell: people choose them. A damaged run.json counts as the oldest."""

    def created(run: Run) -> tuple[float, str]:
        try:
            path = run.folder / "run.json"
            moment = msgspec.json.decode(path.read_bytes(), type=_Created).created if path.is_file() else -math.inf
        except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
            moment = -math.inf
        return moment, run.id

    return max(runs, key=created)


def folder_error(folder: Path, error: OSError) -> FolderError:
    """What to tell a user whose run folder cannot be written."""
    if error.errno in NO_ROOM:
        return FolderError(
            f"no room for the run in {folder.parent}: free some space, or choose another place with --runs"
        )
    if error.errno == errno.ENOENT and not folder.exists():
        return FolderError(f"the run folder {folder} was removed while the run was under way")
    return FolderError(f"cannot write the run folder {folder}: {error.strerror}; choose another place with --runs")


def folder_problem(folder: Path) -> FolderError | None:
    """Why the run folder cannot be written at this moment, found by trying; None where it can."""
    trial = folder / f".trial.{os.getpid()}"
    try:
        try:
            with trial.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, TRIAL_BYTES)
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        return folder_error(folder, error)
    return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
