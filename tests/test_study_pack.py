"""A study as one file: packed, unpacked elsewhere, read as a native one; and packs that somebody made to do harm."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.folders import run_folder, study_folder
from lockstep import index
from lockstep.cli import packing as packing_command
from lockstep.dashboard.listing import Listing, Query
from lockstep.errors import InputError
from lockstep.measure.records import read_steps
from lockstep.measure.view import RunView
from lockstep.report.document import report
from lockstep.report.subject import of_study
from lockstep.run import Run, append_line
from lockstep.study import pack as packing
from lockstep.study import packed as checking
from lockstep.study import plan, timing
from lockstep.study.compare import study_document
from lockstep.study.folder import StudyFolder
from lockstep.study.pack import ENDING, LARGEST_LOG, MANIFEST, Packed, pack
from lockstep.study.private_paths import PrivatePaths
from lockstep.study.unpack import unpack
from support import Cli, empty_cache

STUDIES = Path(__file__).parents[1] / "docs/studies"
Members = dict[str, bytes]
Sound = tuple[Path, bytes, dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        empty_cache(tmp_path_factory.mktemp("cache"), patch)
        yield


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """A folder with a study in it, its pack, and what the study says."""
    place = tmp_path_factory.mktemp("sound")
    study = study_folder(place / "runs", repeats=1)
    pack(study, place / "p.zip", created=1.7e9)
    return place, (place / "p.zip").read_bytes(), study_document(study)


@pytest.fixture
def study(sound: Sound, tmp_path: Path) -> StudyFolder:
    """The study, to be changed."""
    shutil.copytree(sound[0] / "runs", tmp_path / "here" / "runs")
    return StudyFolder(tmp_path / "here" / "runs" / "studies" / "mine")


@pytest.fixture
def file(sound: Sound, tmp_path: Path) -> Path:
    """Its pack, to be changed."""
    (tmp_path / "mine.study.zip").write_bytes(sound[1])
    return tmp_path / "mine.study.zip"


def packed(study: StudyFolder, tmp_path: Path) -> tuple[Packed, Members]:
    done = pack(study, tmp_path / "p.study.zip", created=1.7e9)
    return done, members(tmp_path / "p.study.zip")


def members(file: Path) -> Members:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that is below a folder, but for the index, which any reader may write."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if not path.name.startswith(index.NAME)
    }


def first_run(study: StudyFolder) -> Run:
    return next(Run(study.runs / names[0]) for names in study.started().values())


# ---------------------------------------------------------------- there and back


def test_without_steps_it_is_small_and_says_the_same(tmp_path: Path) -> None:
    study = study_folder(tmp_path / "runs", repeats=3)
    whole, small = (pack(study, tmp_path / f"{steps}.study.zip", steps=steps) for steps in (True, False))
    assert small.runs == whole.runs
    with zipfile.ZipFile(tmp_path / "False.study.zip") as archive:
        assert not [name for name in archive.namelist() if name.endswith((".bin", ".log")) or "tfevents" in name]
    other = StudyFolder(Path(unpack(tmp_path / "False.study.zip", tmp_path / "elsewhere").folder))
    assert study_document(other) == study_document(study)
    drawn = msgspec.json.encode(report([of_study(other)])).decode()
    assert "damaged" not in drawn


def test_a_study_reads_elsewhere_as_at_home(tmp_path: Path) -> None:
    study = study_folder(tmp_path / "runs", repeats=3)
    before = study_document(study)
    pack(study, tmp_path / "mine.study.zip")
    found = unpack(tmp_path / "mine.study.zip", tmp_path / "elsewhere")
    other = StudyFolder(Path(found.folder))
    assert (found.study, found.runs, found.new_runs, found.is_new) == ("mine", 6, 6, True)
    assert study_document(other) == before
    assert other.read() == study.read()
    for names in study.started().values():
        run, there = RunView(study.runs / names[0]), RunView(other.runs / names[0])
        assert there.epochs() == run.epochs()
        assert there.ways() == run.ways()
        assert there.environment() == run.environment()
        assert there.failures() == run.failures()
        assert not there.damage()
        assert not there.rank_damage()
        for rank in range(run.ranks):
            steps = [read_steps(one.rank_folder(rank) / "steps.bin") for one in (run, there)]
            assert len(steps[0])
            assert (steps[0] == steps[1]).all()


def test_lists_have_it(study: StudyFolder, file: Path, tmp_path: Path) -> None:
    unpack(file, tmp_path / "there")
    assert index.rows(tmp_path / "there") == index.rows(study.runs)
    here, there = (Listing(root).view(Query()) for root in (study.runs, tmp_path / "there"))
    assert here["rows"] == there["rows"]
    assert [{**line, "changed": 0} for line in there["studies"]] == [{**line, "changed": 0} for line in here["studies"]]


def test_every_command_reads_it(file: Path, cli: Cli) -> None:
    done = cli("study", "unpack", str(file), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(cli.runs / "studies" / "mine")
    for words in (
        ["study", "show", "mine", "--json"],
        ["compare", "mine", "--json"],
        ["report", "mine", "-o", "page.html"],
        ["export", "mine", "--what", "steps", "-o", "steps.csv"],
        ["study", "pack", "mine", "-o", "again.zip", "--json"],
    ):
        result = cli(*words)
        assert result.returncode == 0, (words, result.stderr)
    assert (cli.folder / "page.html").stat().st_size > 10_000
    assert len((cli.folder / "steps.csv").read_text().splitlines()) == 1 + 96 * 3
    # Packed again, it is the same study.
    again, first = members(cli.folder / "again.zip"), members(file)
    assert again.pop(MANIFEST) != first.pop(MANIFEST)  # created
    assert again == first
    result = cli("study", "unpack", str(file))
    assert result.returncode == 0
    assert "study 'mine' was there already, with the same content" in result.stderr


def test_the_same_content_gives_the_same_bytes(study: StudyFolder, tmp_path: Path) -> None:
    for name in ("a.zip", "b.zip"):
        pack(study, tmp_path / name, created=1.7e9)
        for path in study.runs.rglob("*.json"):  # times of files do not count
            os.utime(path, (1, 1))
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    pack(study, tmp_path / "c.zip", created=1.8e9)
    first, later = members(tmp_path / "a.zip"), members(tmp_path / "c.zip")
    manifests = [json.loads(each.pop(MANIFEST)) for each in (first, later)]
    assert first == later
    assert [manifest.pop("created") for manifest in manifests] == [1.7e9, 1.8e9]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("file", sorted(STUDIES.glob("*.study.zip")), ids=lambda file: str(file.name))
def test_a_race_of_an_earlier_version_still_counts(file: Path, tmp_path: Path) -> None:
    """A field that was added since must not make another race or another training of it (study/plan.py: NEWER)."""
    study = StudyFolder(Path(unpack(file, tmp_path).folder))
    cells = [cell for cell in study.read().cells if cell.plan]
    assert [plan._digest(plan._mathematics(cell)) for cell in cells] == [cell.mathematics for cell in cells]
    if (study.path / timing.STATE).exists():
        assert timing.read(study, study.read()) is not None


# ---------------------------------------------------------------- what is in it


def test_records_are_packed_and_weights_are_not(study: StudyFolder, tmp_path: Path) -> None:
    run = first_run(study)
    weights = os.urandom(1 << 20)
    for name in ("model.pt", "checkpoints/step-1.pt", "checkpoints/step-1.json", "data/train.json", "proof/rank.jsonl"):
        (run.folder / name).parent.mkdir(exist_ok=True)
        (run.folder / name).write_bytes(weights)
    (run.folder / "quantized").mkdir()
    (run.folder / "quantized" / "model.onnx").write_bytes(weights)
    (run.folder / "own-file-of-a-loop").write_bytes(weights)
    (run.folder / "tensorboard").mkdir()
    (run.folder / "tensorboard" / "events.out.tfevents.1.2.lockstep").write_bytes(b"events")
    (run.rank_folder(0) / "log.txt").write_text("said\n")
    (study.path / "lock").write_text("1")
    for name in (
        "starts/0/run.json",
        "deeper/still/more.jsonl",
        "race.json",
        "windows.jsonl",
        ".hidden",
        "weights.pth",
    ):
        (study.path / name).parent.mkdir(parents=True, exist_ok=True)
        (study.path / name).write_bytes(b"{}")
    done, inside = packed(study, tmp_path)
    own = {name.removeprefix(f"runs/{run.id}/") for name in inside if name.startswith(f"runs/{run.id}/")}
    assert own >= {
        "run.json",
        "status.json",
        "summary.json",
        "epochs.jsonl",
        "environment.json",
        "explain/ways/ways.json",
    }
    assert own >= {
        f"ranks/0000/{name}" for name in ("steps.bin", "trace.json", "operators.json", "log.txt", "failure.json")
    }
    assert "tensorboard/events.out.tfevents.1.2.lockstep" in own
    assert {name for name in inside if name.startswith("study/")} == {
        f"study/{name}"
        for name in ("study.json", "log.jsonl", "starts.jsonl", "deeper/still/more.jsonl", "race.json", "windows.jsonl")
    }
    assert not any(weights[:100] in data for data in inside.values())
    assert not [name for name in inside if name.endswith((".pt", ".pth", ".onnx"))]
    assert done.runs == 2
    assert not done.left_out
    assert done.bytes < 40_000
    listed = {each["name"]: each for each in json.loads(inside.pop(MANIFEST))["members"]}
    assert {name: (each["size"], each["sha256"]) for name, each in listed.items()} == {
        name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in inside.items()
    }


def test_what_cannot_be_packed_is_named(study: StudyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = first_run(study)
    (run.rank_folder(0) / "log.txt").write_bytes(b"x" * (LARGEST_LOG + 1))
    (run.folder / "big.json").write_bytes(b"x" * 300_000)
    (run.folder / "link.json").symlink_to("/etc/hostname")
    (run.folder / "a:b.json").write_text("{}")
    (study.path / "linked").symlink_to(tmp_path)
    os.mkfifo(run.rank_folder(0) / "orders")
    os.mkfifo(run.folder / "pipe.json")
    monkeypatch.setattr(packing, "LARGEST_MEMBER", 299_999)
    done, inside = packed(study, tmp_path)
    prefix = f"runs/{run.id}"
    reasons = {name.removeprefix(prefix): why for name, why in done.left_out.items()}
    assert reasons == {
        "/a:b.json": "a name that a pack cannot have",
        "/big.json": "0.3 MB are too much for a pack",
        "/link.json": "a link",
        "/ranks/0000/log.txt": "0.3 MB are too much for a pack",
        "study/linked": "a link",
    }
    assert not any(name.endswith(("link.json", "pipe.json", "orders", "log.txt", "linked")) for name in inside)
    assert unpack(tmp_path / "p.study.zip", tmp_path / "there").runs == 2


def test_a_run_that_is_a_link_or_lost_its_spec_is_left_out(study: StudyFolder, tmp_path: Path) -> None:
    one, two = (Run(study.runs / names[0]) for names in study.started().values())
    one.folder.rename(tmp_path / "moved")
    one.folder.symlink_to(tmp_path / "moved")
    (two.folder / "run.json").unlink()
    (two.folder / "run.json").mkdir()
    done, inside = packed(study, tmp_path)
    assert done.left_out == {f"runs/{one.id}": "a link", f"runs/{two.id}": "its run.json cannot be packed"}
    assert not [name for name in inside if name.startswith("runs/")]


def test_runs_under_way_are_packed_as_they_are(study: StudyFolder, tmp_path: Path) -> None:
    first_run(study).write_status("running")
    with (study.path / "log.jsonl").open("a") as log:
        log.write('{"cell": "one", "rep')  # cut off by a kill
    done, _ = packed(study, tmp_path)
    assert done.under_way == 1
    found = unpack(tmp_path / "p.study.zip", tmp_path / "there")
    assert Run(tmp_path / "there" / first_run(study).id).recorded_status()["state"] == "running"
    assert study_document(StudyFolder(Path(found.folder)))["cells"]


def test_damaged_studies_are_not_packed(study: StudyFolder, tmp_path: Path) -> None:
    (study.path / "study.json").write_text("{")
    with pytest.raises(InputError, match=r"study.json"):
        pack(study, tmp_path / "p.zip")
    (study.path / "study.json").unlink()
    (study.path / "study.json").symlink_to("/etc/hostname")
    with pytest.raises(InputError):
        pack(study, tmp_path / "p.zip")
    assert not list(tmp_path.glob("*.zip"))


def test_limits_hold_for_packing_too(study: StudyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MOST_MEMBERS", "LARGEST_CONTENT"):
        with monkeypatch.context() as changed:
            changed.setattr(packing, limit, 10)
            with pytest.raises(InputError, match="split the study"):
                pack(study, tmp_path / "p.zip")
    assert not list(tmp_path.glob("*zip*"))
    assert not list(tmp_path.glob(".tmp-*"))


# ---------------------------------------------------------------- private paths


def test_private_paths_stay_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "zoé"
    monkeypatch.setenv("HOME", str(home))
    study = study_folder(home / "lab" / "runs", repeats=1)
    run, old = first_run(study), "/mnt/earlier/runs"
    content = json.loads((run.folder / "run.json").read_text())
    content["command"] = [["env", f"PYTHONPATH={home}/src", "/opt/secret/bin/python3.11", "-m", "x", f"{old}/{run.id}"]]
    content["options"]["data_root"] = str(home)
    content["data_origin"] = f"found in {home}/data"
    (run.folder / "run.json").write_text(json.dumps(content))
    append_line(study.path / "log.jsonl", {"cause": f"line\n{study.runs}/x: no file", "digest": "0", "run": run.id})
    (run.rank_folder(0) / "log.txt").write_text(
        f'File "/opt/secret/lib/x.py"\n{home}\n{home}-2\n{old}/a\n', encoding="utf-8"
    )
    before = study_document(study)
    _, inside = packed(study, tmp_path)
    for name, data in inside.items():
        for word in (str(home), json.dumps(str(home))[1:-1], "/opt/secret", "/mnt/earlier"):
            assert word.encode() not in data.replace(f"{home}-2".encode(), b""), name
    spec = json.loads(inside[f"runs/{run.id}/run.json"])
    assert spec["command"] == [["env", "PYTHONPATH=~/src", "env/bin/python3.11", "-m", "x", f"runs/{run.id}"]]
    assert (spec["options"]["data_root"], spec["data_origin"]) == ("~", "found in ~/data")
    text = inside[f"runs/{run.id}/ranks/0000/log.txt"].decode()
    assert text == f'File "env/lib/x.py"\n~\n{home}-2\nruns/a\n'
    assert json.loads(inside["study/log.jsonl"].splitlines()[-1])["cause"] == "line\nruns/x: no file"
    # It is the same study, where it was made and elsewhere.
    assert not unpack(tmp_path / "p.study.zip", study.runs).is_new
    assert study_document(StudyFolder(Path(unpack(tmp_path / "p.study.zip", tmp_path / "there").folder))) == before


def test_what_a_study_is_known_by_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes and names of cells are compared and hashed: a path in them is not changed, in no file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    study = study_folder(tmp_path / "runs", repeats=1)
    model, cell = f"{tmp_path}/net.py:Net", f"model={tmp_path}/net.py:Net"
    for path in [*study.path.iterdir(), *study.runs.glob("study-*/run.json")]:
        path.write_text(path.read_text().replace("mnist-convnet", model).replace('"one"', json.dumps(cell)))
    content = json.loads((study.path / "study.json").read_text())
    content["study"]["files"] = [f"{tmp_path}/recipe.toml"]
    (study.path / "study.json").write_text(json.dumps(content, indent=1))
    run, before = first_run(study), study.read()
    _, inside = packed(study, tmp_path)
    after = StudyFolder(Path(unpack(tmp_path / "p.study.zip", tmp_path / "there").folder))
    assert after.read().cells == before.cells
    assert after.read().items == before.items
    assert after.read().study.files == ["~/recipe.toml"]
    assert json.loads(inside[f"runs/{run.id}/run.json"])["recipe"]["model"] == model
    assert inside["study/log.jsonl"] == (study.path / "log.jsonl").read_bytes()
    assert study_document(after) == study_document(study)


def test_files_without_private_paths_and_damaged_ones_keep_their_bytes() -> None:
    paths = PrivatePaths({"/home/al": "~", "/": "x", "": "x", "/usr": "x"})
    for data in (b'{"a":  1, "b": NaN}', b"{", b"", b"\xff\xfe", b'{"a": "/usr/lib/home /home/alice"}'):
        for name in ("x.json", "x.jsonl", "x.txt", "steps.bin"):
            assert paths.removed(name, data) == data
    assert paths.removed("x.json", b'{"a": "/home/al/b"') == b'{"a": "~/b"'
    assert paths.removed("x.jsonl", b'{"/home/al": NaN}\n\n{"/home/al/') == b'{"~": NaN}\n\n{"~/'
    assert paths.removed("x.log", b"\xff/home/al\xff") == b"\xff~\xff"
    assert paths.removed("steps.bin", b"/home/al") == b"/home/al"


# ---------------------------------------------------------------- what is there already


def test_two_machines_side_by_side(tmp_path: Path) -> None:
    for machine in ("a", "b"):
        study = study_folder(tmp_path / machine, repeats=1)
        for name in sorted({names[0] for names in study.started().values()}):
            # Names of runs begin with the time: those of two machines differ.
            (study.runs / name).rename(study.runs / f"{machine}-{name}")
            content = (study.path / "log.jsonl").read_text().replace(name, f"{machine}-{name}")
            (study.path / "log.jsonl").write_text(content)
        run = first_run(study)
        summary = json.loads((run.folder / "summary.json").read_text())
        summary["train_seconds"] = 20.0 if machine == "b" else 9.0
        (run.folder / "summary.json").write_text(json.dumps(summary))
        pack(study, tmp_path / f"{machine}.zip")
    root = tmp_path / "both"
    unpack(tmp_path / "a.zip", root)
    before = tree(root)
    with pytest.raises(InputError, match=r"study 'mine' .* with other content: .* another --name"):
        unpack(tmp_path / "b.zip", root)
    assert tree(root) == before
    assert unpack(tmp_path / "b.zip", root, name="mine-b").packed_as == "mine"
    shown = {name: study_document(StudyFolder(root / "studies" / name)) for name in ("mine", "mine-b")}
    for machine, name in (("a", "mine"), ("b", "mine-b")):
        expected = study_document(StudyFolder(tmp_path / machine / "studies" / "mine"))
        assert shown[name] == {**expected, "study": name}
    assert shown["mine"]["cells"] != shown["mine-b"]["cells"]


def test_what_is_there_with_the_same_content_is_kept(study: StudyFolder, file: Path) -> None:
    run = first_run(study)
    (run.folder / "model.pt").write_bytes(b"weights")
    before = tree(study.runs)
    found = unpack(file, study.runs)
    assert (found.is_new, found.new_runs, found.runs) == (False, 0, 2)
    assert tree(study.runs) == before
    # A run that was lost comes back, and the others stay.
    shutil.rmtree(study.runs / run.id)
    found = unpack(file, study.runs)
    assert (found.is_new, found.new_runs) == (False, 1)
    unpacked = {name for name in before if not name.endswith(("model.pt", ".reserve"))}
    assert tree(study.runs).items() >= {name: before[name] for name in unpacked}.items()
    assert not (run.folder / "model.pt").exists()
    assert unpack(file, study.runs, name="again").is_new
    assert study_document(StudyFolder(study.runs / "studies" / "again"))["cells"] == study_document(study)["cells"]


@pytest.mark.parametrize("kind", ["changed", "gone", "link", "file", "pipe"])
def test_a_run_with_other_content_is_an_error_that_names_it(kind: str, study: StudyFolder, file: Path) -> None:
    run = first_run(study)
    epochs = run.folder / "epochs.jsonl"
    if kind == "file":
        shutil.rmtree(run.folder)
        run.folder.write_text("")
    else:
        data = epochs.read_bytes()
        epochs.unlink()
        if kind == "changed":
            epochs.write_bytes(data.replace(b"666.6", b"777.7", 1))
        elif kind == "link":
            (run.folder / "moved").write_bytes(data)
            epochs.symlink_to("moved")
        elif kind == "pipe":
            os.mkfifo(epochs)
    before = tree(study.runs)
    with pytest.raises(InputError, match=rf"run '{run.id}' .* with other content: .* --runs"):
        unpack(file, study.runs, name="other")
    assert tree(study.runs) == before


def test_a_failed_move_takes_back_what_was_moved(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Path] = []

    rename = Path.rename

    def failing(self: Path, target: Path) -> None:
        if len(moved) == 2:
            raise OSError(28, "No space left on device")
        moved.append(target)
        rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(InputError, match="No space left on device"):
        unpack(file, tmp_path / "deep" / "there")
    assert len(moved) == 2
    assert not (tmp_path / "deep").exists()


def test_places_that_cannot_be_written_and_full_disks(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("")
    for place in (tmp_path / "a-file", tmp_path / ("x" * 300), tmp_path / "a-file" / "below"):
        with pytest.raises(InputError, match="--runs"):
            unpack(file, place)
    full = SimpleNamespace(total=10, used=9, free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(InputError, match="room"):
        unpack(file, tmp_path / "there")
    assert not (tmp_path / "there").exists()


# ---------------------------------------------------------------- packs that do harm


def forged(file: Path, change: Callable[[Members], Any], listed: bool = True) -> Path:
    """The pack with other members. `listed`: the manifest is right about them."""
    inside = members(file)
    manifest = json.loads(inside.pop(MANIFEST))
    change(inside)
    if listed:
        manifest["members"] = [
            {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in inside.items()
        ]
    return written(file, [*inside.items(), (MANIFEST, json.dumps(manifest).encode())])


def written(
    file: Path, contents: list[tuple[str, bytes]], edit: Callable[[zipfile.ZipInfo], Any] | None = None
) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents:
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            if edit:
                edit(entry)
            archive.writestr(entry, data)
    return file


def with_manifest(file: Path, **changes: Any) -> Path:
    inside = members(file)
    manifest = {**json.loads(inside.pop(MANIFEST)), **changes}
    return written(file, [*inside.items(), (MANIFEST, json.dumps(manifest).encode())])


def refused(file: Path, root: Path, match: str) -> None:
    """One line that names the file, and nothing left behind."""
    beside = tree(file.parent)
    with pytest.raises(InputError, match=match) as caught:
        unpack(file, root)
    said = str(caught.value)
    assert said.startswith(f"{file}: ")
    assert said.isprintable()
    assert len(said) < len(str(file)) + 300
    assert not root.exists()
    assert tree(file.parent) == beside


BAD_NAMES = [
    *("/tmp/evil", "../evil", "study/../../evil", "study/..", "study/./x", "study//x", "study/", "study/.hidden"),
    *("C:/evil", "study/C:evil", "study/a\\..\\b", "\\\\host\\share", "study/\x1b[2J", "study/\u202ex", "study/a\nb"),
    *("study/" + "x" * 201, "study/" + "/".join(["d"] * 30), "study/" + "/".join(["d" * 150] * 5)),
]
STRANGE_NAMES = [
    *("evil", "study", "runs/evil", "races/evil/race.json", "studies/evil/study.json"),
    *("runs/studies/evil/run.json", "runs/RACES/x/run.json"),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_lead_elsewhere(name: str, file: Path, tmp_path: Path) -> None:
    refused(
        forged(file, lambda inside: inside.update({name: b"{}"})),
        tmp_path / "there",
        "a name that no file of a pack has",
    )


@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_names_that_belong_nowhere(name: str, file: Path, tmp_path: Path) -> None:
    refused(
        forged(file, lambda inside: inside.update({name: b"{}"})), tmp_path / "there", "belongs neither|below a file"
    )


def test_zero_bytes_in_names(file: Path, tmp_path: Path) -> None:
    """zipfile cuts a name at a zero byte: what is checked would not be what is written."""
    data = file.read_bytes()
    file.write_bytes(data.replace(b"study/log.jsonl", b"study/log\0jsonl"))
    refused(file, tmp_path / "there", "a name that no file of a pack has")


def test_members_that_do_not_belong_together(study: StudyFolder, file: Path, tmp_path: Path) -> None:
    run, original = first_run(study), file.read_bytes()

    def changed(change: Callable[[Members], Any], match: str, listed: bool = True) -> None:
        file.write_bytes(original)
        refused(forged(file, change, listed), tmp_path / "there", match)

    changed(lambda inside: inside.update({"runs/stranger/run.json": b"{}"}), "a run that the study did not start")
    changed(lambda inside: inside.pop(f"runs/{run.id}/run.json"), "a run without a run.json")
    changed(lambda inside: inside.pop("study/study.json"), "no study.json")
    changed(lambda inside: inside.update({"study/study.json": b"{}"}), "study.json")
    changed(lambda inside: inside.update({"study/log.jsonl": b"[]\n[]\n"}), "log.jsonl")
    changed(lambda inside: inside.update({"study/log.jsonl/x": b""}), "below a file")
    changed(lambda inside: inside.update({"study/more.json": b""}), "lists other files", listed=False)
    changed(lambda inside: inside.pop("study/log.jsonl"), "lists other files", listed=False)
    changed(lambda inside: inside.update({"study/log.jsonl": b"x"}), "not of the size", listed=False)
    other = lambda inside: inside.update({"study/log.jsonl": inside["study/log.jsonl"][::-1]})  # noqa: E731
    changed(other, "not what was packed", listed=False)


def test_a_file_that_is_there_twice(file: Path, tmp_path: Path) -> None:
    inside = members(file)
    with pytest.warns(UserWarning, match="Duplicate"):
        written(file, [*inside.items(), ("study/log.jsonl", b"")])
    refused(file, tmp_path / "there", "twice")
    with pytest.warns(UserWarning, match="Duplicate"):
        written(file, [*inside.items(), (MANIFEST, inside[MANIFEST])])
    refused(file, tmp_path / "there", "twice")


def test_links_folders_devices_and_other_compression(file: Path, tmp_path: Path) -> None:
    contents = list(members(file).items())

    def edited(key: str, value: int, match: str) -> None:
        refused(written(file, contents, lambda entry: setattr(entry, key, value)), tmp_path / "there", match)

    for kind in (stat.S_IFLNK, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR):
        edited("external_attr", (kind | 0o777) << 16, "a link, a folder or a device")
    for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        edited("compress_type", method, "compressed in a way")
    written(file, contents)
    data = bytearray(file.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1  # says that it is encrypted
    file.write_bytes(data)
    refused(file, tmp_path / "there", "encrypted")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": 2}, "newer version"),
        ({"format": "x"}, "manifest.json"),
        ({"study": "../evil"}, "one plain word"),
        ({"study": ".evil"}, "one plain word"),
        ({"study": "x" * 201}, "at most 200 bytes"),
        ({"study": "\x1b[2J"}, "one plain word"),
        ({"members": []}, "lists other files"),
        ({"members": [{"name": "study/study.json", "size": -1, "sha256": "0" * 64}]}, "manifest.json"),
        ({"members": [{"name": "study/study.json", "size": 1, "sha256": "../x"}]}, "manifest.json"),
        ({"created": 1e300}, "manifest.json"),
    ],
)
def test_manifests(changes: dict[str, Any], match: str, file: Path, tmp_path: Path) -> None:
    refused(with_manifest(file, **changes), tmp_path / "there", match)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"format": 1}'])
def test_manifests_that_are_none(text: bytes, file: Path, tmp_path: Path) -> None:
    inside = members(file) | {MANIFEST: text}
    refused(written(file, list(inside.items())), tmp_path / "there", "manifest.json")
    del inside[MANIFEST]
    refused(written(file, list(inside.items())), tmp_path / "there", "it has no manifest.json")


@pytest.mark.parametrize(
    ("limit", "value", "match"),
    [
        ("LARGEST_MEMBER", 5000, "larger than any record"),
        ("LARGEST_CONTENT", 20_000, "a pack has at most"),
        ("MOST_MEMBERS", 10, "10"),
        ("LARGEST_MANIFEST", 1000, "larger than that of any pack"),
        ("LARGEST_DIRECTORY", 1000, "table of contents"),
    ],
)
def test_limits(
    limit: str, value: int, match: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, limit, value)
    refused(file, tmp_path / "there", match)


def test_a_bomb_that_lies_about_its_size(file: Path, tmp_path: Path) -> None:
    """The table of contents and the manifest say 10 bytes; the stream holds 50 MB. No more than 10 are ever written."""
    name, size = "study/bomb.json", 50_000_000
    forged(file, lambda inside: inside.update({name: b"0" * size}))
    assert file.stat().st_size < 200_000
    inside = members(file)
    manifest = json.loads(inside.pop(MANIFEST))
    for each in manifest["members"]:
        if each["name"] == name:
            each |= {"size": 10, "sha256": hashlib.sha256(b"0" * 10).hexdigest()}
    written(file, [*inside.items(), (MANIFEST, json.dumps(manifest).encode())])
    data = file.read_bytes()
    true, false = size.to_bytes(4, "little"), (10).to_bytes(4, "little")
    assert data.count(true) == 2
    file.write_bytes(data.replace(true, false))
    refused(file, tmp_path / "there", "damaged|not what was packed")


def test_a_table_of_contents_of_gigabytes_is_not_read(file: Path, tmp_path: Path) -> None:
    """Said by the ordinary record, and by that of zip64, which has precedence."""
    data = file.read_bytes()
    huge = (1 << 31).to_bytes(4, "little")
    file.write_bytes(data[:-10] + huge + data[-6:])
    refused(file, tmp_path / "there", "table of contents has 2,147 MB")
    record = b"PK\6\6" + (44).to_bytes(8, "little") + bytes(28) + (1 << 40).to_bytes(8, "little") + bytes(8)
    locator = b"PK\6\7" + bytes(4) + (len(data) - 22).to_bytes(8, "little") + (1).to_bytes(4, "little")
    file.write_bytes(data[:-22] + record + locator + data[-22:])
    refused(file, tmp_path / "there", "table of contents has 1,099,512 MB")


def test_a_pack_with_more_files_than_an_ordinary_zip_has(
    study: StudyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 10)  # zip64 from the eleventh on
    pack(study, tmp_path / "p.zip")
    assert (tmp_path / "p.zip").read_bytes()[-42:-38] == b"PK\6\7"
    assert unpack(tmp_path / "p.zip", tmp_path / "there").runs == 2


def test_what_is_no_pack(study: StudyFolder, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "given"
    other.write_bytes(b"")
    refused(other, tmp_path / "there", "not a pack of a study")
    other.write_bytes(os.urandom(1000))
    refused(other, tmp_path / "there", "not a pack of a study")
    other.write_bytes(file.read_bytes() + b"more")
    refused(other, tmp_path / "there", "not a pack of a study")
    archive = io.BytesIO()
    zipfile.ZipFile(archive, "w").close()
    other.write_bytes(archive.getvalue())
    refused(other, tmp_path / "there", "it has no manifest.json")
    other.unlink()
    refused(other, tmp_path / "there", "no such file")
    other.mkdir()
    refused(other, tmp_path / "there", "not a file")
    other.rmdir()
    os.mkfifo(other)
    refused(other, tmp_path / "there", "not a file")


def test_nothing_of_a_pack_is_unpickled(study: StudyFolder, tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    for name in ("steps.bin", "trace.json", "epochs.jsonl"):
        (first_run(study).rank_folder(0) / name).write_bytes(pickle.dumps(Evil()))
    packed(study, tmp_path)
    found = StudyFolder(Path(unpack(tmp_path / "p.study.zip", tmp_path / "there").folder))
    assert study_document(found)["cells"]
    assert not (tmp_path / "evil").exists()


Damage = tuple[str, float, float, int]
DAMAGES = st.tuples(
    st.sampled_from(["flip", "cut", "drop", "double", "zeros"]), st.floats(0, 1), st.floats(0, 1), st.integers(0, 7)
)


def damaged(data: bytes, damage: Damage) -> bytes:
    kind, begin, length, bit = damage
    at = min(len(data) - 1, int(begin * len(data)))
    end = min(len(data), at + 1 + int(length**4 * 4000))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "zeros":
        return data[:at] + bytes(end - at) + data[end:]
    return data[:at] + (data[at:end] * 2 if kind == "double" else b"") + data[end:]


@settings(max_examples=250, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(DAMAGES, min_size=1, max_size=3), st.booleans())
def test_a_damaged_pack_is_an_error_or_the_same_study(sound: Sound, damages: list[Damage], near_the_end: bool) -> None:
    place, data, expected = sound
    # Half of the damage goes where it is most likely to be believed: into the manifest and the table of contents.
    start = data.index(MANIFEST.encode()) - 30 if near_the_end else 0
    for damage in damages:
        data = data[:start] + (damaged(data[start:], damage) if data[start:] else b"")
    file, root = place / "damaged.zip", place / "there"
    file.write_bytes(data)
    found, said = None, ""
    try:
        found = unpack(file, root)
    except InputError as error:
        said = str(error)
    try:
        assert found or not root.exists()
        assert said.isprintable()
        assert found is None or study_document(StudyFolder(Path(found.folder))) == expected
    finally:
        shutil.rmtree(root, ignore_errors=True)
    assert sorted(path.name for path in place.iterdir()) == ["damaged.zip", "p.zip", "runs"]


# ---------------------------------------------------------------- the commands


def test_wrong_words_are_one_line(study: StudyFolder, file: Path, cli: Cli) -> None:
    runs = ("--runs", str(study.runs))
    assert "no study 'nothing'" in cli.error("study", "pack", "nothing", *runs, code=2)
    assert "there is no folder" in cli.error("study", "pack", "mine", "-o", "no/where.zip", *runs, code=2)
    assert "is a folder already" in cli.error("study", "pack", "mine", "-o", ".", *runs, code=2)
    assert "--name" in cli.error("study", "unpack", str(file), "--name", "../x", code=2)
    assert "no such file" in cli.error("study", "unpack", "nothing.zip", code=2)
    file.write_bytes(file.read_bytes()[:5000])
    assert "cut off" in cli.error("study", "unpack", str(file), code=2)
    assert not cli.runs.exists()


def test_pack_says_what_it_wrote_and_what_is_missing(study: StudyFolder, cli: Cli) -> None:
    run = first_run(study)
    run.write_status("running")
    (run.folder / "launcher.log").write_bytes(b"x" * (LARGEST_LOG + 1))
    done = cli("study", "pack", str(study.path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine.study.zip: 2 runs, ")
    assert "1 run had not ended" in done.stderr
    assert f"not in the pack: 'runs/{run.id}/launcher.log'" in done.stderr
    assert (cli.folder / "mine.study.zip").is_file()


def test_progress_is_said_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = packing_command._count_files("packing")
    progress(1, 4000)
    now = 101.9
    progress(2, 4000)
    assert capsys.readouterr().err == ""
    now = 102.0
    progress(1234, 4000)
    progress(1235, 4000)
    assert capsys.readouterr().err == "packing: 1,234 of 4,000 files\n"
    now = 103.0
    progress(4000, 4000)
    assert capsys.readouterr().err == ""


def test_both_count_every_file(study: StudyFolder, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    done = pack(study, tmp_path / "p.zip", progress=lambda *call: calls.append(call))
    assert calls == [(number, done.members) for number in range(1, done.members + 1)]
    calls.clear()
    unpack(tmp_path / "p.zip", tmp_path / "there", progress=lambda *call: calls.append(call))
    assert calls == [(number, done.members) for number in range(1, done.members + 1)]


def test_runs_of_other_studies_are_not_packed(study: StudyFolder, tmp_path: Path) -> None:
    run_folder(study.runs, "stranger", "one")
    _, inside = packed(study, tmp_path)
    assert not [name for name in inside if "stranger" in name]


PACKS = sorted((Path(__file__).parents[1] / "docs/studies").glob(f"*{ENDING}"))


@pytest.mark.parametrize("file", PACKS, ids=lambda path: path.name.partition(".")[0])
def test_races_of_the_published_studies_are_still_known(file: Path, tmp_path: Path) -> None:
    """A key that is new in recipes or placements must not make what was measured before it unknown."""
    folder = StudyFolder(Path(unpack(file, tmp_path).folder))
    if (folder.path / timing.STATE).exists():
        raced = timing.read(folder, folder.read())
        assert raced is not None
        assert all(raced.of(cell) for cell in folder.read().cells if cell.takes_turns and not cell.left_out)
