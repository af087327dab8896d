"""Run and study folders as Lockstep leaves them, with every file that anything reads; and what can happen to a file."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lockstep.measure.records import ROW
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.recipe import Recipe
from lockstep.run import Run, Spec, append_line, write_atomic
from lockstep.study import racing, timing
from lockstep.study.definition import Claim, Published, Study
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Cell, Item, Planned, timed_content
from lockstep.turns import estimate
from lockstep.turns.estimate import Window
from lockstep.ways import BESIDE, FILE, Way

RECIPE = Recipe(data="embedded", global_batch=64, epochs=6)
PLACES = {
    "one": Placement(ranks=1, threads=1, launcher="single", device="cpu", backend="gloo", strategy="single"),
    "two": Placement(ranks=2, threads=1, launcher="spawn", device="cpu", backend="gloo", strategy="ddp"),
}
PARTS = {"data": 100, "forward": 500, "backward": 900, "exchange": 300, "optimizer": 150, "total": 2000}


def run_folder(root: Path, name: str, place: str, seed: int = 1, state: str = "done") -> Run:
    """A run with everything in it: epochs, steps, summary, environment, trace, profile, a probe's ways, a failure."""
    placement = PLACES[place]
    recipe = msgspec.structs.replace(RECIPE, seed=seed)
    spec = Spec(
        id=name,
        created=1.7e9 + seed,
        lockstep="0.1.0",
        recipe=recipe,
        placement=placement,
        plan=plan(recipe, placement, 1000, 500),
        command=[["python", "-m", "lockstep.worker", name]],
    )
    run = Run.create(root, spec)
    for epoch in range(1, recipe.epochs + 1):
        append_line(run.folder / "epochs.jsonl", _epoch(epoch))
        for rank in range(placement.ranks):
            append_line(run.rank_folder(rank) / "epochs.jsonl", {"rank": rank, **_epoch(epoch)})
    for rank in range(placement.ranks):
        _rank(run, rank)
    environment = {"host": "h", "cpu": "a processor", "cores_machine": 2, "torch": "2.0", "memory_bytes": 8e9}
    write_atomic(run.folder / "environment.json", {**environment, "load_1min": 0.5, "lockstep": "0.1.0"}, durable=False)
    if state == "done":
        write_atomic(run.folder / "summary.json", _summary(placement.ranks), durable=False)
    run.write_status(state, cause=None if state == "done" else "rank 0: MemoryError", supervisor_pid=4194304, host="h")
    _ways(run)
    return run


def _epoch(epoch: int) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "step": 16 * epoch,
        "samples": 1000,
        "train_loss": 1 / epoch,
        "train_accuracy": 1 - 0.5 / epoch,
        "test_loss": 0.5 + 0.02 * abs(epoch - 3),
        "test_accuracy": 0.9 - 0.2 / epoch,
        "test_samples": 500,
        "train_seconds": 1.5,
        "train_cpu_seconds": 1.5,
        "eval_seconds": 0.1,
        "logging_seconds": 0.01,
        "images_per_second": 666.6,
        "time": 1.7e9 + epoch,
    }


def _summary(ranks: int) -> dict[str, Any]:
    numbers = dict.fromkeys(
        ("gradient_not_finite_share", "gradient_zero_share", "gradient_subnormal_share", "lost_update_share"), 0.01
    )
    return {
        "epochs": 6,
        "steps": 96,
        "stopped_by": None,
        "best_epoch": 3,
        "train_seconds": 9.0,
        "train_cpu_seconds": 9.0,
        "eval_seconds": 0.6,
        "logging_seconds": 0.06,
        "checkpoint_seconds": 0.0,
        "compile_seconds": 0.0,
        "train_images": 6000,
        "fit_seconds": 10.0,
        "images_per_second": 666.6,
        "train_loss": 0.17,
        "train_accuracy": 0.92,
        "test_loss": 0.56,
        "test_accuracy": 0.87,
        "test_samples": 500,
        "numbers": {"looks": 3, **numbers, "skipped_steps": 1, "loss_scale": 1024.0},
        "memory_growth_bytes": [50_000_000] * ranks,
        "weights_sha256": "0" * 64,
        "ranks_agree": True,
    }


def _rank(run: Run, rank: int) -> None:
    folder, count = run.rank_folder(rank), 96
    rows = np.zeros(count, dtype=ROW)
    rows["step"], rows["epoch"], rows["samples"] = np.arange(1, count + 1), 1, 32
    rows["warmup"] = rows["step"] <= 10
    for name, value in PARTS.items():
        rows[f"{name}_ns"] = value * 1000
    rows["start_ns"] = 1_000_000_000 + np.arange(count) * 2_000_000
    rows["loss_sum"] = 32.0 / rows["step"]
    rows.tofile(folder / "steps.bin")
    beat = {"rank": rank, "state": "done", "time": 1.7e9, "pid": 4194304, "host": "h", "epoch": 6, "step": 96}
    write_atomic(folder / "status.json", {**beat, "loss": 0.2, "images_per_second": 300.0, "waits": False})
    figures = {"avg_backward_comm_time": 300_000, "avg_backward_compute_comm_overlap_time": 100_000}
    own = {"rank": rank, "memory_growth_bytes": 50_000_000, "weights_sha256": "0" * 64}
    write_atomic(folder / "summary.json", {**own, "strategy": {**figures, "bucket_sizes": [17064, 1024]}})
    account = {"rank": rank, "time": 1.7e9, "kind": "MemoryError", "message": "no more", "exit_code": 1}
    write_atomic(folder / "failure.json", {**account, "consequence": False, "step": 3})
    operator = {"name": "aten::conv2d", "calls": 5, "self_cpu_share": 0.5, "self_cpu_us": 10.0, "cpu_total_us": 20.0}
    content = {"first_step": 11, "steps": 2, "between": ["evaluation"]}
    write_atomic(folder / "operators.json", {**content, "operators": [{**operator, "cpu_memory_bytes": 100}]})
    about = {"format": 1, "run": run.id, "strategy": "ddp", "host": "h", "clock": "c"}
    events = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        _span(rank, "step", "step 11", 1000, 900, step=11),
        _span(rank, "phase", "forward", 1000, 400, step=11),
        _span(rank, "phase", "backward", 1400, 500, step=11),
        _span(rank, "exchange", "exchange bucket 0", 1600, 250, step=11, bucket=0, bytes=17064),
        _span(rank, "launch", "launch", 1600, 10, step=11, bucket=0),
    ]
    info = {"backend": "gloo", "rank": rank, "world_size": 2}
    write_atomic(
        folder / "trace.json",
        {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "lockstep": about,
            "distributedInfo": info,
            "traceEvents": events,
        },
    )


def _span(rank: int, kind: str, name: str, begin: float, took: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": took, "pid": rank, "tid": 1, "args": more}


def _ways(run: Run) -> None:
    ranks = run.spec().placement.ranks
    beside = Run(run.folder / BESIDE)
    beside.folder.mkdir(parents=True)
    names = ("data", "forward", "backward", "exchange", "waiting", "optimizer", "other", "total")
    phases = [dict.fromkeys(names, 0.0001)] * ranks
    ways = [
        Way(name=name, samples=32, ranks=ranks, threads=1, steps=10, rounds=[[0.002] * ranks] * 5, phases=phases)
        for name in ("whole", "plain", "wrapped", "apart", "together", "no-data", "double", "fewer-threads")
    ]
    write_atomic(beside.folder / FILE, {"ways": msgspec.to_builtins(ways)})
    beside.write_status("done")


def study_folder(root: Path, repeats: int = 2) -> StudyFolder:
    folder = StudyFolder(root / "studies" / "mine")
    folder.path.mkdir(parents=True)
    cells = [
        Cell(name=name, recipe=RECIPE, placement=place, plan=plan(RECIPE, place, 1000, 500))
        for name, place in PLACES.items()
    ]
    items = []
    for repeat in range(repeats):
        for cell in cells:
            digest = hashlib.sha256(f"{cell.name} {repeat}".encode()).hexdigest()[:12]
            item = Item(cell=cell.name, repeat=repeat, seed=repeat, digest=digest)
            items.append(item)
            run = run_folder(root, f"study-{cell.name}-{digest}", cell.name, repeat)
            folder.begins(item, run.id)
            began = 1.7e9 + 20 * len(items)
            record = {
                "cell": cell.name,
                "repeat": repeat,
                "seed": repeat,
                "digest": digest,
                "state": "done",
                "run": run.id,
            }
            times = {
                "fit_s": 9.0,
                "prepare_s": 1.0,
                "start_s": 2.0,
                "finish_s": 0.5,
                "began": began,
                "ended": began + 12,
            }
            folder.log({**record, **times})
    claims = [Claim(text="two is faster", metric="seconds", more="one", less="two", ratio=1.5)]
    study = Study(
        name="mine",
        about="a study",
        cells={"one": {"ranks": 1}, "two": {"ranks": 2}},
        repeats=repeats,
        published=[Published(source="A: a report", figures={"one": "160.7 s"}, claims=claims)],
    )
    planned = Planned(study=study, cells=cells, items=items)
    folder.write(planned)
    _race(folder, planned)
    return folder


def _race(folder: StudyFolder, planned: Planned) -> None:
    windows = [
        Window(
            contender=cell.name,
            start=start,
            round=number,
            steps=10,
            samples=640,
            wall=0.05 / cell.placement.ranks + 0.001 * number,
            cpu=0.05,
            phases=dict.fromkeys(("data", "forward", "backward", "exchange", "optimizer"), 0.01),
        )
        for start in range(1, 5)
        for number in range(4)
        for cell in planned.cells
    ]
    for window in windows:
        append_line(folder.path / timing.WINDOWS, msgspec.to_builtins(window))
    for cell in planned.cells:
        started = timing.Started(cell=cell.name, start=1, evaluation=0.1, memory=5e7, memory_of_a_rank=3e7)
        append_line(folder.path / timing.STARTED, msgspec.to_builtins(started))
    hashes = dict(zip(("cells", "own"), timed_content(planned), strict=True))
    ratios = estimate.ratios(windows, racing.pairs(planned))
    state = timing.State(**hashes, over=True, seconds=60.0, budget=60.0, starts=4, ratios=ratios)
    write_atomic(folder.path / timing.STATE, msgspec.to_builtins(state))


# What a value in a JSON file is replaced by.
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -0.5, 1e300, -1e300, 0.0, 1e-320, "", "x", "done", "running", "\x1b[2J[/bold]", "../../etc", [], [None],
    [1, "x"], {}, {"a": {}}, {"state": None}, "\ud800", float("nan"), float("inf"),
]  # fmt: skip


def cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)])


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def gone(path: Path, rng: random.Random) -> None:
    path.unlink()


def flipped(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 8, 64))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def random_bytes(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.choice((1, 7, 200, 5000))))


def odd_json(path: Path, rng: random.Random) -> None:
    texts = (b"null", b"[]", b"{}", b"3", b'"x"', b"NaN", b"[" * 100_000, b'{"a":' * 50_000, b'{"state":1e999}', b"\xff\xfe", b'{"x":' + b"9" * 5000 + b"}")  # fmt: skip
    path.write_bytes(rng.choice(texts))


def fifo(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def device(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/tty", "/nowhere")))


def served(path: Path, rng: random.Random) -> None:
    path.unlink()
    kept = Path.cwd()
    os.chdir(path.parent)  # a socket's name is at most 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(kept)


def other_file(path: Path, rng: random.Random) -> None:
    """Another file of the same folder in its place."""
    others = [each for each in sorted(path.parent.iterdir()) if each.is_file() and each != path]
    if others:
        shutil.copy(rng.choice(others), path)


def _edit(change: Callable[[Any, Any, random.Random], None]) -> Callable[[Path, random.Random], None]:
    """Change one value somewhere in a JSON or JSONL file."""

    def edit(path: Path, rng: random.Random) -> None:
        try:
            lines = (
                [json.loads(line) for line in path.read_text().split("\n") if line] if path.suffix == ".jsonl" else None
            )
            content = lines if lines is not None else json.loads(path.read_text())
        except (ValueError, RecursionError):  # damaged already
            flipped(path, rng)
            return
        places = list(_places(content))
        if not places:
            return
        holder, key = rng.choice(places)
        change(holder, key, rng)
        text = "".join(json.dumps(line) + "\n" for line in lines) if lines is not None else json.dumps(content)
        path.write_text(text)

    edit.__name__ = change.__name__
    return edit


def _places(content: Any) -> Any:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(items):
        yield content, key
        yield from _places(value)


def without_a_key(holder: Any, key: Any, rng: random.Random) -> None:
    del holder[key]


def another_value(holder: Any, key: Any, rng: random.Random) -> None:
    holder[key] = rng.choice(ODD)


def one_more_key(holder: Any, key: Any, rng: random.Random) -> None:
    if isinstance(holder, dict):
        holder["a key of a later version"] = rng.choice(ODD)
    else:
        holder.append(rng.choice(ODD))


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    cut, empty, gone, flipped, random_bytes, odd_json, fifo, folder, loop, device, served, other_file,
    *(_edit(change) for change in (without_a_key, another_value, one_more_key)) ,
    _edit(another_value), _edit(another_value), _edit(without_a_key),
]  # fmt: skip


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith((".lock", "lock")))
