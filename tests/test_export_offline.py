"""Runs for Weights & Biases and trackio, written by the real libraries, offline, and read back from what they wrote."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import InputError
from lockstep.export import trackio, wandb
from lockstep.export.facts import Chosen
from support import Cli
from test_export_trackers import made
from test_packaging import call

# W&B's file is a log as LevelDB has it: a header of 7 bytes, blocks of 32 KB, each record with its sum, length and kind before it.
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as messages

found = {}
for file in Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb"):
    data, at, parts, run = file.read_bytes(), 7, b"", {"rows": [], "summary": {}, "config": {}}
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):
            continue
        record, parts = messages.Record.FromString(parts), b""
        which = record.WhichOneof("record_type")
        if which == "run":
            run |= {"project": record.run.project, "name": record.run.display_name, "group": record.run.run_group}
            run["config"] |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
        elif which == "history":
            run["rows"].append({each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item})
        elif which == "summary":
            run["summary"] |= {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.summary.update}
        elif which == "exit":
            run["exit"] = record.exit.exit_code
    found.setdefault(run["name"], []).append(run)
print(json.dumps(found))
"""
READ_TRACKIO = """
import json, sys
import trackio
from trackio.sqlite_storage import SQLiteStorage

runs = list(trackio.Api().runs("lockstep"))
print(json.dumps([[run.project, run.name, run.config, SQLiteStorage.get_logs(run.project, run.name)] for run in runs]))
"""


@pytest.mark.parametrize(("module", "name"), [(wandb, "wandb"), (trackio, "trackio")])
def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("TRACKIO_DIR", "")
    with pytest.raises(InputError, match=rf"pip install 'lockstep-bench\[{name}\]'"):
        module.write([Chosen(made(tmp_path, "one"))], tmp_path / "store")  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(600)
def test_the_real_libraries_write_what_they_can_read(cli: Cli, tmp_path: Path) -> None:
    site, out = tmp_path / "site", tmp_path / "my out"
    call(sys.executable, "-m", "pip", "install", "-q", "--target", site, "wandb>=0.25", "trackio>=0.40", cwd=tmp_path)
    cli.environment |= {"PYTHONPATH": str(site), "TRACKIO_DIR": str(out / "trackio")}
    out.mkdir()
    made(cli.runs, "one")
    made(cli.runs, "two-one", state="failed", epochs=1)

    def read(code: str) -> object:
        argv = [sys.executable, "-c", code, str(out / "wandb")]
        done = subprocess.run(argv, env=cli.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    opens = {"wandb": f"{out}/wandb/wandb/offline-run-*", "trackio": f"TRACKIO_DIR={out}/trackio"}
    for tracker in ("wandb", "trackio"):
        for names in (("one", "two-one"), ("one",)):  # again: what is there is replaced, and the others stay
            done = cli("export", *names, "--format", tracker, "-o", str(out / tracker))
            assert done.returncode == 0, done.stderr
            assert "Traceback" not in done.stderr
            assert ("2 runs in" if len(names) == 2 else "1 run in") in done.stderr
            assert done.stderr.splitlines()[-1].startswith("next: ")
            assert opens[tracker] in shlex.split(done.stderr.splitlines()[-1]), "the folder's name has a blank"

    found = read(READ_WANDB)
    assert isinstance(found, dict)
    assert sorted(found) == ["one", "two-one"]
    (one,), (two,) = found["one"], found["two-one"]
    assert one["project"] == "lockstep"
    assert (one["config"]["optimizer.lr"], one["config"]["ranks"]) == (0.125, 2)
    assert [(row["_step"], row["test_accuracy"], row["epoch"]) for row in one["rows"]] == [(10, 0.25, 1), (20, 0.5, 2)]
    assert one["summary"]["final_train_seconds"] == 6.0
    assert (one["exit"], two["exit"]) == (0, 1)
    assert two["config"]["lockstep"]["cause"] == "rank 1 was killed"

    rows = {name: (project, config, logs) for project, name, config, logs in read(READ_TRACKIO)}  # type: ignore[attr-defined]
    assert sorted(rows) == ["one", "two-one"]
    project, config, logs = rows["one"]
    assert project == "lockstep"
    assert (config["optimizer.lr"], config["lockstep.state"]) == (0.125, "done")
    curve = [(row["step"], row["test_accuracy"]) for row in logs if "test_accuracy" in row]
    assert curve == [(10, 0.25), (20, 0.5)]
    assert logs[-1]["final_train_seconds"] == 6.0
