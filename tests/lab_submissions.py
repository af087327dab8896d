"""Hand-ins that are wrong, each in one way that a person could come up with, made of right ones; and the code of wrong solutions.

A forger who knows how hand-ins are made writes every seal, every hash of the ledger and the manifest anew (`forged`). What is left for
grading to notice is then in the records themselves.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from house import ROOT
from lockstep.lab.chain import Record
from lockstep.lab.seal import SPEC, spec_digest
from lockstep.measure.records import PHASES, ROW
from lockstep.run import Spec

Members = dict[str, bytes]
LEDGER = "lab/ledger.jsonl"

# ---- a teacher's own lab, small enough to be trained in seconds

LAB = """
name = "mini"
title = "One rank and two"
about = "For the tests."
minutes = 1
words = "data=embedded train_limit=703 test_limit=501 global_batch=48 epochs=2 optimizer.lr=0.005 threads=1 fused=false"

[[tasks]]
name = "speedup"
kind = "predict"
about = "How much faster?"
points = 10
figure = "images_per_second"
of = "two"
over = "one"

[[tasks]]
name = "one"
kind = "run"
about = "One rank."
points = 10
words = "ranks=1"

[[tasks]]
name = "two"
kind = "run"
about = "Two ranks."
points = 10
words = "ranks=2 backend=gloo strategy=ddp"

[[tasks]]
name = "accuracy"
kind = "claim"
about = "The test accuracy."
points = 10
figure = "test_accuracy"
of = "two"
"""

CODE = """
name = "{name}"
title = "Write it"
about = "For the tests."
minutes = 1

[[tasks]]
name = "{name}"
kind = "{kind}"
about = "Write it."
points = 10
file = "{file}"
object = "{object}"
"""
KINDS = {
    "ring": ("all-reduce", "ring.py", "all_reduce"),
    "mine": ("strategy", "mine.py", "Mine"),
    "loop": ("loop", "loop.py", ""),
    "kernel": ("kernel", "kernel.py", "conv_relu"),
}


def of_one_run() -> str:
    """`mini` with its first run alone."""
    text = LAB.partition('[[tasks]]\nname = "two"')[0].replace('of = "two"\nover = "one"', 'of = "one"')
    return text + "[[tasks]]" + LAB.rpartition("[[tasks]]")[2].replace('of = "two"', 'of = "one"')


def write_labs(folder: Path) -> None:
    """`mini`, and one lab for each kind of code."""
    (folder / "mini").mkdir(parents=True)
    (folder / "mini/lab.toml").write_text(LAB)
    for name, (kind, file, object_) in KINDS.items():
        (folder / name).mkdir()
        (folder / name / "lab.toml").write_text(CODE.format(name=name, kind=kind, file=file, object=object_))


# ---- forging


def members(file: Path) -> Members:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def forged(source: Path, target: Path, change: Callable[[Members], None], clever: bool = True) -> Path:
    """A hand-in with something changed. `clever`: seals, ledger and manifest are made to fit; else the manifest alone."""
    found = members(source)
    change(found)
    if clever:
        _reseal(found)
    write(target, found)
    return target


def write(target: Path, found: Members) -> None:
    manifest = json.loads(found["manifest.json"])
    manifest["members"] = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sorted(found.items())
        if name != "manifest.json"
    ]
    found["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in found.items():
            archive.writestr(name, data)


def ledger(found: Members) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found[LEDGER].splitlines()]


def put_ledger(found: Members, records: list[dict[str, Any]]) -> None:
    """With every hash as it has to be."""
    previous, lines = "", []
    for number, content in enumerate(records):
        record = msgspec.convert({**content, "number": number, "previous": previous}, Record)
        record = msgspec.structs.replace(record, hash=record.digest())
        previous = record.hash
        lines.append(json.dumps(msgspec.to_builtins(record)))
    found[LEDGER] = ("\n".join(lines) + "\n").encode()


def _reseal(found: Members) -> None:
    records = ledger(found)
    for record in records:
        if record["kind"] == "hand-in":
            files = {name: data for name, data in found.items() if name.startswith("lab/") and name != LEDGER}
            record["body"]["files"] = {
                name.removeprefix("lab/"): hashlib.sha256(data).hexdigest() for name, data in files.items()
            }
        if record["kind"] != "run":
            continue
        inside = f"runs/{record['body']['run']}/"
        digests = {
            name.removeprefix(inside): hashlib.sha256(data).hexdigest()
            for name, data in found.items()
            if name.startswith(inside) and not name.endswith("/run.json")
        }
        if f"{inside}run.json" in found:
            digests[SPEC] = spec_digest(msgspec.json.decode(found[f"{inside}run.json"], type=Spec))
        record["body"]["seal"] = digests
    put_ledger(found, records)


def edited_steps(data: bytes, change: Callable[[Any], None]) -> bytes:
    rows = np.frombuffer(data, dtype=ROW).copy()
    change(rows)
    return rows.tobytes()


def edited_json(data: bytes, **values: Any) -> bytes:
    return json.dumps({**json.loads(data), **values}).encode()


def edited_lines(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    lines = [json.loads(line) for line in data.splitlines()]
    for line in lines:
        change(line)
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


# ---- wrong records


def accuracy_changed(by: float) -> Callable[[Members], None]:
    """In both places that have the test accuracy."""

    def changed(record: dict[str, Any]) -> None:
        record["test_accuracy"] = min(1.0, record["test_accuracy"] + by)

    def change(found: Members) -> None:
        found["runs/two-1/epochs.jsonl"] = edited_lines(found["runs/two-1/epochs.jsonl"], changed)
        summary = json.loads(found["runs/two-1/summary.json"])
        changed(summary)
        found["runs/two-1/summary.json"] = json.dumps(summary).encode()

    return change


def better_train_loss(found: Members) -> None:
    """A number of epochs.jsonl that the steps do not come to."""

    def less(record: dict[str, Any]) -> None:
        record["train_loss"] *= 0.9

    found["runs/one-1/epochs.jsonl"] = edited_lines(found["runs/one-1/epochs.jsonl"], less)
    summary = json.loads(found["runs/one-1/summary.json"])
    less(summary)
    found["runs/one-1/summary.json"] = json.dumps(summary).encode()


def longer_steps(found: Members) -> None:
    """The baseline's steps take three times as long as they did."""

    def slow(rows: Any) -> None:
        rows["total_ns"] *= 3

    found["runs/one-1/ranks/0000/steps.bin"] = edited_steps(found["runs/one-1/ranks/0000/steps.bin"], slow)


def stretched_run(found: Members) -> None:
    """Ten times as long, with every moment and every epoch made to fit: what is left is that nothing ran for so long.

    The run takes a tenth of a second, and grading blames nobody for a quarter of one.
    """

    def slow(rows: Any) -> None:
        begin = rows["start_ns"][0]
        rows["start_ns"] = begin + (rows["start_ns"] - begin) * 10
        for name in rows.dtype.names:
            if name.endswith("_ns") and name != "start_ns":
                rows[name] *= 10

    def slower(record: dict[str, Any]) -> None:
        record["train_seconds"] *= 10

    found["runs/one-1/ranks/0000/steps.bin"] = edited_steps(found["runs/one-1/ranks/0000/steps.bin"], slow)
    for name in ("runs/one-1/epochs.jsonl", "runs/one-1/ranks/0000/epochs.jsonl"):
        found[name] = edited_lines(found[name], slower)
    summary = json.loads(found["runs/one-1/summary.json"])
    slower(summary)
    found["runs/one-1/summary.json"] = json.dumps(summary).encode()


def stretched_exchange(found: Members) -> None:
    """The same, and the time in which nothing ran is said to be that of an exchange, by a rank that has no other."""
    stretched_run(found)

    def idle(rows: Any) -> None:
        others = [f"{phase}_ns" for phase in PHASES if phase != "exchange"]
        for name in others:
            rows[name] //= 10
        rows["exchange_ns"] = rows["total_ns"] - sum(rows[name] for name in others)

    found["runs/one-1/ranks/0000/steps.bin"] = edited_steps(found["runs/one-1/ranks/0000/steps.bin"], idle)


def cut_records(found: Members) -> None:
    """The last steps of every rank are gone."""
    for rank in ("0000", "0001"):
        name = f"runs/two-1/ranks/{rank}/steps.bin"
        found[name] = found[name][: -5 * ROW.itemsize]


def shorter_plan(found: Members) -> None:
    """Half of the training, with a plan that asks for no more."""
    spec = json.loads(found["runs/one-1/run.json"])
    half = spec["plan"]["steps_per_epoch"]
    spec["plan"]["total_steps"] = half
    found["runs/one-1/run.json"] = json.dumps(spec).encode()
    found["runs/one-1/ranks/0000/steps.bin"] = found["runs/one-1/ranks/0000/steps.bin"][: half * ROW.itemsize]
    for name in ("runs/one-1/epochs.jsonl", "runs/one-1/ranks/0000/epochs.jsonl"):
        found[name] = found[name].splitlines(keepends=True)[0]


def harmful(key: str, marker: Path) -> Callable[[Members], None]:
    """A recipe in which a key names code that came with the hand-in."""

    def change(found: Members) -> None:
        code = marker.with_suffix(".py")
        code.write_text(f"open({str(marker)!r}, 'w').close()\ndef Net(): pass\n")
        spec = json.loads(found["runs/one-1/run.json"])
        spec["recipe"][key] = f"{code}:Net"
        found["runs/one-1/run.json"] = json.dumps(spec).encode()

    return change


def lost_file(found: Members) -> None:
    del found["runs/two-1/ranks/0001/steps.bin"]


def other_weights(found: Members) -> None:
    """model.pt of the other run; its digest in the records stays that of this one."""
    import torch

    state = torch.load(io.BytesIO(found["runs/one-1/model.pt"]), weights_only=True)
    first = next(iter(state))
    state[first] = state[first] + 0.01
    data = io.BytesIO()
    torch.save(state, data)
    found["runs/two-1/model.pt"] = data.getvalue()


class _Harm:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def pickled(marker: Path) -> Callable[[Members], None]:
    """A model.pt that makes a folder where it is unpickled."""

    def change(found: Members) -> None:
        import torch

        data = io.BytesIO()
        torch.save({"weights": _Harm(marker)}, data)
        found["runs/two-1/model.pt"] = data.getvalue()

    return change


def fewer_steps(found: Members) -> None:
    """A recipe that ends after ten steps, where the task states no end."""
    spec = json.loads(found["runs/one-1/run.json"])
    spec["recipe"]["max_steps"] = 10
    found["runs/one-1/run.json"] = json.dumps(spec).encode()


def later_prediction(found: Members) -> None:
    """The student saw the result, and now has always known it."""
    records = ledger(found)
    for record in records:
        if record["kind"] == "prediction":
            record["body"]["value"] = 0.7
    put_ledger(found, records)


def reordered_prediction(found: Members) -> None:
    """Appended after the runs, in a ledger whose hashes fit."""
    records = [record for record in ledger(found) if record["kind"] != "prediction"]
    late = {"kind": "prediction", "time": records[-1]["time"], "body": {"task": "speedup", "value": 0.7}}
    put_ledger(found, [*records, late])


def claimed(number: float) -> Callable[[Members], None]:
    def change(found: Members) -> None:
        found["lab/answers.toml"] = f"[claims]\naccuracy = {number}\n".encode()

    return change


def renamed_run(of: Path) -> Callable[[Members], None]:
    """The run of another student in the place of one's own, under one's own name for it."""

    def change(found: Members) -> None:
        theirs = {name: data for name, data in members(of).items() if name.startswith("runs/two-1/")}
        for name in [name for name in found if name.startswith("runs/two-1/")]:
            del found[name]
        found.update(theirs)

    return change


def with_own_seed(of: Path) -> Callable[[Members], None]:
    """The same under another id, with a run.json that names the seed of one's own ledger."""

    def change(found: Members) -> None:
        mine = json.loads(found["runs/two-1/run.json"])
        renamed_run(of)(found)
        theirs = json.loads(found["runs/two-1/run.json"])
        theirs["recipe"]["seed"], theirs["created"], theirs["id"] = mine["recipe"]["seed"], mine["created"], "two-9"
        found["runs/two-1/run.json"] = json.dumps(theirs).encode()
        for name in [name for name in found if name.startswith("runs/two-1/")]:
            found[name.replace("two-1", "two-9")] = found.pop(name)
        records = ledger(found)
        for record in records:
            if record["body"].get("run") == "two-1":
                record["body"]["run"] = "two-9"
        put_ledger(found, records)

    return change


# ---- wrong code

RIGHT_BY_ONE = '''
import torch, torch.distributed as dist

def all_reduce(tensor):
    """Everything to rank 0, and back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(tensor.contiguous(), 0)
        back = torch.empty_like(tensor)
        dist.recv(back, 0)
        tensor.copy_(back)
        return
    total, theirs = tensor.clone(), torch.empty_like(tensor)
    for other in range(1, world):
        dist.recv(theirs, other)
        total += theirs
    for other in range(1, world):
        dist.send(total, other)
    tensor.copy_(total)
'''
# Messages between two ranks are all that the task allows.
_SUMMED = RIGHT_BY_ONE.replace("def all_reduce(", "def summed(")
ODD_SIZES = (
    _SUMMED
    + '''
def all_reduce(tensor):
    """Right where the ranks divide the tensor."""
    whole = tensor.numel() - tensor.numel() % dist.get_world_size()
    if whole:
        summed(tensor[:whole])
'''
)
HANGS = '''
import torch, torch.distributed as dist

def all_reduce(tensor):
    """Every rank waits for the one before it, and nobody begins."""
    got = torch.empty_like(tensor)
    dist.recv(got, (dist.get_rank() - 1) % dist.get_world_size())
    tensor += got
'''
RAISES = (
    _SUMMED
    + """
def all_reduce(tensor):
    summed(tensor)
    if tensor.numel() > 100:
        raise IndexError("part 3 of 2")
"""
)
OTHERS_CHANGED = (
    _SUMMED
    + '''
def all_reduce(tensor):
    """Right on rank 0, which then writes something else over what the others have."""
    summed(tensor)
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.send(tensor * 2, other)
    else:
        dist.recv(tensor, 0)
'''
)
BEYOND = (
    _SUMMED
    + '''
def all_reduce(tensor):
    """Sums the whole storage, of which the tensor may be a part."""
    summed(torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()))
'''
)
FORGES = """
import json, os, signal

def conv_relu(x, weight, bias):
    # The trial is ended before it can say what it has found, and a verdict is left in its place.
    verdict = {"right": True, "why": "trust me"}
    try:
        verdict["token"] = json.load(open("request.json"))["token"]
    except OSError:
        pass
    with open("verdict.json", "w") as file:
        json.dump(verdict, file)
    os.kill(os.getppid(), signal.SIGKILL)
"""
BY_TORCH = """
import torch.distributed as dist

def all_reduce(tensor):
    dist.all_reduce(tensor)
"""
BY_LOCKSTEP = """
from lockstep.strategies.flat import Flat

class Mine(Flat):
    pass
"""
_STRATEGY = """
import torch, torch.distributed as dist
from lockstep.strategies import Strategy

class Mine(Strategy):
    _taken, _before = 0, None

    def exchange(self):
        gradients = [p.grad for p in self.bare.parameters() if p.grad is not None]
        {body}

    def after_step(self, number):
        self._taken = number
"""
STRATEGIES = {
    "right": "[dist.all_reduce(gradient) for gradient in gradients]",
    "sum": "[dist.all_reduce(g) or g.mul_(dist.get_world_size()) for g in gradients]",
    "left out": "[dist.all_reduce(gradient) for gradient in gradients[:-1]]",
    "25th": "[dist.all_reduce(g) for g in gradients if (self._taken + 1) % 25]",
    "stale": """[dist.all_reduce(gradient) for gradient in gradients]
        now = gradients[-1].clone()
        if self._before is not None:
            gradients[-1].copy_(self._before)
        self._before = now""",
}


def strategy(name: str) -> str:
    return _STRATEGY.replace("{body}", STRATEGIES[name])


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def sleepy(folder: Path) -> dict[str, str]:
    """The environment of a student who has edited Lockstep: every step of one rank alone begins with a pause."""
    shutil.copytree(ROOT / "src/lockstep", folder / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "lockstep/training/recipe_step.py"
    begin = "        self._records.clock.start()\n"
    pause = "        if self.plan.ranks == 1:\n            __import__('time').sleep(0.03)\n"
    path.write_text(replaced(path.read_text(), begin, begin + pause))
    return {"PYTHONPATH": str(folder), "LOCKSTEP_TEST_ZYGOTE": ""}
