"""Ten thousand runs: how long `lockstep runs` and `lockstep compare` take, and how long the index takes to be made anew."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import ours
from benchmarks.processes import run
from benchmarks.record import Section
from benchmarks.rounds import Span, interleave
from benchmarks.sections.start import start
from benchmarks.settings import Settings

RUNS, QUICK = 10_000, 500
REPEATS = 10
KEPT = ("run.json", "status.json", "summary.json", "epochs.jsonl", "environment.json")


def measure(settings: Settings) -> Section:
    count = QUICK if settings.quick else RUNS
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        root = Path(folder)
        _fill(root, count)
        names = sorted(path.name for path in root.iterdir())[: 4 * 997 : 997][:4]
        contenders = {
            "runs": partial(start, [ours.executable(), "runs", "--runs", folder]),
            "runs --json": partial(start, [ours.executable(), "runs", "--json", "--runs", folder]),
            "compare of four runs": partial(start, [ours.executable(), "compare", *names, "--runs", folder]),
            "runs, index made anew": partial(_anew, root),
        }
        outcome = interleave("listing", contenders, 3 if settings.quick else REPEATS, settings.seed)
    section = Section("listing", f"{count:,} run folders", "call", "milliseconds", outcome.measurements)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    section.notes.append("Target: runs and compare under 1,000 ms. Whole processes, interpreter and all.")
    return section


def _fill(root: Path, count: int) -> None:
    """Copies of one real run, each by a name of its own."""
    words = ("data=embedded", "train_limit=500", "test_limit=100", "epochs=2", "threads=1")
    run([ours.executable(), "run", *words, "--runs", str(root), "--name", "model", "--quiet"], None, 1)
    model = root / "model"
    spec = json.loads((model / "run.json").read_text())
    for number in range(count):
        copy = root / f"run-{number:05d}"
        copy.mkdir()
        for name in KEPT[1:]:
            shutil.copyfile(model / name, copy / name)
        spec["id"], spec["recipe"]["seed"] = copy.name, number
        (copy / "run.json").write_text(json.dumps(spec))
    shutil.rmtree(model)


def _anew(root: Path) -> Span:
    (root / ".index.sqlite").unlink(missing_ok=True)
    return start([ours.executable(), "runs", "--runs", str(root)])
