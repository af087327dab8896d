"""What a teacher names on the command line, graded: a file, a hand-in that was unpacked, or a lab folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from lockstep.errors import InputError
from lockstep.lab import definition
from lockstep.lab.folder import LabFolder
from lockstep.lab.grade import Tell, grade
from lockstep.lab.graded import Graded, name_of
from lockstep.lab.hand_in import HAND_IN, hand_in, is_unpacked, manifest_of, pack_again
from lockstep.reading import exists, is_dir
from lockstep.text import printable


def check_there(paths: Sequence[Path]) -> None:
    """Said before any work: a name that was mistyped is no student who has handed in nothing, and a full disk is no student's fault."""
    for path in paths:
        if not exists(path):
            raise InputError(f"{path}: no such file; '{HAND_IN.command}' writes one")
    try:
        gettempdir()
    except OSError as error:
        raise InputError(f"lab check: {error.strerror}") from None


def graded_as_given(path: Path, name: str | None, data_root: str | None, tell: Tell, race_s: float) -> Graded:
    """`name`: the lab to grade by. Without it, the one of Lockstep's that the hand-in says it is."""
    if not is_dir(path):
        return _file(path, name, data_root, tell, race_s)
    with TemporaryDirectory(prefix="lockstep-lab-") as place:
        file = Path(place) / "folder.lab.zip"
        if is_unpacked(path):
            pack_again(path, file)
            try:
                graded = _file(file, name, data_root, tell, race_s)
            except InputError as error:
                raise InputError(str(error).replace(str(file), str(path))) from None
        else:
            graded = _folder(path, file, name, data_root, tell, race_s)
    graded.file = str(path)
    return graded


def _file(path: Path, name: str | None, data_root: str | None, tell: Tell, race_s: float) -> Graded:
    stated = name or manifest_of(path).lab
    if not name and not definition.is_builtin(stated):  # it may be the path of a lab.toml that the student has written
        raise InputError(
            f"{path}: lab '{printable(stated)[:60]}' does not come with Lockstep: name its folder, --lab FOLDER"
        )
    template = _template(name, stated)
    return grade(path, definition.read(template), template, data_root, tell, race_s)


def _folder(path: Path, file: Path, name: str | None, data_root: str | None, tell: Tell, race_s: float) -> Graded:
    """A lab folder, which `file` is made of for the time being."""
    lab = LabFolder(path)
    its_own = not name and not definition.is_builtin(lab.lab.name)
    template = path if its_own else _template(name, lab.lab.name)
    hand_in(lab, file, lab.student or "you", close=False)
    graded = grade(file, definition.read(template), template, data_root, tell, race_s, handed_in=False)
    if not lab.student:  # folders of two students may have one name, and other places
        graded.student, graded.named = printable(str(path)) if path.name else name_of(path), False
    if its_own:
        graded.notes.append(f"graded by the lab.toml in {path}, as its student has it: --lab FOLDER grades by yours")
    return graded


def _template(name: str | None, stated: str) -> Path:
    """Where the lab is that grades: what the teacher has named, else Lockstep's, whatever folders are here."""
    return definition.find(name) if name else definition.BUILTIN / stated
