"""`lockstep attach`: any training, unedited, with the same bits; every part of a step is told, and every end is the command's own.

The scripts are started cold, as users do: a process that was forked after importing torch would have no hooks.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.attach.command import script_of
from lockstep.dashboard import stopping
from lockstep.explain import attached, inflating
from lockstep.inside import clock as clocks
from lockstep.inside import launchers, layout
from lockstep.inside.clock import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    EXCHANGE,
    FORWARD,
    FRAMEWORK,
    LOGGING,
    OPTIMIZER,
    READING,
    ZEROING,
    Clock,
)
from lockstep.inside.modules import Modules
from lockstep.inside.rows import GROWTH, Rows
from lockstep.inside.site.sitecustomize import WATCHED
from lockstep.inside.suspects import Suspects
from lockstep.measure.attached import read_beside
from lockstep.measure.phases import NAMES, after_warmup
from lockstep.measure.records import PHASES, ROW, read_steps
from lockstep.run import Run
from slurm_cluster import Cluster
from support import Cli, wait_for


class Numbers(list):  # type: ignore[type-arg]
    """A data set; a list alone cannot have weak references."""


# --- the clock ---------------------------------------------------------------------------------------------------------------


class Bench:
    """A clock whose time goes on only when it is told to, and what it has recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000
        self.rows: list[dict[str, int]] = []
        self.asides = (0, 0)
        monkeypatch.setattr(clocks, "perf_counter_ns", lambda: self.now)
        self.clock = Clock(self._finished, self._aside)

    def _finished(self, start: int, phases: list[int], total: int, beside: list[int], again: bool) -> None:
        if again:
            self.rows.pop()
        named = dict(zip((*layout.BESIDE, "reads"), beside, strict=True))
        self.rows.append({**dict(zip(PHASES, phases, strict=True)), **named, "total": total, "start": start})

    def _aside(self, evaluation: int, checkpoint: int) -> None:
        self.asides = (evaluation, checkpoint)

    def wait(self, nanoseconds: int) -> None:
        self.now += nanoseconds

    def fetch(self, takes: int, end: bool = False) -> None:
        self.clock.fetch()
        self.wait(takes)
        if end:
            self.clock.no_more_batches()
        self.clock.leave()

    def forward(self, takes: int) -> None:
        self.clock.work(FORWARD)
        self.wait(takes)
        self.clock.leave()

    def evaluate(self, takes: int, known: bool = True) -> None:
        self.clock.evaluate(known)
        self.wait(takes)
        self.clock.leave()

    def backward(self, takes: int) -> None:
        self.clock.work(BACKWARD)
        self.wait(takes)
        self.clock.leave_backward()

    def region(self, kind: int, takes: int) -> None:
        self.clock.enter(kind)
        self.wait(takes)
        self.clock.leave()

    def inset(self, kind: int, takes: int) -> None:
        self.clock.inset(kind)
        self.wait(takes)
        self.clock.leave()

    def optimize(self, takes: int, optimizer: int = 1) -> None:
        self.clock.work(OPTIMIZER)
        self.wait(takes)
        self.clock.leave_optimizer(optimizer)

    def step(self) -> None:
        self.fetch(10)
        self.forward(20)
        self.backward(40)
        self.optimize(5)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_the_parts_of_a_step_add_up_and_gaps_belong_to_what_is_beside_them(bench: Bench) -> None:
    bench.step()
    bench.wait(7)  # other: a loss is printed
    bench.fetch(10)
    bench.wait(1)  # data: the batch goes to its device
    bench.forward(20)
    bench.wait(2)  # forward: a loss that is a function
    bench.backward(40)
    bench.wait(3)  # optimizer: gradients are clipped
    bench.optimize(5)
    expected = {"data": 11, "forward": 22, "backward": 40, "exchange": 0, "optimizer": 8, "total": 88}
    assert {key: bench.rows[1][key] for key in expected} == expected
    assert bench.rows[1]["start"] == bench.now - 88


def test_an_exchange_is_taken_out_of_what_it_is_in_and_by_hand_it_begins_with_the_last_gradient(bench: Bench) -> None:
    bench.forward(20)
    bench.clock.enter(BACKWARD)
    bench.wait(30)
    bench.region(EXCHANGE, 8)
    bench.wait(2)
    bench.clock.leave_backward()
    bench.wait(4)  # gradients are collected
    bench.region(EXCHANGE, 6)
    bench.optimize(5)
    assert (bench.rows[0]["backward"], bench.rows[0]["exchange"]) == (32, 18)


def test_what_follows_the_last_gradient_in_backward_is_exposed_exchange(bench: Bench) -> None:
    bench.forward(20)
    bench.clock.exchanges = True
    bench.clock.enter(BACKWARD)
    bench.wait(30)
    bench.clock.ready = bench.now
    bench.wait(12)
    bench.clock.leave_backward()
    bench.wait(1)
    bench.optimize(5)
    row = bench.rows[0]
    assert (row["backward"], row["exchange"], row["optimizer"]) == (30, 12, 6)


def test_accumulated_passes_are_one_step(bench: Bench) -> None:
    for _ in range(3):
        bench.fetch(10)
        bench.forward(20)
        bench.backward(40)
    bench.optimize(5)
    assert len(bench.rows) == 1
    assert (bench.rows[0]["data"], bench.rows[0]["forward"], bench.rows[0]["backward"]) == (30, 60, 120)


def test_of_two_optimizers_a_step_ends_with_the_second(bench: Bench) -> None:
    for _ in range(3):
        bench.fetch(10)
        for optimizer in (1, 2):
            bench.forward(20)
            bench.backward(40)
            bench.optimize(5, optimizer)
    assert [row["total"] for row in bench.rows] == [140, 140, 140]


def test_an_optimizer_that_is_not_used_any_more_ends_no_steps(bench: Bench) -> None:
    bench.optimize(5, 1)
    bench.optimize(5, 2)
    for _ in range(clocks.LEAD_LOST + 10):
        bench.forward(20)
        bench.optimize(5, 1)
    assert len(bench.rows) == 1 + 10


def test_passes_that_an_optimizer_asks_for_are_not_its_own_time(bench: Bench) -> None:
    bench.fetch(10)
    bench.clock.work(OPTIMIZER)
    bench.wait(3)  # other
    bench.forward(20)
    bench.wait(2)  # forward: the loss
    bench.backward(40)
    bench.wait(5)
    bench.clock.leave_optimizer(1)
    row = bench.rows[0]
    assert (row["forward"], row["backward"], row["optimizer"], row["total"]) == (22, 40, 5, 80)


def test_evaluation_is_beside_the_steps_and_the_batch_after_it_is_not(bench: Bench) -> None:
    bench.step()
    bench.wait(100)  # the test set is opened
    for _ in range(3):
        bench.fetch(10)
        bench.evaluate(50)
    bench.fetch(1, end=True)
    bench.wait(30)  # the result is printed
    bench.step()
    expected = {"data": 10, "forward": 20, "backward": 40, "optimizer": 5, "total": 75}
    assert {key: bench.rows[1][key] for key in expected} == expected
    bench.evaluate(50)
    assert bench.asides == (100 + 3 * 60 + 1 + 30 + 50, 0)


def test_a_teacher_is_a_part_of_the_step_and_an_average_of_weights_is_evaluated(bench: Bench) -> None:
    bench.step()
    bench.fetch(10)
    bench.evaluate(50, known=False)  # the teacher
    bench.forward(20)
    bench.backward(40)
    bench.optimize(5)
    assert (bench.rows[1]["forward"], bench.rows[1]["total"]) == (70, 125)
    for _ in range(3):  # weights that were averaged, never trained
        bench.fetch(10)
        bench.evaluate(50, known=False)
    bench.fetch(1, end=True)
    bench.step()
    assert bench.rows[2]["total"] == 75


def test_an_inset_is_a_part_of_its_own_and_says_nothing_about_the_gap_that_it_is_in(bench: Bench) -> None:
    bench.step()
    bench.wait(3)  # other
    bench.inset(LOGGING, 4)
    bench.wait(5)  # other
    bench.fetch(10)
    bench.wait(1)  # data
    bench.inset(ZEROING, 2)  # the optimizer's
    bench.wait(1)  # data
    bench.forward(20)
    bench.wait(2)  # forward: the loss
    bench.inset(READING, 6)
    bench.wait(2)  # forward
    bench.backward(40)
    bench.clock.collected(7)  # taken out of what follows
    bench.wait(7)
    bench.optimize(5)
    row = bench.rows[1]
    assert (row["data"], row["forward"], row["backward"], row["optimizer"]) == (12, 24, 40, 7)
    assert (row["logging"], row["reading"], row["collecting"]) == (4, 6, 7)
    other = row["total"] - sum(row[name] for name in (*PHASES, *layout.BESIDE))
    assert (other, row["total"]) == (8, 108)


def test_what_belongs_to_no_part_is_the_frameworks_while_its_loop_runs(bench: Bench) -> None:
    bench.step()
    bench.clock.rest = FRAMEWORK
    bench.wait(30)
    bench.inset(CALLBACKS, 9)
    bench.wait(3)
    bench.step()
    assert (bench.rows[1]["framework"], bench.rows[1]["callbacks"], bench.rows[1]["total"]) == (33, 9, 117)
    bench.wait(30)
    bench.inset(LOGGING, 9)
    bench.evaluate(50)
    bench.inset(LOGGING, 9)  # of the evaluation
    bench.step()
    assert (bench.rows[2]["total"], bench.rows[2]["logging"]) == (75, 0)


def test_checkpoints_are_beside_the_steps(bench: Bench) -> None:
    bench.step()
    bench.region(CHECKPOINT, 500)
    bench.step()
    assert bench.rows[1]["total"] == 75
    assert bench.asides == (0, 500)


def test_what_a_checkpoint_exchanges_is_the_checkpoints(bench: Bench) -> None:
    bench.step()
    bench.clock.enter(CHECKPOINT)
    bench.wait(5)
    bench.region(EXCHANGE, 100)
    bench.wait(5)
    bench.clock.leave()
    bench.step()
    assert (bench.rows[1]["exchange"], bench.rows[1]["total"], bench.asides) == (0, 75, (0, 110))
    bench.evaluate(50)
    bench.clock.enter(CHECKPOINT)
    bench.region(EXCHANGE, 100)
    bench.clock.leave()
    assert bench.asides == (50, 210)


def test_backward_within_backward_is_one_pass_with_one_exchange(bench: Bench) -> None:
    """As with parts that are computed again (checkpointing)."""
    bench.forward(20)
    bench.clock.exchanges = True
    bench.clock.enter_backward()
    bench.wait(30)
    bench.clock.enter_backward()
    bench.wait(5)
    bench.clock.ready = bench.now
    bench.clock.leave_backward()
    bench.wait(5)
    bench.clock.ready = bench.now
    bench.wait(12)
    bench.clock.leave_backward()
    bench.optimize(5)
    assert (bench.rows[0]["backward"], bench.rows[0]["exchange"]) == (40, 12)
    assert (bench.clock.backwards, bench.clock.exchanged, bench.clock.updates) == (1, 1, 1)


def test_what_comes_before_training_is_in_no_step(bench: Bench) -> None:
    bench.fetch(1000)  # the mean of the data
    bench.evaluate(1000, known=False)  # a check of the evaluation
    bench.wait(1000)
    bench.step()
    assert bench.rows[0]["total"] == 75


def test_a_step_that_an_error_ended_does_not_end_the_record(bench: Bench) -> None:
    bench.step()
    bench.clock.work(OPTIMIZER)  # raises, and the script goes on
    bench.step()
    assert len(bench.rows) == 2


def test_rows_are_those_that_everything_reads(tmp_path: Path) -> None:
    assert ROW.itemsize == layout.ROW_BYTES
    assert layout.HEAD.size == ROW.fields["loss_sum"][1]  # type: ignore[index]
    rows = Rows(str(tmp_path))
    for step in range(1, GROWTH + 3):
        rows.write(1000 * step, [1, 2, 3, 4, 5], 20 + step, [0, 1, 2, 3, 4, 5, 6, 7], again=False)
    rows.write(7, [1, 2, 3, 4, 5], 99, [8] * 8, again=True)
    found = read_steps(tmp_path / "steps.bin")  # before it is closed, as after kill -9
    assert len(found) == GROWTH + 2
    assert found["step"].tolist() == list(range(1, GROWTH + 3))
    assert found["warmup"].sum() == layout.WARMUP_STEPS
    assert (found["exchange_ns"] == 4).all()
    assert found["total_ns"][-1] == 99
    beside = read_beside(tmp_path)
    assert (beside["progress_ns"][0], beside["reads"][0], beside["framework_ns"][GROWTH + 1]) == (2, 7, 8)
    with pytest.raises(FileExistsError):
        Rows(str(tmp_path))


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("torchrun", 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, ("mpirun", 3, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, ("mpirun", 0, 2)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, ("slurm", 1, 2)),
        ({"RANK": "first", "WORLD_SIZE": "2"}, None),
    ],
)
def test_the_place_that_a_launcher_tells(variables: dict[str, str], found: object) -> None:
    assert launchers.place(variables) == found


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --lr 1", "train.py"),
        ("torchrun --nproc-per-node 2 deep/train.py", "train.py"),
        ("python -m torch.distributed.run -m my.module", "my.module"),
        ("./train", "train"),
    ],
)
def test_what_a_command_is_known_by(command: str, name: str) -> None:
    assert script_of(command.split()) == name


# --- whole scripts -----------------------------------------------------------------------------------------------------------

HEAD = """
import os, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
x, y = torch.randn(512, 64), torch.randint(0, 10, (512,))
data = TensorDataset(x, y)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
loss_of = nn.CrossEntropyLoss()
"""
LONGER = HEAD.replace("64, 256", "64, 4096").replace("256, 10", "4096, 10")
"""Steps of several milliseconds. In shorter ones Python between the parts weighs more."""
TAIL = """
torch.save(net.state_dict(), sys.argv[1])
"""
PLAIN = """
optimizer = torch.optim.Adam(net.parameters())
for epoch in range(4):
    for a, b in DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss_of(net(a), b).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        for a, b in DataLoader(data, batch_size=256):
            net(a).argmax(1)
    net.train()
"""
ACCUMULATION = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(8):
    for number, (a, b) in enumerate(DataLoader(data, batch_size=32, shuffle=True), 1):
        (loss_of(net(a), b) / 4).backward()
        if number % 4 == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""
OPTIMIZERS = """
first, second = torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.Adam(net[3].parameters())
for epoch in range(4):
    for a, b in DataLoader(data, batch_size=64, shuffle=True):
        for optimizer in (first, second):
            optimizer.zero_grad()
            loss_of(net(a), b).backward()
            optimizer.step()
"""
AUTOCAST = """
optimizer = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cpu")
for epoch in range(4):
    for a, b in DataLoader(data, batch_size=64, shuffle=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net(a), b)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
OWN_HOOKS = """
seen = {"forward": 0, "layer": 0, "step": 0, "gradient": 0}
def count(name):
    def hook(*_):
        seen[name] += 1
    return hook
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
register_module_forward_hook(count("forward"))
register_optimizer_step_post_hook(count("step"))
net[0].register_forward_hook(count("layer"))
net[0].weight.register_hook(lambda gradient: (count("gradient")(), gradient * 0.5)[1])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(4):
    for a, b in DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss_of(net(a), b).backward()
        optimizer.step()
assert seen == {"forward": 32 * 6, "layer": 32, "step": 32, "gradient": 32}, seen
"""
WORKERS_AND_FORKS = """
optimizer = torch.optim.Adam(net.parameters())
def train(batches):
    for a, b in batches:
        optimizer.zero_grad()
        loss_of(net(a), b).backward()
        optimizer.step()
loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2)
train(loader)
train(loader)
child = os.fork()
if child == 0:  # trains too, and is not the rank that its parent is
    for _ in range(5):
        train([(x, y)])
    os._exit(0)
os.waitpid(child, 0)
train(loader)
train(loader)
import subprocess
subprocess.run([sys.executable, "-c", "import torch; torch.ones(1)"], check=True)
"""
SCRIPTS = {
    "plain": PLAIN,
    "accumulation": ACCUMULATION,
    "optimizers": OPTIMIZERS,
    "autocast": AUTOCAST,
    "own_hooks": OWN_HOOKS,
    "workers_and_forks": WORKERS_AND_FORKS,
}
STEPS = 32


def write(cli: Cli, name: str, text: str) -> None:
    (cli.folder / f"{name}.py").write_text(text)


def attach(cli: Cli, *words: str, options: tuple[str, ...] = (), timeout: float = 120) -> Any:
    return cli("attach", *options, "--", *words, timeout=timeout)


def last(cli: Cli) -> Run:
    return Run.find("last", cli.runs)


def weights(path: Path) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def same_bits(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(
        (ours[key].numpy().tobytes() == theirs[key].numpy().tobytes()) for key in ours
    )


def attributed(rows: Any) -> float:
    """The share of a step's time that has a name: the median, because a script may do anything between two of them."""
    rows = after_warmup(rows)
    return float(np.median(sum(rows[f"{phase}_ns"] for phase in PHASES) / rows["total_ns"]))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_computes_the_same_bits_and_its_steps_are_told(cli: Cli, name: str) -> None:
    write(cli, name, LONGER + SCRIPTS[name] + TAIL)
    found = attach(cli, sys.executable, f"{name}.py", "attached.pt")
    assert found.returncode == 0, found.stderr
    subprocess.run([sys.executable, f"{name}.py", "alone.pt"], cwd=cli.folder, check=True, timeout=120)
    assert same_bits(cli.folder / "attached.pt", cli.folder / "alone.pt")

    run = last(cli)
    rows = read_steps(run.rank_folder(0) / "steps.bin")
    assert len(run.rank_folders()) == 1
    assert len(rows) == STEPS
    assert run.status()["state"] == "done"
    phases = {phase: rows[f"{phase}_ns"].sum() for phase in PHASES}
    assert phases["exchange"] == 0
    assert min(phases[phase] for phase in PHASES if phase != "exchange") > 0
    assert attributed(rows) > 0.95
    lines = [line for line in found.stderr.splitlines() if line.startswith("lockstep: ")]
    assert lines == [line for line in found.stderr.splitlines() if f"{STEPS} steps, " in line]
    assert "not recorded" not in found.stderr
    assert f"next: lockstep explain {run.id}" in found.stderr


DDP = """
import copy, io, os, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(2048, 128), torch.randint(0, 10, (2048,)))
net = DistributedDataParallel(nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
for a, b in loader:
    loss = nn.functional.cross_entropy(net(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
kept = io.BytesIO()
torch.save([net.module, copy.deepcopy(net).module, copy.deepcopy(optimizer)], kept)
assert b"lockstep" not in kept.getvalue()  # no hook of ours is copied or saved with a model
if dist.get_rank() == 0:
    torch.save(net.module.state_dict(), sys.argv[1])
dist.destroy_process_group()
"""


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]


def test_two_ranks_under_torchrun_and_every_command_that_reads_them(cli: Cli) -> None:
    write(cli, "ddp", DDP)
    found = attach(cli, *torchrun("ddp.py", "attached.pt"), options=("--batch", "64", "--name", "two"))
    assert found.returncode == 0, found.stderr
    alone = {**os.environ, "LOCKSTEP_TEST_COLD": "1"}
    subprocess.run(torchrun("ddp.py", "alone.pt"), cwd=cli.folder, check=True, timeout=120, env=alone)
    assert same_bits(cli.folder / "attached.pt", cli.folder / "alone.pt")

    run = last(cli)
    spec = run.spec()
    assert (spec.plan.ranks, spec.placement.launcher, spec.placement.backend) == (2, "torchrun", "gloo")
    assert (spec.placement.strategy, spec.placement.threads, spec.plan.global_batch) == ("ddp", 1, 64)
    ranks = [read_steps(run.rank_folder(rank) / "steps.bin") for rank in range(2)]
    assert [len(rows) for rows in ranks] == [32, 32]
    assert all((rows["exchange_ns"] > 0).all() for rows in ranks)
    assert min(map(attributed, ranks)) > 0.95
    summary = run.summary() or {}
    assert summary["images_per_second"] == pytest.approx(64 * 32 / summary["train_seconds"])
    assert "32 steps on 2 ranks" in found.stderr
    step, *parts = (
        float(value) * {"s": 1e6, "ms": 1e3, "µs": 1, "ns": 1e-3}[unit]
        for value, unit in re.findall(r"(?:^  \w+ +|ranks, )([\d.]+) (s|ms|µs|ns)\b", found.stderr, re.MULTILINE)
    )
    assert len(parts) == len(NAMES)
    assert sum(parts) == pytest.approx(step, rel=0.01), found.stderr

    for words in (
        ("show", "two", "--ranks"),
        ("show", "two", "--json"),
        ("explain", "two"),
        ("report", "two", "-o", "page.html"),
        ("runs",),
        ("compare", "two"),
        ("export", "two", "-o", "runs.csv"),
        ("export", "two", "-o", "steps.csv", "--what", "steps"),
    ):
        answer = cli(*words)
        assert answer.returncode == 0, (words, answer.stderr)
        assert "Traceback" not in answer.stderr
    shown = cli("show", "two").stdout
    assert "64 = over 2 ranks, as --batch says" in shown
    # What nobody knows is not made up from defaults.
    exported = (cli.folder / "runs.csv").read_text()
    page = (cli.folder / "page.html").read_text()
    assert "optimizer" not in exported.splitlines()[0]
    assert "optimizer.lr" not in page
    for words in (("explain", "two", "--measure"), ("quantize", "two")):
        answer = cli(*words)
        assert (answer.returncode, len(answer.stderr.splitlines())) == (2, 1), answer.stderr
        assert any(text in answer.stderr for text in ("needs a recipe", "of your own"))


@pytest.mark.parametrize(
    "wrapped",
    [
        "Outer(DistributedDataParallel(net, **given))",
        'torch.compile(DistributedDataParallel(net, **given), backend="eager")',
    ],
    ids=["in a module", "compiled"],
)
def test_a_strategy_is_found_wherever_in_the_model_it_stands(cli: Cli, wrapped: str) -> None:
    """In a module of the script's own, or within what torch.compile has made of it."""
    outer = """
class Outer(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
    def forward(self, batch):
        return self.net(batch)
given = {"find_unused_parameters": True, "bucket_cap_mb": 2}
"""
    net = "nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))"
    text = DDP.replace(f"net = DistributedDataParallel({net})", f"{outer}net = {net}\nnet = {wrapped}")
    write(cli, "nested", text[: text.index("kept = ")] + "dist.destroy_process_group()\n")
    found = attach(cli, *torchrun("nested.py"))
    assert found.returncode == 0, found.stderr
    run = last(cli)
    assert run.spec().placement.strategy == "ddp"
    seen = json.loads((run.rank_folder(0) / "status.json").read_text())["attached"]
    assert (seen["find_unused_parameters"], seen["bucket_mb"], seen["unused"]) == (True, 2.0, [31, 0])
    assert (seen["exchanged"], seen["updates"]) == (32, 32)
    assert (read_steps(run.rank_folder(0) / "steps.bin")["exchange_ns"] > 0).all()
    assert "remains unknown" not in found.stderr


def test_the_exchange_of_divided_parameters_is_seen(cli: Cli) -> None:
    net = "nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))"
    text = DDP.replace(f"net = DistributedDataParallel({net})", f"net = {net}\nfully_shard(net)")
    text = text.replace(
        "import DistributedDataParallel",
        "import DistributedDataParallel\nfrom torch.distributed.fsdp import fully_shard",
    )
    write(cli, "sharded", text[: text.index("kept = ")] + "dist.destroy_process_group()\n")
    found = attach(cli, *torchrun("sharded.py"))
    assert found.returncode == 0, found.stderr
    run = last(cli)
    assert run.spec().placement.strategy == "fsdp"
    ranks = [read_steps(run.rank_folder(rank) / "steps.bin") for rank in range(2)]
    assert [len(rows) for rows in ranks] == [32, 32]
    assert all((rows["exchange_ns"] > 0).all() for rows in ranks)


def test_what_is_not_known_is_said(cli: Cli) -> None:
    write(cli, "plain", HEAD + PLAIN + TAIL)
    found = attach(cli, sys.executable, "plain.py", "x.pt")
    assert "global batch: not known; --batch N tells" in found.stderr
    assert "between the steps: evaluation" in found.stderr
    assert "the hooks took at least" in found.stderr
    assert "not known; --batch N tells" in cli("show", "last").stdout
    listed = json.loads(cli("runs", "--json").stdout)[0]
    assert (listed["global_batch"], listed["epochs"], listed["images_per_second"]) == (None, None, None)
    explained = cli("explain", "last").stdout
    assert "not known; --batch N tells" in explained
    assert "recommendation" not in explained


BY_HAND = """
import os, sys, torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
rank, world = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=world)
net = nn.Linear(64, 10)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(20):
    optimizer.zero_grad()
    net(torch.randn(32, 64)).sum().backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
dist.destroy_process_group()
"""
SPAWNED = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
def work(rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=2)
    net = nn.parallel.DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        net(torch.randn(32, 64)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "launcher", "seen"),
    [(BY_HAND, "mpirun", ("mpirun", "own")), (SPAWNED, "", ("spawn", "ddp"))],
    ids=["mpirun", "torch.multiprocessing"],
)
def test_other_launchers(cli: Cli, script: str, launcher: str, seen: tuple[str, str]) -> None:
    words = [str(Path(sys.executable).with_name(launcher)), "-n", "2"] if launcher else []
    if words and not Path(words[0]).exists():
        pytest.skip("there is no mpirun beside Python (MPICH's wheel)")
    write(cli, "ranks", script)
    found = attach(cli, *words, sys.executable, "ranks.py")
    assert found.returncode == 0, found.stderr
    run = last(cli)
    placement = run.spec().placement
    assert (placement.launcher, placement.strategy) == seen
    ranks = [read_steps(run.rank_folder(rank) / "steps.bin") for rank in range(2)]
    assert [len(rows) for rows in ranks] == [20, 20]
    assert all((rows["exchange_ns"] > 0).all() for rows in ranks)


@pytest.mark.slow
@pytest.mark.cold
def test_within_an_sbatch_script_the_ranks_of_srun_are_one_run(cli: Cli, cluster: Cluster) -> None:
    write(cli, "ranks", BY_HAND.replace("PMI_RANK", "SLURM_PROCID").replace("PMI_SIZE", "SLURM_NTASKS"))
    cli.environment |= cluster.environment
    words = shlex.join(cli.argv("attach", "--", "srun", sys.executable, "ranks.py"))
    job = cli.folder / "job.sh"
    job.write_text(
        f"#!/bin/sh\ncd {shlex.quote(str(cli.folder))}\nexport LOCKSTEP_RUNS={shlex.quote(str(cli.runs))}\n{words}\n"
    )
    said = cli.folder / "said.txt"
    cluster("sbatch", "-N2", "--ntasks-per-node=1", f"--output={said}", str(job))
    runs = lambda: [Run(path.parent) for path in cli.runs.glob("*/run.json")]  # noqa: E731
    wait_for(lambda: any(run.status()["state"] in ("done", "failed") for run in runs()), seconds=120, what="its end")
    (run,) = runs()
    assert run.status()["state"] == "done", said.read_text()
    wait_for(lambda: cluster.idle() == 2, seconds=30, what="both nodes to be idle again")
    assert (run.spec().placement.launcher, run.spec().plan.ranks) == ("slurm", 2)
    assert [len(read_steps(run.rank_folder(rank) / "steps.bin")) for rank in range(2)] == [20, 20]


def test_of_two_trainings_at_once_one_is_recorded_and_the_other_says_so(cli: Cli) -> None:
    write(cli, "plain", HEAD + PLAIN + TAIL)
    one = f"{sys.executable} plain.py"
    found = attach(cli, "sh", "-c", f"{one} a.pt & {one} b.pt; wait")
    assert found.returncode == 0, found.stderr
    assert same_bits(cli.folder / "a.pt", cli.folder / "b.pt")
    assert found.stderr.count("another process of this command is rank 0 already") == 1
    assert len(read_steps(last(cli).rank_folder(0) / "steps.bin")) == STEPS


PLANTED = """
import os, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.0002)
        return super().__getitem__(index)
torch.set_num_threads(8)
dist.init_process_group("gloo")
data = Slow(torch.randn(2048, 128), torch.randint(0, 10, (2048,)))
layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.ReLU())]
net = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(128, 10)), bucket_cap_mb=0.01, find_unused_parameters=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for a, b in DataLoader(data, batch_size=32, sampler=DistributedSampler(data)):
    loss = nn.functional.cross_entropy(net(a), b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_usual_suspects_are_named(cli: Cli) -> None:
    """A loader without workers, more threads than cores, a search for unused parameters, small buckets: each with its number."""
    write(cli, "planted", PLANTED)
    found = attach(cli, *torchrun("planted.py"))
    assert found.returncode == 0, found.stderr
    document = json.loads(cli("explain", "last", "--json").stdout)
    findings = {each["figures"].get("cause"): each for each in document["findings"]}
    assert {"loader", "threads", "unused", "buckets"} <= findings.keys()
    assert "its DataLoader has no workers" in findings["loader"]["why"]
    assert findings["loader"]["next"] == "num_workers=1 or more"
    assert "bucket_cap_mb=0.01 instead of 25" in findings["buckets"]["verdict"]
    assert "2 ranks x 8 threads" in findings["threads"]["verdict"]


# Nanoseconds that a loader takes for its start, and again for its first batch.
TOOK = 10**9


class Idle(DataLoader):  # type: ignore[type-arg]
    """Its workers are not started: they would take seconds."""

    def __iter__(self) -> Any:
        return iter([])


class Loops:
    """What the hooks tell the suspects of loops over loaders: of training, or of evaluation."""

    def __init__(self) -> None:
        self.clock = Clock(lambda *_: None, lambda *_: None)
        self.suspects = Suspects(self.clock, {})
        gc.callbacks.remove(self.suspects._collecting)

    def over(
        self, loader: Any, evaluates: bool = False, every: int = 1, then: Callable[[], None] = lambda: None
    ) -> None:
        """`every` so many batches, fetched together, are made use of; `then` comes after each time."""
        iterator = iter(loader)
        self.suspects.loader_starts(loader, iterator, TOOK)
        for number in range(1, len(loader) + 1):
            self._fetch(iterator)
            if number % every == 0:
                self.evaluate() if evaluates else self.learn()
                then()
        self._fetch(iterator)

    def _fetch(self, iterator: Any) -> None:
        loader = self.suspects.fetches(iterator)
        if loader is not None and loader.fresh:
            self.suspects.fetched(loader, TOOK)

    def learn(self) -> None:
        self.clock.backwards += 1
        self.clock.work(OPTIMIZER)
        self.clock.leave_optimizer(1)

    def evaluate(self) -> None:
        self.clock.evaluate(True)
        self.clock.leave()

    def seen(self) -> dict[str, Any]:
        self.suspects.told()
        return self.suspects.seen


def test_passes_over_the_training_set_that_do_not_train_have_the_order_of_their_epoch() -> None:
    """As for the accuracy on its samples: set_epoch is called once an epoch, and is not missing."""
    data = Numbers(range(64))
    loops, sampler = Loops(), DistributedSampler(data, 2, 0)
    loader = DataLoader(data, 8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loops.over(loader)
        loops.over(loader, evaluates=True)
    assert loops.seen()["loader"]["same_order"] == 0
    loops.over(loader)
    assert (loops.seen()["loader"]["same_order"], loops.seen()["loader"]["epochs"]) == (1, 4)


def test_a_loader_that_is_made_anew_in_every_epoch_is_one_and_that_of_the_evaluation_another() -> None:
    data, test, loops = Numbers(range(64)), Numbers(range(64)), Loops()
    for _ in range(3):
        loops.over(DataLoader(data, 8, shuffle=True))
        loops.over(DataLoader(test, 8, shuffle=True), evaluates=True)
    seen = loops.seen()
    assert (seen["loader"]["passes"], seen["loader"]["trained"], seen["loader"]["evaluated"]) == (3, 24, 0)
    assert [(each["passes"], each["evaluated"]) for each in seen["evaluated_by"]] == [(3, 24)]


@pytest.mark.parametrize(
    ("anew", "persistent", "next_"),
    [
        (True, False, "make the DataLoader once, before the first epoch, with persistent_workers=True"),
        (True, True, "make the DataLoader once, before the first epoch, with persistent_workers=True"),
        (False, False, "persistent_workers=True"),
        (False, True, None),
    ],
)
@pytest.mark.parametrize("peeks", [0, 2])
def test_workers_that_start_anew_in_every_epoch_are_told_from_a_look_at_a_batch(
    peeks: int, anew: bool, persistent: bool, next_: str | None
) -> None:
    data, loops = Numbers(range(64)), Loops()

    def made() -> Any:
        return Idle(data, 8, num_workers=1, persistent_workers=persistent)

    for _ in range(peeks):
        loops.suspects.loader_starts(loader := made(), loops, TOOK)
        del loader
    once = None if anew else made()
    for _ in range(5):
        loops.over(once or made())
    seen = loops.seen()
    found = list(inflating.workers(SimpleNamespace(summary={"train_seconds": 20.0}), seen))  # type: ignore[arg-type]
    assert [each.next for each in found] == ([next_] if next_ else [])
    if found:
        assert (found[0].figures["starts"], found[0].figures["start_s"]) == (4, 8.0)


def _padding(samples: int) -> Any:
    """As rank 0 of 8 sees it."""
    data = Numbers(range(samples))
    return DataLoader(data, 2, sampler=DistributedSampler(data, 8, 0, shuffle=False))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("has_loader", [True, False])
def test_an_evaluation_in_the_middle_of_an_epoch_counts_no_batch_of_the_training(every: int, has_loader: bool) -> None:
    """Also where batches are fetched before they are needed, as Transformers does where it accumulates."""
    loops, training, evaluation = Loops(), _padding(63), _padding(59)
    for _ in range(2):
        loops.over(
            training,
            every=every,
            then=(lambda: loops.over(evaluation, evaluates=True)) if has_loader else loops.evaluate,
        )
    seen = loops.seen()
    assert (seen["loader"]["evaluated"], seen["loader"]["trained"]) == (0, 8 // every)
    assert [each["evaluated"] for each in seen["evaluated_by"]] == ([4 * 8 // every] if has_loader else [])
    evaluates = ["the evaluation counts 5 samples twice: its sampler pads"] if has_loader else []
    told = [each.verdict for each in attached._learning(None, {**seen, "steps": 0})]  # type: ignore[arg-type]
    assert told == ["an epoch has 1 sample twice: its sampler pads", *evaluates]


def test_what_suspects_stumble_over_is_one_line_and_the_script_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    loops = Loops()
    loops.clock.steps = 3
    loops.suspects.stepped(SimpleNamespace(param_groups=[{"params": []}], defaults={}))
    assert not loops.suspects.failed, "an optimizer may have nothing left to update"
    for _ in range(2):
        loops.suspects.stepped(SimpleNamespace())
    loops.over([])
    said = capsys.readouterr().err
    assert said.count("lockstep attach: the usual suspects are not looked for any more: AttributeError") == 1
    assert len(said.splitlines()) == 1


def test_a_model_that_is_gone_is_not_taken_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    """Its identity may be given to the next one."""
    from torch import nn

    loops = Loops()
    modules = Modules(SimpleNamespace(clock=loops.clock, seen={}), loops.suspects)  # type: ignore[arg-type]
    net = nn.Linear(2, 2)
    learner = modules._look(net)
    assert (list(modules._learners), learner.size, learner.trains) == ([id(net)], 1, True)
    learner.exchanging = [SimpleNamespace()]  # type: ignore[list-item]  # what DDP does not have any more is our affair alone
    for _ in range(2):
        modules._exchanges(learner)
        assert not loops.clock.exchanges
    assert capsys.readouterr().err.count("what the model exchanges is not told apart: AttributeError") == 1
    del net
    gc.collect()
    assert modules._learners == {}


def test_each_model_in_a_module_has_its_own_size() -> None:
    """Two of them, as a GAN has: a call of one costs the hooks what one has. In whichever order they are called."""
    from torch import nn

    for whole_first in (True, False):
        loops = Loops()
        modules = Modules(SimpleNamespace(clock=loops.clock, seen={}), loops.suspects)  # type: ignore[arg-type]
        small, large = nn.DataParallel(nn.Linear(2, 2)), nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        whole = nn.ModuleList([small, large])
        for each in (whole, small) if whole_first else (small, whole):
            modules._look(each)
        sizes = {part: modules._learners[id(part)].size for part in (whole, small, small.module, large, large.module)}
        assert sizes == {whole: 7, small: 2, small.module: 1, large: 4, large.module: 3}


def test_every_loader_that_pads_is_a_finding() -> None:
    def loader(evaluated: int, padded: int = 1) -> dict[str, Any]:
        return {"padded": padded, "samples": 63, "shares": 2, "evaluated": evaluated}

    def found(trains: dict[str, Any], *evaluate: dict[str, Any]) -> list[tuple[str, bool]]:
        seen = {"loader": trains, "evaluated_by": list(evaluate)}
        return [(each.verdict.partition(":")[0], each.wrong) for each in attached._learning(None, seen)]  # type: ignore[arg-type]

    epoch, one, five = (
        ("an epoch has 1 sample twice", False),
        ("the evaluation counts 1 sample twice", True),
        ("the evaluation counts 5 samples twice", True),
    )
    assert found(loader(0), loader(8), loader(8)) == [epoch, one]
    assert found(both := loader(8), both, loader(8, padded=5)) == [one, five], "the training set is evaluated too"


def test_nn_data_parallel_is_named(cli: Cli) -> None:
    write(cli, "parallel", HEAD + "net = nn.DataParallel(net)\n" + PLAIN)
    assert attach(cli, sys.executable, "parallel.py").returncode == 0
    assert "nn.DataParallel" in cli("explain", "last").stdout


# --- ends --------------------------------------------------------------------------------------------------------------------


def test_a_script_that_never_calls_an_optimizer(cli: Cli) -> None:
    write(cli, "infer", HEAD + "print(net(x).shape)")
    found = attach(cli, sys.executable, "infer.py")
    assert found.returncode == 0
    assert found.stdout == "torch.Size([512, 10])\n"
    assert [line for line in found.stderr.splitlines() if line] == [
        "lockstep: no step was seen: the command never called an optimizer of torch.optim in a Python that reads "
        "PYTHONPATH (docs/attach.md#limits)"
    ]
    assert not last(cli).rank_folders()[1:]
    assert cli("show", "last").returncode == 0
    assert cli("explain", "last").returncode == 0


def test_a_command_that_does_not_exist(cli: Cli) -> None:
    found = attach(cli, "no-such-program", "train.py")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        "lockstep: attach: cannot start 'no-such-program': there is no such program; write the command after '--'\n"
    )
    assert not cli.runs.exists()
    nothing = cli("attach")
    assert (nothing.returncode, len(nothing.stderr.splitlines())) == (2, 1)


def test_programs_beside_our_python_are_found_where_nothing_is_activated(cli: Cli) -> None:
    """`.venv/bin/lockstep attach -- torchrun …`, as README has it; but an environment that is activated comes first."""
    look = ("--", "python", "-c", "import shutil; print(shutil.which('torchrun'))")
    found = cli("attach", *look, PATH="/nowhere")
    assert (found.returncode, found.stdout) == (0, f"{Path(sys.executable).with_name('torchrun')}\n"), found.stderr
    users = cli.folder / "activated/python"
    users.parent.mkdir()
    users.write_text("#!/bin/sh\necho the python of the user\n")
    users.chmod(0o755)
    assert cli("attach", *look, PATH=str(users.parent)).stdout == "the python of the user\n"


@pytest.mark.cold
def test_a_script_that_fails_keeps_its_steps_and_its_exit_code(cli: Cli) -> None:
    fails = """
class Fails(nn.Module):
    def forward(self, batch):
        raise RuntimeError("the disk of the user is round")
nn.Sequential(net, Fails())(x)
"""
    write(cli, "fails", HEAD + PLAIN + fails)
    found = attach(cli, sys.executable, "fails.py")
    assert found.returncode == 1
    run = last(cli)
    status = run.status()
    assert status["state"] == "failed"
    assert status["cause"] == "rank 0 after step 32: RuntimeError: the disk of the user is round (exit code 1)"
    alone = subprocess.run([sys.executable, "fails.py"], cwd=cli.folder, capture_output=True, text=True, timeout=120)
    assert alone.stderr.splitlines()[-1] == "RuntimeError: the disk of the user is round"
    assert found.stderr.startswith(alone.stderr)  # its traceback, with no frame of ours
    assert f"lockstep: the command failed: {status['cause']}" in found.stderr
    assert "32 steps, " in found.stderr
    assert "32 in all" in cli("show", "last").stdout


def test_a_script_that_fails_before_its_first_step(cli: Cli) -> None:
    write(cli, "fails", HEAD + 'raise FileNotFoundError("no data here")')
    assert attach(cli, sys.executable, "fails.py").returncode == 1
    assert last(cli).status()["cause"] == "rank 0: FileNotFoundError: no data here (exit code 1)"
    assert cli("show", "last").returncode == 0


@pytest.mark.slow
def test_the_rank_that_failed_is_named(cli: Cli) -> None:
    fails = '    if dist.get_rank() == 1 and len(seen) == 20: raise ValueError("this rank has had enough")\n    seen.append(1)\n'
    script = DDP.replace("for a, b in loader:\n", f"seen = []\nfor a, b in loader:\n{fails}")
    write(cli, "fails", script)
    found = attach(cli, *torchrun("fails.py", "x.pt"))
    assert found.returncode == 1
    assert last(cli).status()["cause"] == "rank 1 after step 20: ValueError: this rank has had enough (exit code 1)"


def test_exit_codes_are_passed_on(cli: Cli) -> None:
    write(cli, "exits", "import sys; sys.exit(7)")
    assert attach(cli, sys.executable, "exits.py").returncode == 7
    assert "exit code 7" in last(cli).status()["cause"]
    assert not (last(cli).folder / ".reserve").exists()
    # Without '--', what follows the program is the program's too.
    assert cli("attach", sys.executable, "exits.py", "--name", "its-own").returncode == 7
    assert last(cli).id != "its-own"


def test_os_exit_and_kill_lose_nothing(cli: Cli) -> None:
    write(cli, "leaves", HEAD + PLAIN + "os._exit(0)")
    assert attach(cli, sys.executable, "leaves.py").returncode == 0
    run = last(cli)
    assert len(read_steps(run.rank_folder(0) / "steps.bin")) == 32
    assert (run.summary() or {})["eval_seconds"] > 0
    write(cli, "killed", HEAD + PLAIN + "import signal; os.kill(os.getpid(), signal.SIGKILL)")
    found = attach(cli, sys.executable, "killed.py")
    assert found.returncode == 128 + signal.SIGKILL
    run = last(cli)
    assert len(read_steps(run.rank_folder(0) / "steps.bin")) == 32
    assert "SIGKILL" in run.status()["cause"]


FOREVER = """
optimizer = torch.optim.Adam(net.parameters())
child = os.fork()
if child == 0:
    import time
    time.sleep(1000)
open("pids", "w").write(f"{os.getpid()} {child}")
try:
    while True:
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()
except KeyboardInterrupt:
    open("said", "w").write("saved")
    raise
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.cold
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopping_it_leaves_nothing_running(cli: Cli, number: signal.Signals) -> None:
    write(cli, "forever", HEAD + FOREVER)
    process = cli.start("attach", "--", sys.executable, "forever.py")
    run = wait_for(lambda: next((Run(p.parent) for p in cli.runs.glob("*/run.json")), None), what="the run folder")
    wait_for(lambda: len(read_steps(run.rank_folder(0) / "steps.bin")) > 20, what="steps")
    wait_for(lambda: run.status()["state"] == "running", what="the status")
    assert stopping.watcher(run).pid == process.pid  # the dashboard can stop it too
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    pids = [int(pid) for pid in (cli.folder / "pids").read_text().split()]
    wait_for(lambda: not any(map(alive, pids)), what="the end of all processes")
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert (cli.folder / "said").read_text() == "saved"  # it had time to
        assert run.status()["state"] == "cancelled"
        assert "lockstep: stopped; what was measured is in" in said
        assert (run.summary() or {})["steps"] > 20
    else:
        assert run.status()["state"] == "failed"
        assert "is gone" in run.status()["cause"]


def test_a_failure_of_ours_is_one_line_and_the_script_goes_on(cli: Cli) -> None:
    full = "import shutil; shutil.rmtree(os.environ['LOCKSTEP_ATTACH'] + '/ranks', ignore_errors=True)\n"
    full += "open(os.environ['LOCKSTEP_ATTACH'] + '/ranks', 'w').close()\n"
    write(cli, "full", HEAD + full + PLAIN + TAIL)
    found = attach(cli, sys.executable, "full.py", "x.pt")
    assert found.returncode == 0, found.stderr
    assert (cli.folder / "x.pt").exists()
    assert found.stderr.count("is not recorded any more") == 1
    assert "Traceback" not in found.stderr


def test_every_module_that_has_a_hook_is_waited_for() -> None:
    """In a process of its own: hooks stay."""
    listed = "from lockstep.inside.hooks import Hooks; print(*sorted(Hooks('nowhere').by_module))"
    found = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == sorted(WATCHED)


def test_the_users_own_sitecustomize_runs_and_other_programs_are_left_alone(cli: Cli) -> None:
    (cli.folder / "own").mkdir()
    (cli.folder / "own/sitecustomize.py").write_text("import sys; sys.own = 'here'\n")
    (cli.folder / "look.py").write_text(
        "import sys; print(sys.own, 'torch' in sys.modules, any('inside' in path for path in sys.path), 'typing' in sys.modules)\n"
    )
    found = cli("attach", "--", sys.executable, "look.py", PYTHONPATH=str(cli.folder / "own"))
    assert found.stdout == "here False False False\n", found.stderr


COMPILED = """
from torch._dynamo.utils import counters
if sys.argv[2] == "module":
    model = torch.compile(net, backend="aot_eager")
elif sys.argv[2] == "in place":
    net.compile(backend="aot_eager")
    model = net
else:
    model = torch.compile(lambda batch: net(batch) * (2.0 if batch.sum().item() > 1e6 else 1.0), backend="aot_eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(12):
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()
print(dict(counters["stats"]), dict(counters["graph_break"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["module", "in place", "function"])
def test_compiled_models_compile_as_they_do_alone(cli: Cli, way: str) -> None:
    """The same graphs, and so the same rounding."""
    write(cli, "compiled", HEAD + COMPILED + TAIL)
    found = attach(cli, sys.executable, "compiled.py", "attached.pt", way)
    alone = subprocess.run(
        [sys.executable, "compiled.py", "alone.pt", way], cwd=cli.folder, capture_output=True, text=True, timeout=120
    )
    assert found.stdout == alone.stdout, found.stderr
    assert same_bits(cli.folder / "attached.pt", cli.folder / "alone.pt")
    assert "12 steps, " in found.stderr


@pytest.mark.alone
def test_a_step_costs_at_most_one_percent_more(cli: Cli) -> None:
    """What the hooks say of themselves, on a step of several milliseconds; benchmarks compare it with a script that has none, and have the
    small steps on which it is missed."""
    write(cli, "plain", HEAD.replace("64, 256", "64, 8192").replace("256, 10", "8192, 10") + PLAIN * 4 + TAIL)
    assert attach(cli, sys.executable, "plain.py", "x.pt").returncode == 0
    summary = last(cli).summary() or {}
    assert 0 < summary["hook_seconds"] < 0.01 * summary["train_seconds"]


def test_a_run_is_there_while_it_goes_on(cli: Cli) -> None:
    """The folder comes first, as planned; what ranks tell is in it before the end."""
    write(cli, "waits", "import time; time.sleep(1.5)")
    process = cli.start("attach", "--", sys.executable, "waits.py")
    run = wait_for(lambda: next((Run(p.parent) for p in cli.runs.glob("*/run.json")), None), what="the run folder")
    wait_for(lambda: run.status()["state"] == "starting", what="the start")
    assert process.wait(60) == 0
    assert run.status()["state"] == "done"
    assert np.isclose(run.spec().created, time.time(), atol=120)
