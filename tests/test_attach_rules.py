"""The rules by which `explain` names the usual suspects of an attached command: each from what the hooks have told, and what it must not name.

Whole scripts only where it is the hooks that have to see something; those of frameworks are in test_attach_frameworks.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.attach.command import _plan
from lockstep.attach.seen import conclude
from lockstep.explain import attached, inflating
from lockstep.explain.asked import of_run
from lockstep.explain.finding import Finding
from lockstep.inside import layout
from lockstep.inside.clock import BACKWARD, EXCHANGE, Clock
from lockstep.inside.frameworks import Frameworks
from lockstep.inside.recorder import Recorder
from lockstep.inside.rows import Rows
from lockstep.inside.standins import Iterators
from lockstep.inside.suspects import Suspects
from lockstep.measure.attached import read_beside
from lockstep.measure.records import PHASES
from lockstep.run import Run
from lockstep.shapes import Spent
from lockstep.study.gather import _labels
from support import Cli
from test_attach import DDP, HEAD, attach, last, torchrun, write

STEP = {
    "data": 0.001,
    "forward": 0.004,
    "backward": 0.008,
    "exchange": 0.005,
    "waiting": 0.001,
    "optimizer": 0.001,
    "other": 0.0,
    "total": 0.02,
}


def evidence(
    ranks: list[dict[str, Any]],
    step: dict[str, float] | None = None,
    beside: dict[str, float] | None = None,
    **summary: float,
) -> Any:
    """As an attached command leaves it. `ranks`: what each has told."""
    return SimpleNamespace(
        step={**STEP, **(step or {})},
        summary={"train_seconds": 10.0, **summary},
        spec=SimpleNamespace(plan=SimpleNamespace(ranks=len(ranks)), options=SimpleNamespace(attached=["python"])),
        run=SimpleNamespace(
            attached=lambda: ranks[0], attached_ranks=lambda: ranks, beside=lambda: beside or {}, cores_had=None
        ),
    )


def causes(findings: Any) -> list[str]:
    return [each.cause for each in findings]


def told(cli: Cli, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((last(cli).rank_folder(rank) / "status.json").read_text())["attached"]
    return found


# --- what is said of attached runs ---------------------------------------------------------------------------------------------


def test_attached_commands_that_are_compared_name_their_script_once() -> None:
    keys = {name: {"command": f"python {name}.py", "model": f"{name}.py", "ranks": 1} for name in ("wgan", "vae")}
    assert _labels(keys) == {"wgan": "command=python wgan.py", "vae": "command=python vae.py"}


# --- methods of the user that a trainer calls ----------------------------------------------------------------------------------


def test_methods_of_the_user_are_called_as_they_were_written() -> None:
    """Static methods, class methods, and whatever else a class may have under such a name."""
    recorder = Recorder("nowhere")

    class Callback:
        pass

    Frameworks(recorder).by_module["transformers.trainer_callback"](SimpleNamespace(TrainerCallback=Callback))

    class Mine(Callback):
        class on_kind:
            pass

        @staticmethod
        def on_start(trainer: str) -> str:
            return trainer

        @classmethod
        def on_class(cls, trainer: str) -> tuple[type, str]:
            return cls, trainer

        def on_step(self, trainer: str) -> tuple[object, str]:
            return self, trainer

    mine = Mine()
    assert mine.on_start("it") == Mine.on_start("it") == "it"
    assert mine.on_class("it") == (Mine, "it")
    assert mine.on_step("it") == (mine, "it")
    assert isinstance(mine.on_kind(), Mine.on_kind)
    assert hasattr(Mine.on_step, "__wrapped__"), "it is timed"


def test_a_loader_whose_iterator_is_a_generator_is_let_alone() -> None:
    Iterators(lambda function: function).meet(number for number in range(3))


# --- accumulation --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exchanged", "updates", "named"),
    [(400, 100, True), (100, 100, False), (200, 200, False), (130, 100, False)],
    ids=["four passes exchange", "one does", "a GAN: two optimizers", "a last batch"],
)
def test_accumulation_without_no_sync_is_more_exchanges_than_updates(exchanged: int, updates: int, named: bool) -> None:
    seen = {"exchanged": exchanged, "updates": updates, "steps": 100, "backwards": exchanged}
    found = list(inflating.exchange(evidence([seen, seen]), seen))
    assert causes(found) == (["no-sync"] if named else [])
    if named:
        assert found[0].verdict == "gradients are exchanged 4 times per update: accumulation without no_sync"
        assert found[0].cost == pytest.approx(0.3 * 3 / 4)


SIAMESE = """
for a, b in loader:
    optimizer.zero_grad()
    (net(a) - net(a.flip(0))).square().mean().backward()
    optimizer.step()
"""
TWO_MODELS = """
other = DistributedDataParallel(nn.Linear(10, 1))
others = torch.optim.SGD(other.parameters(), lr=0.1)
plain = nn.Linear(10, 1)
for a, b in loader:
    others.zero_grad()
    plain(net(a).detach()).sum().backward()  # of a model that exchanges nothing
    other(net(a).detach()).sum().backward()
    others.step()
    optimizer.zero_grad()
    other(net(a)).sum().backward()
    optimizer.step()
"""
ACCUMULATES = """
for number, (a, b) in enumerate(loader):
    if number % 4 == 0:
        optimizer.zero_grad()
    (nn.functional.cross_entropy(net(a), b) / 4).backward()
    if number % 4 == 3:
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("body", "exchanged", "updates"),
    [(SIAMESE, 32, 32), (TWO_MODELS, 64, 64), (ACCUMULATES, 32, 8)],
    ids=["a model that is called twice", "two models", "accumulation"],
)
def test_exchanges_are_counted_by_backward_passes(cli: Cli, body: str, exchanged: int, updates: int) -> None:
    text = DDP[: DDP.index("for a, b in loader:")]
    write(cli, "exchanges", text + body + "dist.destroy_process_group()\n")
    found = attach(cli, *torchrun("exchanges.py"))
    assert found.returncode == 0, found.stderr
    seen = told(cli)
    assert (seen["exchanged"], seen["updates"]) == (exchanged, updates)


def test_the_exchange_after_a_part_that_is_computed_again_is_exposed() -> None:
    """Reentrant checkpointing: the last gradient comes within a backward pass of its own, and the exchange is waited for after it."""
    clock = Clock(lambda row, beside: None, lambda evaluated, saved: None)
    clock.adopt(1)
    clock.exchanges = True
    clock.enter_backward()
    clock.enter_backward()
    clock.ready = time.perf_counter_ns()
    clock.leave_backward()
    time.sleep(0.01)
    clock.leave_backward()
    assert clock._phases[EXCHANGE] >= 10_000_000
    assert clock._phases[BACKWARD] < 10_000_000
    assert (clock.backwards, clock.exchanged) == (1, 1)


# --- schedules -----------------------------------------------------------------------------------------------------------------


def schedule(seen: dict[str, Any]) -> list[Finding]:
    return list(attached._learning(None, seen))  # type: ignore[arg-type]


def test_a_schedule_is_compared_with_the_updates_of_its_own_optimizer() -> None:
    """As a Wasserstein GAN has it: five updates of the critic for one of the generator, each with a schedule."""
    import torch

    clock = SimpleNamespace(steps=1, stack=[], thread=0, backwards=0, collectives=0, exchanged=0, updates=0)
    suspects = Suspects(clock, {})
    weight = [torch.nn.Parameter(torch.zeros(1))]
    critic, generator = torch.optim.SGD(weight, 0.1), torch.optim.SGD(weight, 0.1)
    around = SimpleNamespace(optimizer=generator)  # as Accelerate has it
    schedules = [SimpleNamespace(optimizer=one) for one in (critic, around)]
    for _ in range(20):
        for _ in range(5):
            suspects.updated(critic)
            suspects.scheduled(schedules[0])
        suspects.updated(generator)
        suspects.scheduled(schedules[1])
    clock.steps = 20
    suspects.told()
    assert suspects.seen["scheduled"][0] == suspects.seen["scheduled"][1]
    assert schedule(suspects.seen) == []
    for _ in range(20):
        suspects.scheduled(schedules[1])
    suspects.told()
    assert suspects.seen["scheduled"] == (40, 20)
    (found,) = schedule(suspects.seen)
    assert found.verdict == "the learning-rate schedule goes on 2 times per update"
    assert "40 times in 20 updates of its optimizer" in found.why


def test_runs_of_earlier_versions_have_one_number_where_two_are_told_now() -> None:
    assert schedule({"scheduled": 31, "steps": 16}) == []
    seen = {"find_unused_parameters": True, "unused": 2}
    assert "unused" not in causes(list(inflating.exchange(evidence([seen, seen]), seen)))


WGAN = """
other = nn.Linear(64, 64)
first, second = torch.optim.SGD(net.parameters(), 0.01), torch.optim.SGD(other.parameters(), 0.01)
schedules = [torch.optim.lr_scheduler.StepLR(each, 100) for each in (first, second)]
for step in range(12):
    for _ in range(5):
        with torch.no_grad():
            fake = other(x[:64])
        first.zero_grad()
        (net(fake) - net(x[:64])).mean().backward()
        first.step()
        schedules[0].step()
    second.zero_grad()
    net(other(x[:64])).mean().backward()
    second.step()
    schedules[1].step()
"""
PSEUDO_LABELS = """
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for a, _ in DataLoader(data, batch_size=16):
    with torch.no_grad():
        labels = net(a).softmax(1)
    optimizer.zero_grad()
    loss_of(net(a), labels).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("body", [WGAN, PSEUDO_LABELS], ids=["WGAN", "pseudo-labels"])
def test_passes_without_gradients_for_training_belong_to_the_step(cli: Cli, body: str) -> None:
    write(cli, "fakes", HEAD + body)
    found = attach(cli, sys.executable, "fakes.py")
    assert found.returncode == 0, found.stderr
    assert "evaluation" not in found.stderr
    assert (last(cli).summary() or {})["eval_seconds"] == 0
    assert "schedule goes on" not in cli("explain", "last").stdout


# --- unused parameters, modes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([(32, 0), (32, 0)], True),
        ([(32, 21), (32, 21)], False),
        ([(32, 0), (32, 1)], False),
        ([(3, 0), (3, 0)], False),
    ],
    ids=["none", "two of three passes", "one rank", "too few passes"],
)
def test_unused_parameters_are_looked_for_in_several_passes_of_all_ranks(
    ranks: list[tuple[int, int]], named: bool
) -> None:
    seen = [{"find_unused_parameters": True, "unused": list(unused)} for unused in ranks]
    found = list(inflating.exchange(evidence(seen), seen[0]))
    assert causes(found) == (["unused"] if named else [])
    if named:
        assert "in the 32 backward passes that were looked at" in found[0].why


DROPS = """
class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.skip, self.b, self.calls = nn.Linear(128, 64), nn.Linear(64, 64), nn.Linear(64, 10), 0
    def forward(self, batch):
        self.calls += 1
        batch = torch.relu(self.a(batch))
        return self.b(batch + self.skip(batch) if self.calls % 3 == 0 else batch)
net = DistributedDataParallel(Drops(), find_unused_parameters=True)
"""


def test_a_layer_that_is_dropped_in_some_steps_is_an_unused_parameter(cli: Cli) -> None:
    """And gradients of zero are no use of a parameter."""
    start, rest = DDP[: DDP.index("net = ")], DDP[DDP.index("optimizer = ") : DDP.index("kept = ")]
    rest = rest.replace("zero_grad()", "zero_grad(set_to_none=False)")
    write(cli, "drops", start + DROPS + rest + "dist.destroy_process_group()\n")
    found = attach(cli, *torchrun("drops.py"))
    assert found.returncode == 0, found.stderr
    looked, unused = told(cli)["unused"]
    assert looked == 31
    assert unused == sum(call % 3 != 0 for call in range(1, 32))
    assert "looks for unused parameters" not in cli("explain", "last").stdout


ANOMALY = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(40):
    optimizer.zero_grad()
    with torch.autograd.detect_anomaly():
        loss_of(net(x), y).backward()
    optimizer.step()
"""


def test_anomaly_detection_is_seen_where_it_is_on_around_the_passes_alone(cli: Cli) -> None:
    write(cli, "anomaly", HEAD + ANOMALY)
    assert attach(cli, sys.executable, "anomaly.py").returncode == 0
    seen = told(cli)
    assert (seen["anomaly"], seen["backwards"]) == (40, 40)
    found = list(inflating.modes(evidence([seen]), seen))
    assert causes(found) == ["anomaly"]
    assert found[0].why.startswith("in 40 of 40 backward passes it keeps a traceback")
    assert not list(inflating.modes(evidence([seen]), {**seen, "anomaly": 2}))


CHECKPOINTS = """
import warnings
import torch.distributed.checkpoint as checkpoint
warnings.simplefilter("ignore")
import time
saves = checkpoint.filesystem.FileSystemWriter.write_data
def slow(*args, **keywords):
    time.sleep(0.2)
    return saves(*args, **keywords)
checkpoint.filesystem.FileSystemWriter.write_data = slow
for number, (a, b) in enumerate(loader):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(a), b).backward()
    optimizer.step()
    if number % 16 == 15:
        checkpoint.save(net.module.state_dict(), checkpoint_id="saved")
"""


def test_checkpoints_that_all_ranks_write_are_no_exchange(cli: Cli) -> None:
    text = DDP[: DDP.index("for a, b in loader:")]
    write(cli, "checkpoints", text + CHECKPOINTS + "dist.destroy_process_group()\n")
    found = attach(cli, *torchrun("checkpoints.py"))
    assert found.returncode == 0, found.stderr
    summary = last(cli).summary() or {}
    assert summary["checkpoint_seconds"] > 0.4, "also what the ranks say to each other"
    assert "between the steps: checkpoints" in found.stderr


# --- what is named first, of recorded runs -------------------------------------------------------------------------------------


US = 1000
PLAIN = {"data": 200, "forward": 3000, "backward": 6000, "exchange": 0, "optimizer": 500}
TOLD = {"launcher": "torchrun", "threads": 1, "device": "cpu", "strategy": "ddp", "torch": "2.13.0", "ran_seconds": 1.0}


def recorded(
    folder: Path,
    ranks: Sequence[dict[str, int]],
    told: dict[str, Any] | None = None,
    beside: dict[str, int] | None = None,
    reads: int = 0,
    aside: tuple[float, float] = (0, 0),
) -> Run:
    """An attached run of 200 steps, as its ranks would have written it. `ranks`: microseconds of each phase; `beside`: those of other."""
    run = _plan(["python", "train.py"], folder, "recorded", None)
    rng, steps = np.random.default_rng(0), 200
    named = [US * (beside or {}).get(name, 0) for name in layout.BESIDE]
    strategy = {} if len(ranks) > 1 else {"launcher": "single", "strategy": None}
    seen = {**TOLD, **strategy, "steps": steps, "updates": steps, "backwards": steps, **(told or {})}
    for rank, phases in enumerate(ranks):
        home = run.rank_folder(rank)
        home.mkdir(parents=True, exist_ok=True)
        written, start = Rows(str(home)), 0
        for _ in range(steps):
            spent = [int(US * phases[name] * (1 + 0.01 * rng.random())) for name in PHASES]
            total = sum(spent) + sum(named) + 50 * US
            written.write(start, spent, total, [*named, reads], again=False)
            start += total
        written.aside(*(int(1e9 * seconds) for seconds in aside))
        written.close()
        status = {
            "rank": rank,
            "state": "done",
            "time": time.time(),
            "pid": 1,
            "host": "here",
            "step": steps,
            "attached": seen,
        }
        (home / "status.json").write_text(json.dumps(status))
    conclude(run, Spent(used=1.0, waited=0.0, others=0.0, stolen=0.0))
    run.write_done()
    return run


def first_named(run: Run) -> str:
    (found,) = of_run(run).explained()
    return next((finding.cause for finding in found.findings if finding.cause), "")


WAITS = {**PLAIN, "exchange": 4000}
EVALUATES = (1.5, 0.0)


@pytest.mark.parametrize(
    ("ranks", "more", "named"),
    [
        ([PLAIN], {}, ""),
        ([{**PLAIN, "exchange": 200}] * 2, {}, ""),
        ([PLAIN], {"beside": {"logging": 3000}}, "logging"),  # histograms
        ([PLAIN], {"beside": {"callbacks": 3000}}, "callbacks"),
        ([PLAIN], {"beside": {"progress": 3000}}, "progress"),
        ([PLAIN], {"beside": {"collecting": 3000}}, "collecting"),
        ([PLAIN], {"beside": {"schedule": 3000}}, "schedule"),
        ([PLAIN], {"beside": {"reading": 3000}, "reads": 40}, "reading"),
        ([PLAIN], {"beside": {"reading": 50}, "reads": 1}, ""),  # .item() of the loss in every step
        ([PLAIN], {"aside": EVALUATES}, "evaluation"),
        ([PLAIN], {"aside": (0.0, 1.5)}, "checkpoints"),
        ([PLAIN], {"aside": EVALUATES, "told": {"graded": 40}}, "no-grad"),
        ([WAITS] * 2, {}, "exchange"),  # a slow collective
        ([WAITS] * 2, {"told": {"exchanged": 800}}, "no-sync"),
        ([WAITS] * 2, {"told": {"find_unused_parameters": True, "unused": [31, 0]}}, "unused"),
        ([WAITS] * 2, {"told": {"find_unused_parameters": True, "unused": [31, 9]}}, "exchange"),
        ([WAITS, {**PLAIN, "backward": 10000, "exchange": 10}], {}, "rank"),
    ],
)
def test_what_is_named_first(tmp_path: Path, ranks: list[dict[str, int]], more: dict[str, Any], named: str) -> None:
    assert first_named(recorded(tmp_path, ranks, **more)) == named


READS = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
total = 0.0
for epoch in range(4):
    for a, b in DataLoader(data, batch_size=64):
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(net(a), b, reduction="none")
        loss = losses.mean()
        loss.backward()
        optimizer.step()
        total += {read}
"""


@pytest.mark.parametrize(
    ("read", "reads", "named"),
    [("loss.item()", 1, False), ("sum(each.item() for _ in range(20) for each in losses)", 1280, True)],
    ids=["the loss", "every sample"],
)
def test_values_that_are_read_are_counted(cli: Cli, read: str, reads: int, named: bool) -> None:
    """One in a step is as it should be."""
    write(cli, "reads", HEAD + READS.format(read=read))
    found = attach(cli, sys.executable, "reads.py")
    assert found.returncode == 0, found.stderr
    beside = read_beside(last(cli).rank_folder(0))
    assert beside["reads"].tolist() == [0, *[reads] * 31], "what is read after an update is of the next step"
    findings = json.loads(cli("explain", "last", "--json").stdout)["findings"]
    assert ("reading" in [each["cause"] for each in findings]) is named
