"""A lab folder as one file to hand in, and that file opened again. It is a zip as study/pack.py writes them: a manifest with sizes and SHA-256.

    lab/ledger.jsonl, lab/answers.toml, lab/*.py    predictions, claims, answers and code
    runs/ID/…                                       the sealed records of each run, and its weights
    manifest.json                                   who hands in what, and every member

Nothing in it is executed or unpickled where it is opened.
"""

from __future__ import annotations

import hashlib
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
from msgspec import Meta

from lockstep.errors import InputError
from lockstep.files import replacing
from lockstep.lab import chain
from lockstep.lab.chain import Chain
from lockstep.lab.folder import ANSWERS, LONGEST_NAME, RUNS, LabFolder, read_answers
from lockstep.lab.seal import LARGEST, sealed_files
from lockstep.measure.environment import version_of
from lockstep.reading import Damaged, is_file, read_file
from lockstep.run import Run, is_run_name
from lockstep.shapes import Moment
from lockstep.study.pack import FORMAT, MANIFEST, MOST_MEMBERS, Member, entry_of, is_plain
from lockstep.study.packed import Kind, content_bytes, extract, listing_of, opened, shown
from lockstep.study.private_paths import PrivatePaths, paths_of
from lockstep.text import is_text, printable
from lockstep.units import counted

ENDING = ".lab.zip"
LAB = "lab"
HAND_IN = Kind("hand-in of a lab", "lockstep lab hand-in")
LARGEST_CODE = 1 << 20
LARGEST_CONTENT = 1 << 30
SPEC = "run.json"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of manifest.json."""

    format: int = FORMAT
    lockstep: str
    created: Moment
    lab: str
    student: Annotated[str, Meta(max_length=LONGEST_NAME)]
    members: Annotated[list[Member], Meta(max_length=MOST_MEMBERS)]


@dataclass
class Packed:
    """What was written."""

    file: str
    student: str
    runs: int = 0
    bytes: int = 0
    missing: list[str] = field(default_factory=list)
    """Tasks without anything to grade."""


def hand_in(folder: LabFolder, output: Path, student: str = "", close: bool = True) -> Packed:
    """Write the one file, whole or not at all. `close` writes down in the ledger that it was handed in."""
    folder.check_chain()
    student = student or folder.student
    if not student.strip() or len(student) > LONGEST_NAME or not is_text(student) or not student.isprintable():
        raise InputError(
            f'--student: give your name in plain text, of at most {LONGEST_NAME} characters: --student "Ana Li"'
        )
    packed = Packed(str(output), student, missing=missing(folder))
    newest = [folder.run_of(task.name) for task in folder.lab.of_kind("run")]
    runs = [run for run in newest if run is not None]
    packed.runs = len(runs)
    code = {path.name: path for path in sorted(folder.path.glob("*.py")) if is_plain(path.name) and is_file(path)}
    if close:
        digests = {name: hashlib.sha256(_read(path, LARGEST_CODE)).hexdigest() for name, path in code.items()}
        if is_file(folder.path / ANSWERS):
            digests[ANSWERS] = hashlib.sha256(_read(folder.path / ANSWERS, LARGEST_CODE)).hexdigest()
        folder.chain.append(folder.ledger, "hand-in", student=student, files=digests)
    contents: dict[str, bytes] = {}
    for name, path in {**code, ANSWERS: folder.path / ANSWERS, chain.FILE: folder.ledger}.items():
        if is_file(path):
            contents[f"{LAB}/{name}"] = _read(path, LARGEST_CODE if name != chain.FILE else LARGEST)
    paths = PrivatePaths(paths_of(folder.runs, runs))
    with replacing(output) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        members = []

        def put(name: str, data: bytes) -> None:
            members.append(Member(name, len(data), hashlib.sha256(data).hexdigest()))
            archive.writestr(entry_of(name), data)

        for name, data in sorted(contents.items()):
            put(name, data)
        for run in runs:
            put(f"{RUNS}/{run.id}/{SPEC}", paths.removed(SPEC, _read(run.folder / SPEC, LARGEST)))
            for name, path in sorted(sealed_files(run).items()):
                put(f"{RUNS}/{run.id}/{name}", _read(path, LARGEST))
        manifest = Manifest(
            lockstep=version_of("lockstep") or "unknown",
            created=time.time(),
            lab=folder.lab.name,
            student=student,
            members=members,
        )
        if content_bytes(manifest) > LARGEST_CONTENT:
            raise InputError(
                f"more than {LARGEST_CONTENT >> 30} GiB to hand in: begin anew, and measure every task once"
            )
        archive.writestr(entry_of(MANIFEST), msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    packed.bytes = output.stat().st_size
    return packed


def missing(folder: LabFolder) -> list[str]:
    """The tasks that nothing was done for, as far as that shows."""
    claims, answers, _ = folder.answers()
    done = {
        "run": lambda name: folder.run_of(name) is not None,
        "predict": lambda name: folder.predicted(name) is not None,
        "claim": lambda name: name in claims,
        "answer": lambda name: name in answers,
    }
    return [task.name for task in folder.lab.tasks if task.kind in done and not done[task.kind](task.name)]


def _read(path: Path, most: int) -> bytes:
    data = read_file(path, most)
    if data is None:
        raise Damaged(f"{path.name} is missing")
    return data


@dataclass
class Submission:
    """A hand-in, unpacked into a folder of its own."""

    file: Path
    folder: Path
    manifest: Manifest
    chain: Chain
    claims: dict[str, float]
    answers: dict[str, str]
    problems: list[str]

    @property
    def student(self) -> str:
        return printable(self.manifest.student)

    def run(self, name: str) -> Run:
        return Run(self.folder / RUNS / name)

    def code(self, name: str) -> Path:
        return self.folder / LAB / name


@contextmanager
def submission(file: Path) -> Iterator[Submission]:
    """A hand-in, checked and unpacked for as long as the block lasts. InputError where it is not one."""
    with TemporaryDirectory(prefix="lockstep-lab-") as place:
        folder = Path(place)
        with opened(file, HAND_IN) as archive:
            manifest = listing_of(archive, Manifest, HAND_IN)
            if content_bytes(manifest) > LARGEST_CONTENT:
                raise InputError(f"{content_bytes(manifest) / 1e9:,.1f} GB, more than any hand-in has")
            entries = {entry.filename: entry for entry in archive.infolist()}
            for member in manifest.members:
                _check_place(member.name)
                extract(archive, entries[member.name], member, folder / member.name)
            if not is_file(folder / LAB / chain.FILE):
                raise InputError(f"not a {HAND_IN.noun}: it has no {chain.FILE}")
        claims, answers, problems = read_answers(folder / LAB / ANSWERS)
        try:
            ledger = Chain.read(folder / LAB / chain.FILE)
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        yield Submission(file, folder, manifest, ledger, claims, answers, problems)


def is_unpacked(folder: Path) -> bool:
    """Whether it is a hand-in that somebody has unpacked, as Gradescope does with what is uploaded."""
    return is_file(folder / MANIFEST) and is_file(folder / LAB / chain.FILE)


def pack_again(folder: Path, output: Path) -> None:
    """An unpacked hand-in as the file that it was, with all that is in the folder: what does not belong there is found as in any other."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    if len(paths) > MOST_MEMBERS + 1:
        raise InputError(f"{folder}: {len(paths):,} files, more than any hand-in has")
    left = LARGEST_CONTENT
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as archive:
        for path in paths:
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() or not is_plain(name):
                raise InputError(f"{folder}: {shown(name)}: a link, or a name that no file of a hand-in has")
            data = _read(path, min(left, LARGEST))
            left -= len(data)
            archive.writestr(entry_of(name), data)


def _check_place(name: str) -> None:
    top, *rest = name.split("/")
    if not ((top == LAB and len(rest) == 1) or (top == RUNS and len(rest) > 1 and is_run_name(rest[0]))):
        raise InputError(f"{shown(name)}: belongs neither to the lab nor to a run")


def size_of(packed: Packed) -> str:
    return f"{counted(packed.runs, 'run')}, {packed.bytes / 1e3:,.0f} kB"


def manifest_of(file: Path) -> Manifest:
    """Who hands in what. InputError where it is not a hand-in."""
    with opened(file, HAND_IN) as archive:
        return listing_of(archive, Manifest, HAND_IN)
