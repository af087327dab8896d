"""The user's own loop: on real ranks it must equal the recipe's golden losses, plain Python, and itself by hand."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep
from lockstep.backends.ranks import Rank
from lockstep.data.batches import sample_order
from lockstep.errors import InputError, RunFailed
from lockstep.launch import prepare
from lockstep.measure import recorder
from lockstep.measure.records import PHASES, read_steps
from lockstep.placement import Placement
from lockstep.plan import share_of
from lockstep.recipe import Recipe
from lockstep.run import Options, Run
from lockstep.training import start as own_loop
from lockstep.training.context import Context
from lockstep.training.session import Session
from lockstep.training.share import Shares
from lockstep.verify.records import step_losses
from support import Cli, assert_follows

EXAMPLES = Path(__file__).parents[1] / "examples"
GOLDEN = json.loads(Path(__file__).with_name("golden_losses.json").read_text())["losses"]

# Trains what support.SHORT trains, with torch's own Adam, in a loop of the user's own.
SCRIPT = """
import argparse, json
import numpy as np, torch
from torch.nn import functional
import lockstep
from lockstep import models


words = argparse.ArgumentParser()
words.add_argument("--limit", type=int, default=703)
words.add_argument("--batch", type=int, default=48)
words.add_argument("--epochs", type=int, default=2)
words.add_argument("--passes", type=int, default=1)
words.add_argument("--loader", action="store_true")
words.add_argument("--no-test", action="store_true")
words = words.parse_args()

data = lockstep.open_data("embedded", quiet=True)
images = (torch.from_numpy(data.train_images[: words.limit].astype(np.float32)) / 255 - 0.5) / 0.5
labels = torch.from_numpy(data.train_labels[: words.limit].astype(np.int64))
test_images = (torch.from_numpy(data.test_images[:501].astype(np.float32)) / 255 - 0.5) / 0.5
test_labels = torch.from_numpy(data.test_labels[:501].astype(np.int64))

def one_pass(model, step, images, labels):
    scores = model(images)
    step.backward(functional.cross_entropy(scores, labels, reduction="sum"))
    step.log(correct=(scores.argmax(1) == labels).sum())

with lockstep.session() as s:
    model = s.wrap(models.build(lockstep.Recipe(seed=7)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(1, words.epochs + 1):
        order = dict(count=words.limit, batch=words.batch, epoch=epoch, seed=7)
        fetched = [None] * words.limit
        if words.loader:
            sampler = [batch.mine.tolist() for batch in s.share(**order)]
            fetched = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_sampler=sampler)
        for step, got in zip(s.steps(**order), fetched):
            x, y = got or (images[step.mine], labels[step.mine])
            step.lap("data")
            optimizer.zero_grad()
            parts = list(zip(x.chunk(words.passes), y.chunk(words.passes)))
            for part in parts[:-1]:
                with step.no_exchange():
                    one_pass(model, step, *part)
            one_pass(model, step, *parts[-1])
            optimizer.step()
        if words.no_test:
            s.end_epoch()
            continue
        mine = s.part(len(test_labels))
        with s.evaluation() as net:
            scores = net(test_images[mine])
        result = s.end_epoch(
            loss_sum=functional.cross_entropy(scores, test_labels[mine], reduction="sum"),
            correct=(scores.argmax(1) == test_labels[mine]).sum(),
            samples=len(scores),
        )
        s.print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def script(module_cli: Cli) -> str:
    (module_cli.folder / "train.py").write_text(SCRIPT)
    return "train.py"


@pytest.fixture(scope="module")
def two(module_cli: Cli, script: str) -> Run:
    """Two ranks, started by us, under DDP."""
    return Run(Path(module_cli.run(script, "ranks=2", "threads=1", "backend=gloo")["run"]))


def plain_python(folder: Path, script: Path, *words: str, **environment: str) -> list[dict[str, Any]]:
    """The epochs that the script prints when Python runs it, without Lockstep's command."""
    result = subprocess.run(
        [sys.executable, str(script), *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_two_ranks_equal_the_recipe(two: Run) -> None:
    """The golden losses are those of the recipe's own loop; the last batch of an epoch is partial."""
    assert_follows(step_losses(two), GOLDEN)
    assert two.status()["state"] == "done"
    assert two.summary()["ranks_agree"]  # type: ignore[index]


@pytest.mark.slow
def test_three_ranks_of_torchrun_with_a_loader_and_two_passes_too(module_cli: Cli, script: str) -> None:
    words = ("ranks=3", "threads=1", "backend=gloo", "launcher=torchrun", "strategy=flat")
    result = module_cli("run", script, *words, "--json", "--", "--passes", "2", "--loader")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert_follows(step_losses(Run(Path(document["run"]))), GOLDEN)
    assert (document["plan"]["micro_batch"], document["plan"]["accumulation"]) == (8, 2)
    assert document["ranks_agree"]


def test_plain_python_computes_the_same_and_leaves_nothing(
    two: Run, module_cli: Cli, script: str, tmp_path: Path
) -> None:
    scratch, work = tmp_path / "scratch", tmp_path / "work"
    scratch.mkdir(), work.mkdir()
    alone = plain_python(work, module_cli.folder / script, TMPDIR=str(scratch))
    for ours, theirs in zip(two.epochs(), alone, strict=True):
        assert theirs["test_samples"] == ours["test_samples"] == 501
        for key in ("train_loss", "test_loss", "train_accuracy", "test_accuracy"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-3), key
    losses, samples = np.array(GOLDEN), np.array(([48] * 14 + [31]) * 2)
    assert alone[0]["train_loss"] == pytest.approx((losses * samples)[:15].sum() / 703, rel=1e-4)
    assert not list(work.iterdir())
    assert not [path for path in scratch.iterdir() if path.name.startswith("lockstep")]


def test_a_rank_without_samples_takes_part(module_cli: Cli, script: str) -> None:
    """Nine samples in batches of eight: in the last batch of an epoch rank 0 has none."""
    words = ("--limit", "9", "--batch", "8", "--epochs", "3")
    result = module_cli("run", script, "ranks=2", "threads=1", "backend=gloo", "--json", "--", *words)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert read_steps(Run(Path(document["run"])).rank_folder(0) / "steps.bin")["samples"].tolist() == [4, 0] * 3
    alone = plain_python(module_cli.folder, module_cli.folder / script, *words)
    for ours, theirs in zip(document["epochs"], alone, strict=True):
        assert ours["samples"] == 9
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-5)


def test_the_recorded_times_add_up(two: Run) -> None:
    for rank in range(2):
        rows = read_steps(two.rank_folder(rank) / "steps.bin")
        parts = sum(rows[f"{name}_ns"] for name in PHASES)
        assert (parts <= rows["total_ns"]).all()
        assert parts.sum() > 0.8 * rows["total_ns"].sum(), "most of a step is attributed"
        for name in PHASES:
            assert (rows[f"{name}_ns"] > 0).all(), name
        for epoch in two.epochs(rank):
            steps = rows[rows["epoch"] == epoch["epoch"]]
            # A step begins where the one before ended, so together they are the training time, but for the records.
            assert steps["total_ns"].sum() / 1e9 == pytest.approx(epoch["train_seconds"], rel=0.1, abs=0.05)
            assert (steps["start_ns"][1:] >= steps["start_ns"][:-1] + steps["total_ns"][:-1]).all()


def test_the_run_folder_is_like_any_other(two: Run, module_cli: Cli, alone: dict[str, Any]) -> None:
    """Key for key what a recipe's run leaves, so whatever reads runs can read these."""
    recipe = Run(Path(alone["run"]))
    assert two.epochs()[0].keys() == recipe.epochs()[0].keys()
    assert two.epochs(1)[0].keys() == recipe.epochs(0)[0].keys()
    missing = recipe.summary().keys() - two.summary().keys()  # type: ignore[union-attr]
    assert missing <= {"numbers", "compile_seconds"}, "what only a recipe has"
    assert {path.name for path in recipe.folder.iterdir()} <= {path.name for path in two.folder.iterdir()} | {
        "rendezvous"
    }
    plan = two.spec().plan
    assert (plan.global_batch, plan.train_samples, plan.test_samples, plan.last_batch) == (48, 703, 501, 31)
    assert (plan.steps_per_epoch, plan.total_steps) == (15, 30)
    assert "train.py on own data" in module_cli("show", two.id).stdout
    assert "15 an epoch (last batch 31), 30 in all" in " ".join(module_cli("show", two.id).stdout.split())
    line = next(row for row in json.loads(module_cli("runs", "--json").stdout) if row["id"] == two.id)
    assert (line["state"], line["model"], line["global_batch"], line["epochs"]) == ("done", "train.py", 48, 2)


def test_saved_weights_are_the_evaluated_ones(two: Run) -> None:
    """The accuracy that two ranks report, counted by hand with the weights that they left."""
    model = lockstep.models.build(Recipe(seed=7))
    model.load_state_dict(torch.load(two.folder / "model.pt", weights_only=True))
    data = lockstep.open_data("embedded", quiet=True)
    images = (torch.from_numpy(data.test_images[:501].astype(np.float32)) / 255 - 0.5) / 0.5
    with torch.no_grad():
        hits = (model.eval()(images).argmax(1).numpy() == data.test_labels[:501]).sum()
    assert two.epochs()[-1]["test_accuracy"] == pytest.approx(hits / 501, abs=1e-12)


def test_local_sgd_without_a_test_set_is_one_model_at_the_end(module_cli: Cli, script: str) -> None:
    words = ("ranks=2", "threads=1", "backend=gloo", "strategy=local-sgd", "local_sgd.every=4")
    result = module_cli("run", script, *words, "--", "--no-test")
    assert result.returncode == 0, result.stderr
    assert "changes the mathematics" in result.stderr
    assert "weights the same on all ranks" in " ".join(result.stdout.split())
    document = json.loads(module_cli("show", "last", "--json").stdout)
    assert [epoch["test_accuracy"] for epoch in document["epochs"]] == [None, None], "unknown is not zero"
    assert "–" in result.stdout
    losses = step_losses(Run(Path(document["run"])))
    np.testing.assert_allclose(losses[0], GOLDEN[0], rtol=1e-5)
    assert abs(losses[9] / GOLDEN[9] - 1) > 1e-4, "ranks that train alone go another way"


# ---------------------------------------------------------------- shards, without processes


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shares_of_all_ranks_are_the_whole_in_order(world: int) -> None:
    parts = [list(Shares(703, 48, 3, True, 7, partial(share_of, part=rank, parts=world))) for rank in range(world)]
    assert {len(p) for p in parts} == {15}
    order = sample_order(Recipe(seed=7), 3, 703)
    for k, batch in enumerate(zip(*parts, strict=True)):
        whole = torch.cat([part.mine[: part.samples] for part in batch])
        assert torch.equal(whole, order[48 * k : 48 * k + 48])
        assert {part.count for part in batch} == {len(whole)}
        assert all(len(part.mine) for part in batch)


def test_file_order_and_bad_numbers() -> None:
    assert torch.cat([b.mine for b in Shares(10, 4, 1, False, 0, lambda count: (0, count))]).tolist() == list(range(10))
    for words, text in (((10, 4, 0), "numbered from 1"), ((0, 4, 1), "at least 1")):
        with pytest.raises(InputError, match=text):
            Shares(words[0], words[1], words[2], True, 0, lambda count: (0, count))


# ---------------------------------------------------------------- one process, by hand


def small() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return nn.Linear(5, 3), torch.randn(11, 5), torch.randint(0, 3, (11,))


def train_small(s: Session, epochs: int = 1, scaler: Any = None) -> nn.Module:
    model, x, y = small()
    wrapped = s.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for epoch in range(1, epochs + 1):
        for step in s.steps(11, batch=4, epoch=epoch, shuffle=False):
            optimizer.zero_grad()
            step.backward(functional.cross_entropy(wrapped(x[step.mine]), y[step.mine], reduction="sum"), scaler)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        s.end_epoch()
    return model


def textbook(epochs: int) -> tuple[nn.Module, list[float]]:
    model, x, y = small()
    losses = []
    for _ in range(epochs):
        for low in (0, 4, 8):
            loss = functional.cross_entropy(model(x[low : low + 4]), y[low : low + 4])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p.sub_(0.1 * g)
            losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("scaled", [False, True])
def test_one_process_equals_the_textbook(scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None  # type: ignore[attr-defined]
    with own_loop.session() as s:
        ours = train_small(s, 2, scaler)
    for mine, theirs in zip(ours.parameters(), textbook(2)[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_rows_outgrow_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve steps in a file that starts with room for two: every row stays, with its loss."""
    monkeypatch.setattr(recorder, "FIRST_ROWS", 2)
    with own_loop.session() as s:
        train_small(s, 4)
        rows = read_steps(s.context.run.rank_folder(0) / "steps.bin").copy()
        epochs = s.context.run.epochs()
    assert rows["step"].tolist() == list(range(1, 13))
    np.testing.assert_allclose(rows["loss_sum"] / rows["samples"], textbook(4)[1], rtol=1e-5)
    assert [epoch["samples"] for epoch in epochs] == [11] * 4
    assert epochs[0]["train_accuracy"] is None, "nobody said how many were right"
    assert epochs[0]["test_loss"] is None


def test_an_epoch_whose_loop_was_left_early_is_partial() -> None:
    model, x, y = small()
    with own_loop.session() as s:
        net, found = s.wrap(model), []
        for epoch, most in ((1, 3), (2, 2), (3, 3)):
            for number, step in enumerate(s.steps(11, batch=4, epoch=epoch), 1):
                step.backward(functional.cross_entropy(net(x[step.mine]), y[step.mine], reduction="sum"))
                if number == most:
                    break
            found.append(s.end_epoch()["partial"])
        recorded = [epoch["partial"] for epoch in s.context.run.epochs()]
        of_rank = (s.context.run.rank_folder(0) / "epochs.jsonl").read_text().splitlines()
    assert found == recorded == [False, True, False]
    assert [json.loads(line)["partial"] for line in of_rank] == found


WEIGHTS = torch.ones(4, 5, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "mean"),
    [
        (lambda scores, y: functional.cross_entropy(scores, y), True),
        (lambda scores, y: functional.cross_entropy(scores, y, label_smoothing=0.1), True),
        (lambda scores, y: functional.cross_entropy(scores, y) + 0.1 * scores.square().sum(), True),
        (lambda scores, y: functional.cross_entropy(scores, y, reduction="none").mean(), True),
        (lambda scores, y: functional.cross_entropy(scores, y, reduction="sum") / len(y), True),
        (lambda scores, y: functional.mse_loss(scores, torch.zeros_like(scores)), True),
        (lambda scores, y: functional.cross_entropy(scores, y) * len(y), False),
        (lambda scores, y: functional.cross_entropy(scores, y, reduction="sum", label_smoothing=0.1), False),
        (lambda scores, y: functional.cross_entropy(scores, y, reduction="none").sum(), False),
        (
            lambda scores, y: functional.mse_loss(scores, torch.zeros_like(scores), reduction="none").mean(1).sum(),
            False,
        ),
        # A penalty that is a mean, of as many weights as there are samples, too, says nothing about the loss.
        (lambda scores, y: functional.cross_entropy(scores, y, reduction="sum") + WEIGHTS.square().mean(), False),
        (
            lambda scores, y: WEIGHTS.square().mean() + functional.cross_entropy(scores, y, reduction="none").sum(),
            False,
        ),
        (lambda scores, y: functional.cross_entropy(scores, y) * len(y) + WEIGHTS.square().mean(), False),
        (lambda scores, y: scores.logsumexp(1).sum() + functional.mse_loss(WEIGHTS[:3], torch.zeros(3, 5)), False),
        (lambda scores, y: scores.max() + WEIGHTS[:3].square().mean(), False),
        (lambda scores, y: functional.cross_entropy(scores, y, reduction="sum") + WEIGHTS.square().sum() / 4, False),
        (lambda scores, y: functional.cross_entropy(scores, y) + WEIGHTS.square().sum(), True),
        (lambda scores, y: functional.cross_entropy(scores, y) + WEIGHTS.square().mean(), True),
        (lambda scores, y: functional.mse_loss(scores, torch.zeros_like(scores)) + WEIGHTS.square().sum(), True),
    ],
)
def test_a_loss_that_is_a_mean_is_noticed(loss: Any, mean: bool) -> None:
    model, x, y = small()
    with own_loop.session() as s:
        net = s.wrap(model)
        step = next(s.steps(11, batch=4, epoch=1))
        found = loss(net(x[step.mine]), y[step.mine])
        if not mean:
            step.backward(found)
            return
        with pytest.raises(InputError, match="the loss is a mean over this rank's samples"):
            step.backward(found)
        step.backward(found * 4)  # so that the session can end


def test_the_learning_rate_on_record_is_the_scripts(two: Run, module_cli: Cli) -> None:
    plan = two.spec().plan
    assert (plan.lr, plan.lr_note) == (0.005, "learning rate 0.005 (Adam, set by the script)")
    assert plan.lr_note in " ".join(module_cli("explain", two.id).stdout.split())


def test_dropout_of_a_loop_of_ones_own_is_that_of_the_samples() -> None:
    """Whatever torch's generator does: in two sessions the same masks."""
    found = []
    for seed in (1, 2):
        with own_loop.session() as s:
            net = s.wrap(nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Linear(50, 2)))
            torch.manual_seed(seed)
            step = next(s.steps(8, batch=8, epoch=1))
            found.append(net[1](torch.ones(8, 50)))
            step.backward(net(torch.ones(8, 50)).sum())
    assert torch.equal(*found)


def test_evaluation_leaves_the_modes_of_layers_as_they_were() -> None:
    with own_loop.session() as s:
        frozen = nn.Dropout(0.5)
        model = nn.Sequential(nn.Linear(5, 3), frozen)
        s.wrap(model)
        frozen.eval()
        with s.evaluation() as net:
            assert net is model
            assert not model.training
            assert not net(torch.zeros(1, 5)).requires_grad
        assert model.training
        assert not frozen.training


def test_an_evaluation_in_the_midst_of_an_epoch_is_no_part_of_a_step() -> None:
    slept = 0.05
    with own_loop.session() as s:
        model = s.wrap(nn.Linear(5, 3))
        for number, step in enumerate(s.steps(8, batch=2, epoch=1)):
            step.backward(model(torch.zeros(2, 5)).sum())
            if number in (1, 3):  # the second of them after the last step
                with s.evaluation():
                    time.sleep(slept)
        record = s.end_epoch()
        assert record["eval_seconds"] >= 2 * slept
        assert record["samples"] == 8, "every step counts"
        rows = s.recorder.log.phase_seconds(0)
        assert rows["data"] < slept, "the next step's clock starts after it"


def test_mistakes_are_named() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.zeros(1, 5)).sum()  # type: ignore[no-any-return]

    with own_loop.session() as s:
        with pytest.raises(InputError, match=r"call s\.wrap"):
            next(iter(s.steps(4, batch=2, epoch=1)))
        model = s.wrap(nn.Linear(5, 3))
        with pytest.raises(InputError, match="one model"):
            s.wrap(nn.Linear(5, 3))
        with pytest.raises(InputError, match="no step was taken"):
            s.end_epoch()
        steps = s.steps(4, batch=2, epoch=1)
        step = next(steps)
        with pytest.raises(InputError, match="no parameter of the model"):
            step.backward(torch.zeros((), requires_grad=True) * 1)
        step.exchanged = False
        with pytest.raises(InputError, match="known are data, forward, optimizer"):
            step.lap("backward")
        step.backward(loss(model))
        with pytest.raises(InputError, match="exchanged already"):
            step.backward(loss(model))
        next(steps)
        with pytest.raises(InputError, match=r"without step\.backward"):
            next(steps)
        s.end_epoch()
        with pytest.raises(InputError, match="epoch=1 again"):
            next(iter(s.steps(4, batch=2, epoch=1)))


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_that_lockstep_did_not_start_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(InputError, match=r"2 processes were started .* but not by Lockstep"):
        own_loop.session()


# ---------------------------------------------------------------- scripts that go wrong


def ends(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script as a rank runs it."""
    script = folder / "wrong.py"
    script.write_text(text)
    run, spec = prepare(Recipe(), Placement(ranks=1), Options(script=str(script)), folder / "runs")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path)
    monkeypatch.setattr(own_loop, "_started", None)
    own_loop.run_script(Context(run, spec, Rank(0, 1, 0, 1), torch.device("cpu")))


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "print('hello')",
            InputError,
            "nothing of what it did was measured, and unless it joined its ranks by other means",
        ),
        ("import lockstep\ns = lockstep.session()\ns.__enter__()", InputError, "ended inside lockstep.session()"),
        ("import lockstep\nwith lockstep.session(): pass", InputError, "did not train"),
        ("import lockstep\nwith lockstep.session(): pass\nlockstep.session()", InputError, "did not train"),
        ("raise SystemExit(5)", RunFailed, "ended with exit code 5"),
    ],
)
def test_a_script_that_does_not_train_is_not_done(
    text: str, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kind) as caught:
        ends(tmp_path, text, monkeypatch)
    assert message in str(caught.value)


def test_words_that_a_script_does_not_read_are_refused(cli: Cli) -> None:
    (cli.folder / "train.py").write_text(SCRIPT)
    assert "epochs=5 has no effect on train.py" in cli.error("run", "train.py", "epochs=5", code=2)
    assert "accumulation=2 has no effect" in cli.error("run", "train.py", "accumulation=2", code=2)
    assert "strategy=fsdp does not go with train.py" in cli.error("run", "train.py", "strategy=fsdp", "ranks=2", code=2)
    assert "--time-limit has no effect" in cli.error("run", "train.py", "--time-limit", "3", code=2)
    assert "No such file" in cli.error("run", "trian.py", code=2)
    (cli.folder / "train.py").write_text("def :")
    assert "is not Python: SyntaxError: invalid syntax (train.py line 1)" in cli.error("run", "train.py", code=2)
    assert not cli.runs.exists()


def test_a_script_that_fails_names_its_rank(cli: Cli) -> None:
    (cli.folder / "train.py").write_text(
        "import lockstep\nwith lockstep.session() as s:\n    if s.rank == 1: raise ValueError('no such thing')\n    s.reduce_sum(1)"
    )
    message = cli.error("run", "train.py", "ranks=2", "threads=1", "backend=gloo", code=3)
    assert "rank 1: ValueError: no such thing" in message


# ---------------------------------------------------------------- the examples


def example(cli: Cli, name: str, *words: str) -> str:
    """What an example prints when Python runs it."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        cwd=cli.folder,
        env={**cli.environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_examples_of_own_loops(cli: Cli) -> None:
    result = cli("run", str(EXAMPLES / "own_loop.py"), "ranks=2", "backend=gloo", "--json", "--", "--epochs", "2")
    assert result.returncode == 0, result.stderr
    log = (Path(json.loads(result.stdout)["run"]) / "ranks" / "0000" / "log.txt").read_text()
    alone = example(cli, "own_loop.py", "--epochs", "2")
    assert alone == log, "one process and two ranks print the same four digits"
    before = example(cli, "own_loop_plain.py", "--epochs", "2")
    assert before.count("test accuracy") == log.count("test accuracy") == 2


def test_the_page_shows_the_difference_of_the_two_examples() -> None:
    """docs/own-loop.md quotes the changed lines: each must be in the example, and each changed line on the page."""
    page = (EXAMPLES.parent / "docs" / "own-loop.md").read_text()
    plain, ours = ((EXAMPLES / name).read_text().splitlines() for name in ("own_loop_plain.py", "own_loop.py"))
    changes = [line for line in difflib.unified_diff(plain, ours, n=0, lineterm="") if line[:1] in "+-"][2:]
    body = [line for line in changes if line[1:].strip() and not _about_itself(line)]
    for line in body:
        assert f"    {line}" in page.splitlines(), f"docs/own-loop.md does not show: {line}"
    assert sum(line.startswith("+") for line in body) <= 16


def _about_itself(line: str) -> bool:
    return "own_loop" in line or line[1:].startswith('"""')


def test_the_example_of_the_python_api(cli: Cli) -> None:
    one, two = (
        line.partition("test accuracy ")[2].partition("%")[0] for line in example(cli, "train_api.py").splitlines()
    )
    assert float(one) > 50
    assert float(two) == pytest.approx(float(one), abs=0.3), "the placement does not change the mathematics"
