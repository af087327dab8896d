"""Inputs that once ended in a traceback or a hang. Each failure that the fuzzer finds gets a line here."""

from __future__ import annotations

import gzip
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import folders
import pytest
from harness import CODES_SEEN, command

from lockstep.data import decode
from lockstep.data.catalog import MNIST, Part
from lockstep.errors import InputError
from lockstep.measure.events import scalars
from lockstep.measure.records import ROW
from lockstep.settings import as_toml, load

LONG = "n" * 300
REFUSED = [
    ["run", "epochs=" + "9" * 5000],
    ["run", "seed=" + "9" * 30],
    ["run", "epochs=" + "[" * 3000],
    ["run", "data=\ud800"],
    ["run", "data=a\0b"],
    ["run", "timeout_s=inf"],
    ["run", "timeout_s=1e300"],
    ["run", "optimizer.lr=inf"],
    ["run", "optimizer.lr=nan"],
    ["run", "model_args.k=inf"],
    ["run", "--time-limit", "inf"],
    ["run", "--time-limit", "nan"],
    ["run", "data=embedded", "global_batch=1000000000000", "micro_batch=7", "--dry-run"],
    ["run", "data=embedded", "global_batch=999999999989", "accumulation=7", "--dry-run"],
    ["run", "data=embedded", "ranks=20000000", "global_batch=40000000", "--dry-run"],
    ["run", "data=embedded", "epochs=2020-01-01"],
    ["run", "--name", LONG, "data=embedded", "--dry-run"],
    ["run", "--name", "\x1b[2J", "data=embedded", "--dry-run"],
    ["run", "--runs", "a\0b", "data=embedded", "--dry-run"],
    ["run", "--runs", os.fsdecode(b"\xff"), "data=embedded"],
    ["run", f"{LONG}.toml"],
    ["run", "/dev/zero.toml"],
    ["show", LONG],
    ["dashboard", "--runs", LONG],
    ["explain", LONG],
    ["compare", LONG, "x" * 5000],
    ["report", LONG],
    ["predict", LONG],
    ["predict", "--ranks", "²"],
    ["predict", "--ranks", "9" * 5000],
    ["predict", "--ranks", "99998,99999,…,100000000"],
    ["predict", "--straggler", "nan"],
    ["study", "show", LONG],
    ["study", "run", LONG],
    ["study", "run", "workers", "--repeats", "1000000000"],
    ["study", "run", "workers", "repeats=1000000000"],
    ["study", "run", "workers", "target_accuracy=2"],
    ["study", "run", "workers", "budget_minutes=-1"],
    ["study", "run", "workers", "seeds=x"],
    ["study", "run", "workers", "seeds=[99999999999999999999]"],
    ["dashboard", "--host", "\x80", "--no-open"],
]


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: ascii(" ".join(words))[1:60])
def test_refused_in_one_line(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = CODES_SEEN[2]
    said = command(*words)
    assert CODES_SEEN[2] == before + 1, said
    assert said.strip()


TOML = [
    "a = " + "[" * 5000,
    ".".join(["a"] * 2000) + " = 1",
    "[" + ".".join(["a"] * 2000) + "]",
    "epochs = " + "9" * 5000,
    "epochs = 2020-01-01",
    "model = 07:32:00",
    'data = "a\\u0000b"',
    "optimizer.lr = inf",
    "global_batch = 9223372036854775808",
]


@pytest.mark.parametrize("text", TOML, ids=lambda text: text[:30])
def test_files_refused_in_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(InputError, match=r"a\.toml"):
        load([tmp_path / "a.toml"], [])
    (tmp_path / "s.toml").write_text(text)
    assert "s.toml" in command("study", "run", "s.toml", "--dry-run")
    (tmp_path / "f.toml").write_text(f"[factors]\nranks = [1, 2]\n[recipe]\n{text}")
    assert "f.toml" in command("study", "run", "f.toml", "--dry-run")


def test_what_was_understood_can_be_written_down(tmp_path: Path) -> None:
    found = load([], ["model=\x7f", 'model_args.k="a\\"b"', "model_args.a b=1"])
    (tmp_path / "again.toml").write_text(as_toml(*found))
    assert load([tmp_path / "again.toml"], []) == found


def _json(key: str, value: Any) -> Any:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        content[key] = value
        path.write_text(json.dumps(content))

    return change


def _seeded(damage: Any) -> Any:
    return lambda path: damage(path, random.Random(1))


# The file, what happens to it, and whether the run is still listed with its figures.
DAMAGED = {
    "a FIFO for a summary": ("summary.json", _seeded(folders.fifo)),
    "a device for a summary": ("summary.json", _seeded(folders.device)),
    "a loop for a summary": ("summary.json", _seeded(folders.loop)),
    "a socket for a status": ("status.json", _seeded(folders.served)),
    "a folder for the environment": ("environment.json", _seeded(folders.folder)),
    "text for an accuracy": ("summary.json", _json("test_accuracy", "x")),
    "no state": ("status.json", _json("state", None)),
    "an unknown state": ("status.json", _json("state", "fine")),
    "a list for a status": ("status.json", lambda path: path.write_text("[]")),
    "not UTF-8": ("run.json", lambda path: path.write_bytes(path.read_bytes().replace(b"embedded", b"emb\xff"))),
    "half a character": ("status.json", _json("cause", "\ud800")),
    "no recipe": ("run.json", _json("recipe", {"model": 3})),
    "a moment beyond the calendar": ("run.json", _json("created", 1e300)),
    "two plans": ("run.json", _json("plan", None)),
    "nested without end": ("environment.json", lambda path: path.write_text("[" * 100_000)),
    "an epoch that is none": ("epochs.jsonl", lambda path: path.write_text('{"epoch": "x"}\n')),
    "an epoch of nothing": ("epochs.jsonl", lambda path: path.write_text("{}\n")),
    "a cut summary": ("summary.json", lambda path: path.write_bytes(path.read_bytes()[:40])),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_run_is_named_and_hides_nobody(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "runs"
    folders.study_folder(root, repeats=1)
    run = folders.run_folder(root, "broken", "two")
    name, damage = DAMAGED[case]
    damage(run.folder / name)
    runs = ("--runs", str(root))
    listed = {row["id"]: row["state"] for row in json.loads(command("runs", "--json", *runs))}
    assert listed.pop("broken") == "damaged"
    assert set(listed.values()) == {"done"}
    for words in (["show", "broken"], ["explain", "broken"], ["compare", "broken", "study-one"]):
        said = command(*words, *runs)
        assert "damaged" in said, (words, said)
        assert name in said, (words, said)
    assert name in command("report", "broken", "study-one", "-o", str(tmp_path / "r.md"), *runs) or name in (
        tmp_path / "r.md"
    ).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["steps.bin", "epochs.jsonl", "summary.json", "status.json", "trace.json"])
def test_a_damaged_file_of_a_rank_is_named_and_left_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = folders.run_folder(tmp_path / "runs", "broken", "two")
    path = run.rank_folder(1) / name
    if name == "steps.bin":
        data = bytearray(path.read_bytes())
        data[ROW.itemsize] = 90  # the second step's number
        path.write_bytes(data)
    else:
        folders.fifo(path, random.Random(1))
    runs = ("--runs", str(tmp_path / "runs"))
    for words in (["show", "broken", "--ranks"], ["explain", "broken"]):
        said = command(*words, *runs)
        assert f"ranks/0001/{name}" in said, said
    command("report", "broken", "-o", str(tmp_path / "r.md"), *runs)
    assert f"ranks/0001/{name}" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize("lost", ["everything", "phases", "exchange", "size"])
def test_damaged_measurements_beside_a_run_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = folders.run_folder(tmp_path / "runs", "broken", "two")
    file = run.folder / "explain/ways/ways.json"
    ways = json.loads(file.read_text())["ways"]
    for way in ways:
        if lost == "everything":
            way.clear()
        elif lost == "phases":
            way["phases"] = []
        elif lost == "size":  # two of them are more than a float can hold
            way["phases"] = [dict.fromkeys(phases, 1.7e308) for phases in way["phases"]]
        else:
            del way["phases"][0][lost]
    file.write_text(json.dumps({"ways": ways}))
    runs = ("--runs", str(tmp_path / "runs"))
    for words in (["show", "broken"], ["explain", "broken"]):
        assert "explain/ways/ways.json" in command(*words, *runs)
    command("report", "broken", "-o", str(tmp_path / "r.md"), *runs)
    assert "explain/ways/ways.json" in (tmp_path / "r.md").read_text()


def test_one_bad_study_does_not_hide_the_others(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    folders.study_folder(root, repeats=1)
    for name, content in (("bad", "{}"), ("worse", "["), ("none", "null")):
        (root / "studies" / name).mkdir()
        (root / "studies" / name / "study.json").write_text(content)
    rows = {row["study"]: row for row in json.loads(command("study", "list", "--json", "--runs", str(root)))}
    assert rows["mine"]["runs"] == "2/2 done"
    assert {rows[name]["runs"] for name in ("bad", "worse", "none")} == {"damaged"}
    assert "damaged" in command("study", "show", "bad", "--runs", str(root))


def test_run_folders_of_version_0_1_are_read(tmp_path: Path) -> None:
    """They had fewer keys, and NaN for losses that were none."""
    root = tmp_path / "runs"
    run = folders.run_folder(root, "old", "two")
    spec = json.loads((run.folder / "run.json").read_text())
    for key in ("options", "part", "why_backend", "data_origin", "command"):
        spec.pop(key, None)
    for key in ("quantize", "fused", "regularize", "augment", "early_stopping", "compile", "schedule"):
        spec["recipe"].pop(key, None)
    (run.folder / "run.json").write_text(json.dumps(spec))
    lines = (run.folder / "epochs.jsonl").read_text().splitlines()
    first = {"epoch": 1, "train_loss": float("nan"), "train_accuracy": 0.1, "test_loss": float("nan"), "test_accuracy": 0.1,
             "train_seconds": 1.0, "eval_seconds": 0.1, "images_per_second": 100.0}  # fmt: skip
    (run.folder / "epochs.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    summary = json.loads((run.folder / "summary.json").read_text())
    kept = (
        "epochs",
        "steps",
        "train_seconds",
        "images_per_second",
        "test_accuracy",
        "memory_growth_bytes",
        "ranks_agree",
    )
    (run.folder / "summary.json").write_text(json.dumps({key: summary[key] for key in kept}))
    assert '"state": "done"' in command("runs", "--json", "--runs", str(root))
    said = command("show", "old", "--runs", str(root))
    assert "damaged" not in said
    assert "87.00%" not in said.splitlines()[0]
    assert CODES_SEEN[1] == 0
    command("report", "old", "-o", str(tmp_path / "old.md"), "--runs", str(root))
    command("explain", "old", "--runs", str(root))


@pytest.mark.parametrize("part", MNIST.parts, ids=lambda part: part.name)
def test_a_small_gzip_file_is_refused_in_little_memory(part: Part) -> None:
    """It unpacks to far more than the part; what is unpacked of it was held twice."""
    data = gzip.compress(b"\0" * (1 << 26))
    tracemalloc.start()
    try:
        with pytest.raises(decode.Rejected, match="too long"):
            decode.plain(data, part, "idx")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1.25 * part.size + (8 << 20), f"{most / 1e6:.0f} MB"


def test_a_loss_beyond_single_precision_is_infinite_in_tensorboard() -> None:
    for loss, single in ((1e60, b"\x00\x00\x80\x7f"), (-1e60, b"\x00\x00\x80\xff")):
        assert scalars({"loss": loss}).endswith(single)
