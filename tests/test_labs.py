"""Labs without a long computation: the ledger, what students may do and when, hand-ins, and what is said about wrong input."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import lab_solver
import lab_submissions as wrong
from lockstep import offered
from lockstep.errors import DataError, InputError
from lockstep.lab import again, chain, definition, figures, folder, inspect, own_code, pages
from lockstep.lab.chain import Chain
from lockstep.lab.copies import find_copies
from lockstep.lab.figures import Measured
from lockstep.lab.folder import LabFolder, make
from lockstep.lab.grade import _other_names
from lockstep.lab.graded import Graded, Mark
from lockstep.lab.hand_in import hand_in, is_unpacked, pack_again, submission
from lockstep.lab.inspect import fits
from lockstep.lab.own_code import Allowance, Speed, Verdict, run_child
from lockstep.lab.patience import Patience
from lockstep.lab.trials import strategy
from lockstep.measure.records import ROW
from lockstep.offered import Offer
from lockstep.plan import plan
from lockstep.process import PARENT, stat_fields
from lockstep.reading import read_end
from lockstep.recipe import EarlyStopping, Optimizer
from lockstep.resolve import resolve
from lockstep.run import Options, Run, Spec
from lockstep.turns import guard
from support import Cli


@pytest.fixture
def lab(tmp_path: Path) -> LabFolder:
    wrong.write_labs(tmp_path / "labs")
    return make(str(tmp_path / "labs/mini"), tmp_path / "ana", "Ana Li")


def grown(path: Path) -> Chain:
    made = Chain([])
    made.append(path, "lab", nonce=chain.nonce())
    made.append(path, "prediction", task="speedup", value=1.5)
    made.append(path, "start", task="one", run="one-1")
    made.append(path, "run", task="one", run="one-1")
    return made


def test_a_ledger_that_was_only_appended_to_has_no_problem(tmp_path: Path) -> None:
    made = grown(tmp_path / "ledger.jsonl")
    again = Chain.read(tmp_path / "ledger.jsonl")
    assert again.records == made.records
    assert again.problems() == []


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("how", ["changed", "taken out", "doubled", "cut"])
def test_every_other_change_of_a_ledger_is_found(tmp_path: Path, at: int, how: str) -> None:
    path = tmp_path / "ledger.jsonl"
    grown(path)
    lines = path.read_text().splitlines()
    if how == "changed":
        record = json.loads(lines[at])
        record["body"]["task"] = "other"
        lines[at] = json.dumps(record)
    elif how == "taken out":
        del lines[at]
        if at == 3:  # without its end it is a ledger still: docs/labs.md says what that cannot prove
            path.write_text("\n".join(lines))
            assert Chain.read(path).problems() == []
            return
    elif how == "doubled":
        lines.insert(at, lines[at])
    else:
        lines[at] = lines[at][:-20]
        path.write_text("\n".join(lines))
        with pytest.raises(InputError, match=f"line {at + 1}"):
            Chain.read(path)
        return
    path.write_text("\n".join(lines))
    assert Chain.read(path).problems()


def test_the_seed_hangs_on_the_predictions_and_not_on_the_runs(tmp_path: Path) -> None:
    made = grown(tmp_path / "ledger.jsonl")
    seed = made.seed()
    assert made.seed(2) == made.seed(4) == seed
    assert made.seed(1) != seed
    made.append(tmp_path / "ledger.jsonl", "prediction", task="speedup", value=1.6)
    assert made.seed() != seed
    assert made.seed(4) == seed
    assert grown(tmp_path / "other.jsonl").seed() != seed, "two students have the same seed"


def test_predictions_come_first(lab: LabFolder) -> None:
    with pytest.raises(InputError, match="lockstep lab predict speedup=NUMBER"):
        lab.measure("one", (), lambda _: None)
    lab.predict({"speedup": 1.5})
    lab.predict({"speedup": 1.6})  # not measured yet
    lab.chain.append(lab.ledger, "start", task="one", run="one-1")
    with pytest.raises(InputError, match="too late to predict it, since 'one' was measured already"):
        lab.predict({"speedup": 1.7})
    assert lab.predicted("speedup") == 1.6


def test_nothing_is_added_to_a_broken_ledger(lab: LabFolder) -> None:
    lab.predict({"speedup": 1.5})
    lab.ledger.write_text(lab.ledger.read_text().replace("1.5", "1.8"))
    with pytest.raises(InputError, match="it was changed"):
        LabFolder(lab.path).predict({"speedup": 1.9})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lab", "new", "device"), "no lab 'device': there are batches, devices"),
        (("lab", "new", "devices", "here"), "here is there already"),
        (("lab", "status", "--folder", "empty"), "is not a lab: it has no lab.toml"),
        (("lab", "predict", "speedup=fast", "--folder", "ana"), "'speedup=fast' is not TASK=NUMBER"),
        (("lab", "predict", "speedup=nan", "--folder", "ana"), "give a finite number"),
        (("lab", "predict", "one=1", "--folder", "ana"), "has no predict 'one'; there are speedup"),
        (("lab", "run", "three", "--folder", "ana"), "has no run 'three'; there are one and two"),
        (("lab", "run", "one", "ranks=4", "--folder", "ana"), "task 'one' states its settings; it leaves nothing open"),
        (("lab", "hand-in", "--folder", "ana", "-o", "no/such/place.zip"), "there is no folder"),
        (("lab", "check", "nothing.lab.zip"), "no such file; 'lockstep lab hand-in' writes one"),
        (("lab", "check", "ana", "typo.lab.zip", "-o", "grades"), "typo.lab.zip: no such file"),
        (("lab", "check", "text.lab.zip"), "not a hand-in of a lab, or cut off"),
        (("lab", "check", "--lab", "none", "text.lab.zip"), "no lab 'none'"),
        (("lab", "check", "--lab", "none", "text.lab.zip", "-o", "grades"), "no lab 'none'"),
    ],
)
def test_wrong_input_is_one_line(cli: Cli, words: tuple[str, ...], said: str) -> None:
    wrong.write_labs(cli.folder / "labs")
    made = make(str(cli.folder / "labs/mini"), cli.folder / "ana", "")
    if words[1] == "run":
        made.predict({"speedup": 1.0})
    for name in ("here", "empty"):
        (cli.folder / name).mkdir()
    (cli.folder / "text.lab.zip").write_text("My laptop broke.")
    before = sorted(cli.folder.rglob("*"))
    assert said in cli.error(*words, code=2)
    assert sorted(cli.folder.rglob("*")) == before


def test_a_hand_in_needs_a_name(cli: Cli) -> None:
    wrong.write_labs(cli.folder / "labs")
    make(str(cli.folder / "labs/mini"), cli.folder / "ana", "")
    assert "--student" in cli.error("lab", "hand-in", "--folder", "ana", code=2)
    assert not list(cli.folder.glob("*.zip"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "nap"}, "Invalid enum value"),
        ({"figure": "speed"}, "there are images_per_second"),
        ({"over": "three"}, "there is no run 'three'"),
        ({"minus": "one"}, "at most one of 'over' and 'minus'"),
        ({"name": "one"}, "two tasks are called 'one'"),
    ],
)
def test_a_lab_that_is_wrong_says_so(tmp_path: Path, change: dict[str, str], said: str) -> None:
    text = wrong.LAB
    for key, value in change.items():
        old = next(
            (line for line in text.splitlines() if line.startswith(f"{key} =") and line != 'name = "mini"'), None
        )
        text = (
            text.replace(old, f'{key} = "{value}"', 1)
            if old
            else text.replace('over = "one"', f'over = "one"\n{key} = "{value}"', 1)
        )
    (tmp_path / "lab.toml").write_text(text)
    with pytest.raises(InputError, match=said):
        definition.read(tmp_path)


def test_from_new_to_checked(cli: Cli) -> None:
    """One run, in a real process: measured, revealed, handed in without a path of this machine, and found right."""
    (cli.folder / "lab").mkdir()
    (cli.folder / "lab/lab.toml").write_text(wrong.of_one_run())
    file = lab_solver.solved(cli, "lab", "Ana Li", "ana")
    with submission(file) as handed:
        assert handed.student == "Ana Li"
        assert [record.kind for record in handed.chain.records] == ["lab", "prediction", "start", "run", "hand-in"]
        assert handed.run("one-1").spec().recipe.seed == handed.chain.seed(2)
    here = str(cli.folder).encode()
    assert not [name for name, data in wrong.members(file).items() if here in data]
    result = cli("lab", "check", "--lab", "lab", str(file))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "30 of 30 points" in result.stdout
    (cli.folder / "ana/answers.toml").write_text("[claims]\naccuracy = 1\n")
    own = cli("lab", "check", "ana")
    assert "--lab FOLDER grades by yours" in own.stderr
    assert "is not what was handed in" not in own.stdout, "a folder may change"
    status = cli("lab", "status", "--folder", "ana")
    assert "predicted 1.5 images/s, measured" in status.stdout
    assert re.search(r"there; the records say [\d.]+ %", " ".join(status.stdout.split()))


def test_a_hand_in_that_was_unpacked_is_opened_with_the_same_checks(lab: LabFolder, tmp_path: Path) -> None:
    hand_in(lab, tmp_path / "ana.lab.zip")
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(tmp_path / "ana.lab.zip") as archive:
        archive.extractall(folder)
    assert is_unpacked(folder)
    assert not is_unpacked(lab.path)
    pack_again(folder, tmp_path / "again.zip")
    with submission(tmp_path / "again.zip") as handed:
        assert handed.student == "Ana Li"
        assert handed.chain.records == lab.chain.records
    (folder / "lab/answers.toml").write_text("[claims]\n")
    pack_again(folder, tmp_path / "changed.zip")
    with pytest.raises(InputError, match="not of the size"), submission(tmp_path / "changed.zip"):
        pass
    (folder / "lab/link.py").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match="a link"):
        pack_again(folder, tmp_path / "linked.zip")


@pytest.mark.parametrize("what", ["a folder of something else", "a link", "an odd name", "no ledger", "a text"])
def test_what_cannot_be_graded_has_a_page_and_a_document(cli: Cli, what: str) -> None:
    """As Gradescope calls it, which reads no exit code."""
    wrong.write_labs(cli.folder / "labs")
    made = make(str(cli.folder / "labs/mini"), cli.folder / "ana", "Ana Li")
    upload = cli.folder / "submission"
    said = "is not a lab"
    if what == "a text":
        upload.write_text("My laptop broke.")
        said = "not a hand-in of a lab"
    elif what == "no ledger":
        shutil.copytree(made.path, upload)
        (upload / "ledger.jsonl").write_text('{"number": 0}\n')
        said = "ledger.jsonl, line 1"
    else:
        upload.mkdir()
        (upload / "essay.txt").write_text("My laptop broke.")
    if what in ("a link", "an odd name"):
        hand_in(made, cli.folder / "ana.lab.zip")
        with zipfile.ZipFile(cli.folder / "ana.lab.zip") as archive:
            archive.extractall(upload)
        odd = upload / ("lab/link.py" if what == "a link" else "lab/a\\b.py")
        odd.symlink_to("/etc/hostname") if what == "a link" else odd.write_text("")
        said = "a link, or a name that no file of a hand-in has"
    result = cli("lab", "check", "submission", "--lab", "labs/mini", "-o", "grades")
    assert result.returncode == 3, result.stderr
    (path,) = (cli.folder / "grades").glob("*/results.json")
    document = json.loads(path.read_text())
    assert document["score"] == 0
    assert said in document["output"]
    assert "\n" not in document["output"]
    assert [test["max_score"] for test in document["tests"]] == [10.0] * 4
    assert said in (path.parent / "page.html").read_text()


def test_a_hand_in_does_not_name_the_lab_that_it_is_graded_by(cli: Cli) -> None:
    """Not by a name that is the path of its student's own lab.toml, either."""
    wrong.write_labs(cli.folder / "labs")
    made = make(str(cli.folder / "labs/mini"), cli.folder / "ana", "Ana Li")
    hand_in(made, cli.folder / "ana.lab.zip")
    found = wrong.members(cli.folder / "ana.lab.zip")
    for name in ("mini", str(cli.folder / "labs/mini")):
        found["manifest.json"] = json.dumps({**json.loads(found["manifest.json"]), "lab": name}).encode()
        wrong.write(cli.folder / "ana.lab.zip", found)
        assert "name its folder, --lab FOLDER" in cli.error("lab", "check", "ana.lab.zip", code=2)


def rows(count: int, rank: int = 0, **columns: Any) -> Any:
    made = np.zeros(count, dtype=ROW)
    made["step"], made["epoch"] = np.arange(1, count + 1), 1
    made["samples"], made["total_ns"], made["exchange_ns"] = 8, 2_000_000 + rank * 1_000_000, 500_000
    made["loss_sum"], made["correct"] = 4.0, 6
    for name, values in columns.items():
        made[name] = values
    return made


def test_figures_come_from_the_steps() -> None:
    one, two = Measured([rows(10)], 0.5, 2000), Measured([rows(10), rows(10, 1)], 0.75)
    assert figures.value("step_ms", two) == 3.0, "a step takes as long as its slowest rank"
    assert figures.value("images_per_second", two) == pytest.approx(16 / 0.003)
    assert figures.value("images_per_second", two, over=one) == pytest.approx(4 / 3)
    assert figures.value("exchange_share", two) == pytest.approx((25 + 100 / 6) / 2)
    assert figures.value("train_loss", one) == 0.5
    assert figures.value("gap", one) == 25.0
    assert figures.value("test_accuracy", two, minus=one) == 25.0
    assert figures.value("weights_kb", one) == 2.0
    with pytest.raises(ValueError, match="not tested"):
        figures.value("test_accuracy", Measured([rows(3)], None))


def test_speed_takes_points_only_where_it_is_settled() -> None:
    assert Speed(times=0.4, low=0.35, high=0.45, n=4).slower_than(0.5)
    for open_ in (
        Speed(),
        Speed(n=1, times=0.1),
        Speed(times=0.4, low=0.1, high=0.6, n=4),
        Speed(n=3, times=1.0, low=0.9, high=1.1),
        Speed(failed="it ended"),
    ):
        assert not open_.slower_than(0.5)
        assert open_.loses(0.5) is bool(open_.failed)
    assert "takes no points" in Speed(times=0.4, low=0.1, high=0.6, n=4).sentence(0.5)
    assert "too slow" in Speed(times=0.4, low=0.35, high=0.45, n=4).sentence(0.5)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("while True: pass", "it computed for"),
        ("import time; time.sleep(600)", "neither computed nor waited"),
        ("pass", "over"),
    ],
)
def test_a_child_is_given_up_by_what_it_does(tmp_path: Path, program: str, said: str) -> None:
    patience = Patience(cpu_s=1.0, quiet_s=3.0)
    ended, _ = run_child([sys.executable, "-S", "-c", program], tmp_path, tmp_path, patience)
    assert ended.startswith(said) or said in ended


def test_a_child_that_takes_its_time_is_given_up(tmp_path: Path) -> None:
    """Neither endless nor quiet: it computes a little, again and again."""
    program = "import time\nwhile True: sum(range(1_000_000)); time.sleep(0.05)"
    patience = Patience(own_s=2.0)
    ended, own_s = run_child([sys.executable, "-S", "-c", program], tmp_path, tmp_path, patience)
    assert ended == "it did not come to an end within 2 s"
    assert own_s > 2.0


@pytest.mark.parametrize(("own_s", "tries"), [(3.0, 2), (own_code.JUDGING_S, 1)])
def test_code_that_fails_is_tried_again_where_a_clock_may_have_been_the_cause(
    lab: LabFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_s: float, tries: int
) -> None:
    limits: list[float] = []

    def trial(task: Any, code: Path, whole: Allowance, limit_s: float) -> tuple[Verdict, float]:
        limits.append(limit_s)
        whole.seconds -= own_s
        return Verdict(right=False, failed=True, why="it hangs"), own_s

    monkeypatch.setattr(own_code, "_trial", trial)
    (tmp_path / "ring.py").write_text("")
    whole = Allowance(180.0)
    own_code.judged(definition.read(tmp_path / "labs/ring").task("ring"), tmp_path / "ring.py", whole)
    assert limits == [own_code.JUDGING_S, own_code.JUDGING_S - own_s][:tries]
    assert whole.seconds == 180.0 - own_s * tries


@pytest.mark.parametrize(
    ("left", "each", "races", "said"),
    [
        (180.0, 35.0, 2, "it failed in the race (it ended)"),
        (
            50.0,
            35.0,
            1,
            "it failed in a race (it ended), and the time for the code of this hand-in is over, which takes no",
        ),
        (29.0, 35.0, 0, "not measured: the time for the code of this hand-in is over, which takes no points"),
    ],
)
def test_races_end_with_the_time_of_the_hand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float, each: float, races: int, said: str
) -> None:
    began: list[float] = []

    def trial(task: Any, code: Path, whole: Allowance, limit_s: float, *race: Any) -> tuple[Verdict, float]:
        began.append(limit_s)
        whole.seconds -= each
        return Verdict(right=True, why="", speed=Speed(failed="it ended")), each

    monkeypatch.setattr(own_code, "_trial", trial)
    template = definition.BUILTIN / "kernels"
    task = definition.read(template).task("kernel")
    speed = own_code.raced(task, tmp_path / "kernel.py", template, 30.0, Allowance(left))
    assert len(began) == races
    assert said in speed.sentence(0.5)
    assert speed.loses(0.5) is (races == own_code.RACES)


def test_all_code_of_a_hand_in_has_three_minutes() -> None:
    for name in ("own", "kernels"):
        tasks = definition.read(definition.BUILTIN / name).of_kind(*definition.CODE)
        assert own_code.allowance(tasks, 30.0).seconds == 180.0
    assert own_code.allowance(tasks, 90.0).seconds == 240.0


@pytest.mark.parametrize(
    ("how", "field", "said"),
    [
        ("no data", "unsettled", "data set 'x' is not here"),
        ("too long", "unsettled", "it takes more than 0.05 s of a processor here"),
        ("no disk", "unsettled", "this machine has too little room: No space left on device"),
        ("no memory", "unsettled", "this machine has too little memory"),
        ("no model", "problem", "FileNotFoundError: [Errno 2] No such file or directory"),
        ("wrong", "problem", "ValueError: shapes"),
    ],
)
def test_a_machine_without_data_or_time_is_no_fault_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, field: str, said: str
) -> None:
    def tested(run: Run, answer: again.Answer, data_root: str | None) -> None:
        if how == "no data":
            raise DataError("data set 'x' is not here")
        if how in ("no disk", "no model"):
            number = errno.ENOSPC if how == "no disk" else errno.ENOENT
            raise OSError(number, os.strerror(number))
        if how == "no memory":
            raise MemoryError
        if how == "wrong":
            raise ValueError("shapes")
        while True:
            pass

    monkeypatch.setattr(again, "_test", tested)
    monkeypatch.setattr(again, "LIMIT_S", 0.05)
    before = signal.signal(signal.SIGPROF, again._too_long)
    try:
        answer = again._answer(Run(tmp_path), tmp_path / "scratch", again.Request(runs=[]))
    finally:
        signal.signal(signal.SIGPROF, before)
    assert {"unsettled": answer.unsettled, "problem": answer.problem} == {"unsettled": "", "problem": "", field: said}


def test_what_a_stuck_guard_has_started_is_ended() -> None:
    """Frozen, it does not hear that it is to end."""
    argv = [sys.executable, "-P", guard.__file__, "sleep", "600"]
    process = subprocess.Popen(argv, env={**os.environ, PARENT: str(os.getpid())})
    try:
        until = time.monotonic() + 30
        while not (below := guard.descendants(process.pid)) and time.monotonic() < until:
            time.sleep(0.02)
        (child,) = below
        process.send_signal(signal.SIGSTOP)
    finally:
        guard.end(process, 0.2)
    assert process.returncode == -signal.SIGKILL
    while (state := stat_fields(child.pid)[:1]) not in ([], ["Z"]) and time.monotonic() < until:
        time.sleep(0.02)
    assert state in ([], ["Z"])


def test_code_that_is_not_there_is_missing(lab: LabFolder, tmp_path: Path) -> None:
    template = definition.find(str(tmp_path / "labs/ring"))
    task = definition.read(template).task("ring")
    assert own_code.tried(task, tmp_path / "ring.py", template, 0.0).why == "ring.py is missing"


def test_pages_and_tables_take_any_name(tmp_path: Path) -> None:
    graded = Graded("x.zip", "=HYPERLINK(<b>)", "mini", "<i>Title", [Mark("one", "right", 1.0, 2.0, ["a <b> & c"])])
    graded.flags.append("<script>alert(1)</script>")
    text = pages.page(graded)
    assert "<script>" not in text
    assert "a &lt;b&gt; &amp; c" in text
    table = list(csv.reader(io.StringIO(pages.class_csv([graded]))))
    assert table[1][0] == "'=HYPERLINK(<b>)"
    pages.write([graded, graded], tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*/page.html"))) == 2


def test_a_run_in_two_hand_ins_is_flagged_in_both() -> None:
    ana = Graded(
        "a.zip",
        "Ana",
        "mini",
        marks=[Mark("two", "right", 10.0, 10.0)],
        prints={("two", "two-1"): {"moments 1", "numbers 1"}},
    )
    bob = Graded(
        "b.zip",
        "Bob",
        "mini",
        marks=[Mark("two", "right", 10.0, 10.0)],
        prints={("two", "mine"): {"moments 2", "numbers 1"}},
    )
    cem = Graded(
        "c.zip",
        "Cem",
        "mini",
        marks=[Mark("two", "right", 10.0, 10.0)],
        prints={("two", "two-1"): {"moments 3", "numbers 3"}},
    )
    find_copies([ana, bob, cem])
    assert "run 'mine' of Bob" in ana.flags[0]
    assert "run 'two-1' of Ana" in bob.flags[0]
    assert (ana.points, bob.points, cem.points) == (0.0, 0.0, 10.0)
    assert cem.right


def test_a_second_hand_in_of_one_student_is_no_copy() -> None:
    first, second = (
        Graded(
            f"{at}.zip",
            "Ana",
            "mini",
            marks=[Mark("two", "right", 10.0, 10.0)],
            prints={("two", "two-1"): {"moments 1"}},
            begun="abc",
            created=at,
        )
        for at in (2.0, 1.0)
    )
    find_copies([first, second])
    assert first.right
    assert second.right
    assert first.notes == ["handed in before (1.0.zip): the newer one counts"]
    assert second.notes == ["handed in again later (2.0.zip): the newer one counts"]


def test_the_table_says_which_hand_in_counts() -> None:
    old, new = (
        Graded(f"{at}.zip", name, "mini", begun="abc", created=at) for at, name in enumerate(("Ana Li", "ana  li"))
    )
    find_copies([new, old])
    table = list(csv.DictReader(io.StringIO(pages.class_csv([old, new]))))
    assert [row["counts"] for row in table] == ["no: 1.zip is newer", "yes"]
    assert [pages.document(graded)["counts"] for graded in (old, new)] == ["no: 1.zip is newer", "yes"]


@pytest.mark.parametrize(("outcomes", "points"), [("right wrong", (10.0, 0.0)), ("wrong right", (0.0, 10.0))])
def test_the_run_that_fits_its_ledger_is_the_original(outcomes: str, points: tuple[float, float]) -> None:
    both = [
        Graded(
            f"{name}.zip",
            name,
            "mini",
            marks=[Mark("two", outcome, 10.0 if outcome == "right" else 0.0, 10.0)],
            prints={("two", "two-1"): {"moments 1"}},
        )
        for name, outcome in zip(("Ana", "Bob"), outcomes.split(), strict=True)
    ]
    find_copies(both)
    assert tuple(one.points for one in both) == points
    assert [bool(one.flags) for one in both] == [not found for found in points]


def planned(lab: LabFolder, task: str, **changes: Any) -> Spec:
    """What `lockstep lab run` would train, with something of its recipe or placement changed."""
    recipe, placement, _ = resolve(*lab.lab.settings(lab.lab.task(task, "run")))
    of_recipe = {key: value for key, value in changes.items() if key in recipe.__struct_fields__}
    recipe = replace(recipe, **{"seed": 5, **of_recipe})
    placement = replace(placement, **{key: value for key, value in changes.items() if key not in of_recipe})
    return Spec(
        id=f"{task}-1",
        created=0.0,
        lockstep="0",
        recipe=recipe,
        placement=placement,
        plan=plan(recipe, placement, 703, 501),
        options=Options(),
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"metrics": "/x.py:accuracy"}, "metrics=/x.py:accuracy, and the task asks for metrics=auto"),
        ({"max_steps": 10}, "max_steps=10, and the task asks for max_steps=None"),
        ({"lr_batch": 8}, "lr_batch=8"),
        ({"optimizer": Optimizer(lr=0.005, clip_norm=1.0)}, "optimizer.clip_norm=1.0"),
        ({"fused": True}, "fused=True"),
        ({"strategy": "/x.py:Mine"}, "strategy=/x.py:Mine"),
        ({"launcher": "/x.py:starts"}, "launcher=/x.py:starts"),
        ({"micro_batch": 8}, "micro_batch=8"),
        ({"memory_format": "contiguous"}, None),
    ],
)
def test_a_run_has_to_be_what_its_task_asks_for(lab: LabFolder, changes: dict[str, Any], said: str | None) -> None:
    """What the student's machine decides is the only thing that may differ; what names code may not."""
    task = lab.lab.task("one", "run")
    problems = fits(lab.lab, task, planned(lab, "one", **changes), seed=5)
    assert [said in problem for problem in problems] == [True] if said else problems == []


def test_a_name_that_a_package_offers_is_what_it_stands_for(lab: LabFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Offer("model", "wide", "extras:wide", "extras 1.0")
    monkeypatch.setattr(offered, "offers", lambda kind: (offer,) if kind == "model" else ())
    (lab.path / "lab.toml").write_text(wrong.LAB.replace('words = "ranks=1"', 'words = "ranks=1 model=wide"'))
    asked = definition.read(lab.path)
    task, right = asked.task("one", "run"), planned(lab, "one", model="extras:wide")
    assert fits(asked, task, right, seed=5) == []
    (problem,) = fits(asked, task, planned(lab, "one", model="extras:narrow"), seed=5)
    assert problem == "model=extras:narrow, and the task asks for model=wide"


@pytest.mark.parametrize(
    ("losses", "min_delta", "stopped"),
    [
        ([1.0, 0.5, 0.6, 0.7], 0.0, True),
        ([1.0, 0.5, 0.6, 0.4], 0.0, False),
        ([1.0, 0.99, 0.98], 0.1, True),
        ([1.0, 0.99, 0.98], 0.0, False),
        ([1.0, None, None], 0.0, True),
        ([None, None], 0.0, True),
        ([0.5, 0.5, 0.5], 0.0, True),
    ],
)
def test_early_stopping_is_judged_by_the_rule_of_training(
    lab: LabFolder, losses: list[float | None], min_delta: float, stopped: bool
) -> None:
    spec = planned(lab, "one", early_stopping=EarlyStopping(patience=2, min_delta=min_delta))
    epochs = [{"epoch": at, "test_loss": loss, "test_accuracy": 0.5} for at, loss in enumerate(losses, 1)]
    assert inspect._stopped(spec, epochs) is stopped
    assert not inspect._stopped(planned(lab, "one"), epochs)


def test_the_text_of_a_solution_shows_whose_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(wrong.strategy("right"))
    assert strategy._of_others(str(file), "Mine") == ""
    file.write_text(wrong.BY_LOCKSTEP)
    assert "uses lockstep.strategies.flat.Flat" in strategy._of_others(str(file), "Mine")
    file.write_text("from lockstep.strategies.flat import Flat as Mine\n")
    assert strategy._of_others(str(file), "Mine") == "mine.py defines no class Mine"
    file.write_text("def broken(")
    assert strategy._of_others(str(file), "Mine") == "", "running it says what is wrong"


def test_nobodys_page_is_written_over_anothers(tmp_path: Path) -> None:
    pages.write([Graded(f"{at}.zip", name, "mini") for at, name in enumerate(["ana", "ana", "ana-2"])], tmp_path)
    assert sorted(path.parent.name for path in tmp_path.glob("*/page.html")) == ["ana", "ana-2", "ana-2-2"]


def test_a_folder_is_whose_it_was_when_it_was_handed_in(tmp_path: Path) -> None:
    wrong.write_labs(tmp_path / "labs")
    made = make(str(tmp_path / "labs/mini"), tmp_path / "unnamed", "")
    assert made.student == ""
    hand_in(made, tmp_path / "one.lab.zip", "Ana Li")
    assert made.student == "Ana Li"
    hand_in(made, tmp_path / "two.lab.zip", "Dora")
    with submission(tmp_path / "one.lab.zip") as first, submission(tmp_path / "two.lab.zip") as second:
        assert _other_names(first) == []
        assert _other_names(second) == ["its ledger names somebody else: Ana Li"]


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(b"x" * (1 << 20) + b"\nthe end")
    assert len(read_end(tmp_path / "log.txt")) == 1 << 16
    assert read_end(tmp_path / "log.txt").endswith("\nthe end")
    (tmp_path / "log.txt").write_bytes(b"short")
    assert read_end(tmp_path / "log.txt") == "short"


def test_a_child_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "LARGEST_FILE", 1 << 20)
    program = "while True: print('x' * 1000)"
    ended, _ = run_child([sys.executable, "-S", "-c", program], tmp_path, tmp_path, Patience(cpu_s=20.0))
    assert ended == "over"
    assert (tmp_path / own_code.LOG).stat().st_size == 1 << 20


def test_answers_that_are_not_toml_are_a_note(tmp_path: Path) -> None:
    (tmp_path / "answers.toml").write_text("claims = [")
    claims, answers, problems = folder.read_answers(tmp_path / "answers.toml")
    assert (claims, answers) == ({}, {})
    assert "is not TOML" in problems[0]
    (tmp_path / "answers.toml").write_text('[claims]\na = "much"\nb = 2\n[answers]\nc = " "\n')
    claims, answers, problems = folder.read_answers(tmp_path / "answers.toml")
    assert (claims, answers) == ({"b": 2.0}, {})
    assert problems == ["answers.toml: claims.a is not a number"]
