"""Labs: what is no student's fault takes no points (a slow, busy or full machine, a reference that fails, a shared name), and says what it is."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lab_submissions as wrong
from lockstep.errors import InputError
from lockstep.lab import again, definition, grade, own_code, pages, patience
from lockstep.lab.copies import find_copies
from lockstep.lab.definition import BUILTIN
from lockstep.lab.folder import LabFolder, make
from lockstep.lab.graded import Graded, Mark, lacking
from lockstep.lab.hand_in import hand_in, submission
from lockstep.lab.own_code import Allowance, Speed, run_child
from lockstep.lab.patience import Ended, Patience
from lockstep.lab.trials import kernel
from lockstep.lab.trials.racing import REFERENCE, YOURS, raced
from lockstep.machine.cpu import TICKS_S, Ticks
from lockstep.study import packed
from lockstep.turns import ContenderFailed
from support import Cli

KERNEL = BUILTIN / "kernels"
TASK = definition.read(KERNEL).task("kernel")


@pytest.fixture
def lab(tmp_path: Path) -> LabFolder:
    wrong.write_labs(tmp_path / "labs")
    return make(str(tmp_path / "labs/mini"), tmp_path / "ana", "Ana Li")


class Ends:
    """Stands for the processes that try code: how each of them ends, and the patience that it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: tuple[Ended, float]) -> None:
        self.patiences: list[Patience] = []
        self._ends = list(ends)
        monkeypatch.setattr(own_code, "run_child", self._run)

    def _run(self, argv: list[str], folder: Path, cwd: Path, patience: Patience) -> tuple[Ended, float]:
        self.patiences.append(patience)
        (folder / own_code.LOG).write_text("")
        return self._ends.pop(0)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "kernel.py").write_text("")
    return tmp_path / "kernel.py"


# ---- starting is slow


@pytest.mark.parametrize(
    ("starts", "slow"), [([2.0], 1.0), ([30.0, 2.0], 1.0), ([30.0, 12.0], 4.0), ([12.0, 30.0], 4.0)]
)
def test_what_the_second_start_takes_is_how_slow_a_machine_is(
    monkeypatch: pytest.MonkeyPatch, starts: list[float], slow: float
) -> None:
    ends = Ends(monkeypatch, *(("over", own_s) for own_s in starts))
    assert own_code.slowness() == slow
    assert len(ends.patiences) == len(starts)


@pytest.mark.cold
def test_a_slow_import_of_torch_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps, as it does while it waits for a disk."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(2.5)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(own_code, "START_S", 1.0)
    assert own_code.slowness() > 1.5


def test_where_starting_is_slow_all_limits_are_longer(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = own_code.allowance([TASK], 30.0, slow=4.0)
    assert whole.seconds == 4 * 180.0
    ends = Ends(monkeypatch, ("over", 70.0), ("over", 100.0), ("over", 90.0), ("over", 90.0))
    own_code.judged(TASK, code, whole)
    own_code.raced(TASK, code, KERNEL, 30.0, whole)
    first, second, race, race_again = ends.patiences
    assert first == Patience(cpu_s=480.0, quiet_s=160.0, own_s=240.0, wall_s=own_code.BUSY_S + 240.0)
    assert second.own_s == 240.0 - 70.0, "70 s are no longer too many to be tried again"
    assert race.own_s == race_again.own_s == 30.0 + 4 * 30.0, "the race itself is not longer"
    assert whole.seconds == 4 * 180.0 - 70.0 - 100.0 - 90.0 - 90.0


def test_a_race_that_is_ended_takes_no_points_and_a_judgement_does(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = ("it did not come to an end within 60 s", 60.0)
    Ends(monkeypatch, late)
    found = own_code.judged(TASK, code, Allowance(180.0))
    assert (found.right, found.settled) == (False, True)
    assert found.why == f"it hangs: {late[0]}"
    Ends(monkeypatch, late)
    speed = own_code.raced(TASK, code, KERNEL, 30.0, Allowance(180.0))
    assert not speed.loses(TASK.speed)
    assert speed.unmeasured == f"the race was ended: {late[0]}", "it is flagged"


# ---- a busy machine, and a full one


@pytest.mark.parametrize(
    ("threads", "others", "own_s"),
    [
        ([(0.05, 0.95)], 1.95, 5.0),
        ([(0.5, 0.5)] * 4, 0.0, 100.0),
        ([(0.25, 0.75)] * 4, 1.0, 50.0),
        ([(0.1, 0.1)], 1.9, 90.0),
    ],
    ids=["others have the cores", "its own threads have them", "half and half", "it mostly sleeps"],
)
def test_only_waiting_for_others_is_not_its_own(
    monkeypatch: pytest.MonkeyPatch, threads: list[tuple[float, float]], others: float, own_s: float
) -> None:
    """For a hundred seconds, on two cores: what each of its threads runs and waits in a second, and what others run."""
    busy = others + sum(ran for ran, _ in threads)
    clock = SimpleNamespace(s=0)
    monkeypatch.setattr(time, "monotonic", lambda: float(clock.s))
    monkeypatch.setattr(patience, "ticks", lambda: Ticks(round(busy * clock.s * TICKS_S), 0, 2 * clock.s * TICKS_S))
    watch = patience.Watch(os.getpid(), Patience(cpu_s=1000.0))

    def count() -> None:
        watch._threads.update({str(at): (ran * clock.s, waited * clock.s) for at, (ran, waited) in enumerate(threads)})

    monkeypatch.setattr(watch, "_count", count)
    for clock.s in range(1, 101):
        assert watch.look() == ""
    assert watch.own_s == pytest.approx(own_s, abs=1.0)


@pytest.mark.parametrize("sign", ["SIGKILL", "SIGTERM"])
def test_a_child_that_was_killed_is_told_apart(tmp_path: Path, sign: str) -> None:
    program = f"import os, signal; os.kill(os.getpid(), signal.{sign})"
    assert run_child([sys.executable, "-S", "-c", program], tmp_path, tmp_path, Patience())[0] == "killed"
    assert run_child([sys.executable, "-S", "-c", "exit(9)"], tmp_path, tmp_path, Patience())[0] == "over"


@pytest.mark.parametrize(("ended", "field"), [("killed", "unsettled"), ("over", "problem")])
def test_a_run_whose_computing_again_was_killed_is_not_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: str, field: str
) -> None:
    ends = Ends(monkeypatch, (ended, 1.0))
    grading: Any = SimpleNamespace(_data_root=None)
    answers, rest = grade._Grading._answers(grading, [tmp_path / str(at) for at in range(10)])
    assert answers == {}
    assert [bool(rest.unsettled), bool(rest.problem)] == [field == "unsettled", field == "problem"]
    (given,) = ends.patiences
    assert given.cpu_s == 10 * (again.LIMIT_S + again.MORE_S)
    assert given.wall_s == given.cpu_s + own_code.BUSY_S, "ten long runs of an idle machine would make it a busy one"


def test_an_error_of_this_machine_is_seen_behind_those_of_one_line(tmp_path: Path) -> None:
    def through_the_opening_of_a_pack(number: int) -> InputError:
        with pytest.raises(InputError) as caught, packed.writing_to(tmp_path):
            raise OSError(number, os.strerror(number))
        return caught.value

    assert "No space left on device" in lacking(through_the_opening_of_a_pack(errno.ENOSPC))
    assert lacking(through_the_opening_of_a_pack(errno.ENOENT)) == ""
    assert "memory" in lacking(MemoryError())
    assert lacking(ValueError("it is too long")) == ""


@pytest.mark.parametrize(
    ("error", "points", "outcomes"),
    [(MemoryError(), 40.0, {"not settled", "by hand"}), (ValueError("odd"), 0.0, {"wrong"})],
)
def test_what_this_machine_cannot_grade_has_its_points_and_a_flag(
    lab: LabFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, points: float, outcomes: set[str]
) -> None:
    hand_in(lab, tmp_path / "ana.lab.zip")

    def fails(*words: Any) -> None:
        raise error

    monkeypatch.setattr(grade, "_changed", fails)
    template = tmp_path / "labs/mini"
    with (template / "lab.toml").open("a") as file:
        file.write('\n[[tasks]]\nname = "why"\nkind = "answer"\nabout = "Why?"\npoints = 10\n')
    graded = grade.grade(tmp_path / "ana.lab.zip", definition.read(template), template)
    assert graded.points == points
    assert {mark.outcome for mark in graded.marks} == outcomes
    assert len(graded.flags) == 1
    assert not graded.right
    assert "tested again" not in pages.page(graded)


def test_a_full_disk_is_not_the_students(cli: Cli, small_disk: Path) -> None:
    """A real one, with room for little more than what says that it can be written to."""
    wrong.write_labs(cli.folder / "labs")
    made = make(str(cli.folder / "labs/mini"), cli.folder / "ana", "Ana Li")
    (made.path / "long.py").write_text("# text\n" * 100_000)
    hand_in(made, cli.folder / "ana.lab.zip")
    (small_disk / "full").write_bytes(bytes((8 << 20) - (256 << 10)))
    words = ("lab", "check", "--lab", "labs/mini", "ana.lab.zip", "--json")
    full = json.loads(cli(*words, TMPDIR=str(small_disk)).stdout)[0]
    assert "No space left on device; grade it again" in full["flags"][0]
    assert {mark["outcome"] for mark in full["marks"]} == {"not settled"}
    assert full["points"] == 40
    assert json.loads(cli(*words).stdout)[0]["points"] == 0, "nothing was measured"


# ---- a reference that fails, or is not there


class Racer:
    """A contender that does not start."""

    whole_steps = 1

    def __init__(self, name: str, fails: bool) -> None:
        self.name, self._fails = name, fails

    def start(self, number: int) -> None:
        pass

    def ready(self) -> None:
        if self._fails:
            raise ContenderFailed("it was ended")

    def take(self, lead: int, steps: int) -> Any:
        raise AssertionError("there is nobody to race against")

    def end(self) -> None:
        pass


def test_a_kernel_that_hangs_in_its_race_alone_is_ended_by_a_clock_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "ANSWER_S", 1.0)
    (tmp_path / "kernel.py").write_text("import time\ndef conv_relu(x, weight, bias):\n    time.sleep(600)\n")
    contender = kernel.Called(YOURS, str(tmp_path / "kernel.py"), "conv_relu")
    contender.start(1)
    try:
        contender.ready()
        with pytest.raises(ContenderFailed, match="did not answer"):
            contender.take(1, 1)
    finally:
        contender.end()


def test_a_reference_that_fails_is_flagged() -> None:
    speed = raced([Racer(REFERENCE, True), Racer(YOURS, False)], 1.0)
    assert speed == Speed(unmeasured="the reference failed: it was ended")
    assert not speed.loses(0.5)
    assert raced([Racer(REFERENCE, False), Racer(YOURS, True)], 1.0).failed == "it was ended"


def test_a_lab_that_grades_speed_has_a_reference(cli: Cli) -> None:
    folder = cli.folder / "fast"
    folder.mkdir()
    (folder / "lab.toml").write_text((KERNEL / "lab.toml").read_text())
    (folder / "kernel.py").write_text("")
    make(str(folder), cli.folder / "ana", "Ana Li")  # a student needs none
    said = (
        "task 'kernel' grades speed, and there is no reference_kernel.py to race against: add it, or take out 'speed'"
    )
    assert said in cli.error("lab", "check", "ana", "--lab", "fast", code=2)
    (folder / "reference_kernel.py").write_text("")
    assert definition.read_template(folder).task("kernel").speed


# ---- whose it is


def test_folders_that_nobody_has_put_a_name_on_do_not_cancel_each_other(cli: Cli) -> None:
    wrong.write_labs(cli.folder / "labs")
    for name in ("ana", "ben"):
        (cli.folder / name).mkdir()
        make(str(cli.folder / "labs/mini"), cli.folder / name / "mini", "")
    result = cli("lab", "check", "ana/mini", "ben/mini", "--lab", "labs/mini", "-o", "grades", "--json")
    table = list(csv.DictReader((cli.folder / "grades/class.csv").read_text().splitlines()))
    assert [(row["student"], row["file"], row["counts"], row["look at"]) for row in table] == [
        ("ana/mini", "mini", "yes", ""),
        ("ben/mini", "mini", "yes", ""),
    ]
    assert [graded["file"] for graded in json.loads(result.stdout)] == ["ana/mini", "ben/mini"]
    assert sorted(path.parent.name for path in (cli.folder / "grades").glob("*/page.html")) == ["ana-mini", "ben-mini"]
    older, newer = (Graded("mini", "mini", "mini", begun=str(at), named=False, created=at) for at in range(2))
    find_copies([older, newer])
    assert [older.flags, newer.flags] == [[], []]
    assert older.counts == newer.counts == "yes"


def test_who_counts_of_two_with_one_name_is_for_the_teacher_to_say() -> None:
    older, newer = (
        Graded(f"{at}.zip", name, "mini", marks=[Mark("one", "right", 10.0, 10.0)], begun=str(at), created=at)
        for at, name in enumerate(("Ana Li", "ana  li"))
    )
    find_copies([older, newer])
    for graded, other in ((older, newer), (newer, older)):
        assert graded.flags == [
            f"{other.file} has the same name and is of another folder: decide which of them counts, or both"
        ]
        assert graded.points == 10.0
        assert pages.document(graded)["counts"] == f"to decide: {other.file} has the same name"
    rows = list(csv.DictReader(io.StringIO(pages.class_csv([older, newer]))))
    assert [row["counts"] for row in rows] == [
        "to decide: 1.zip has the same name",
        "to decide: 0.zip has the same name",
    ]


# ---- what is said


@pytest.mark.parametrize(
    ("tested", "said"),
    [
        ({}, None),
        ({"one": True, "two": True}, "records of every step, and model.pt was tested again."),
        ({"one": True, "two": False}, "records of every step; model.pt was not tested again of two."),
    ],
)
def test_a_page_says_what_was_computed_again(tested: dict[str, bool], said: str | None) -> None:
    text = pages.page(Graded("a.zip", "Ana", "mini", tested=tested))
    assert (said in text) if said else ("tested again" not in text)


def test_files_that_were_changed_taken_out_or_added_are_told_apart(lab: LabFolder, tmp_path: Path) -> None:
    for name in ("changed.py", "lost.py", "same.py"):
        (lab.path / name).write_text("")
    hand_in(lab, tmp_path / "ana.lab.zip")

    def change(found: wrong.Members) -> None:
        found["lab/changed.py"] += b"# repaired\n"
        found["lab/added.py"] = found.pop("lab/lost.py")

    file = wrong.forged(tmp_path / "ana.lab.zip", tmp_path / "forged.lab.zip", change, clever=False)
    with submission(file) as handed:
        assert grade._changed(handed) == {
            "added.py": "is not what was handed in: the ledger has no SHA-256 of it",
            "changed.py": "is not what was handed in: the ledger has another SHA-256 of it",
            "lost.py": "was handed in, and is missing: the ledger has its SHA-256",
        }
