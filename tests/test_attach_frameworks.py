"""`lockstep attach` with other trainers: the newest of each, in an environment of their own. The same bits, names for what they do, and curves.

Also the cheapest of the planted causes (benchmarks/suspects): `explain` has to name each first, and nothing where nothing is planted.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from house import ROOT
from lockstep.dashboard.maker import Asked, make
from lockstep.inside.layout import BESIDE
from lockstep.measure.attached import read_beside
from lockstep.measure.records import PHASES, read_steps
from lockstep.measure.view import RunView
from support import Cli
from test_attach import attach, last, same_bits, write

sys.path.insert(0, str(ROOT))
from benchmarks.suspects.causes import CAUSES, NOTHING, Cause
from benchmarks.suspects.execute import MACHINE, executed

LIGHTNING = """
import sys, torch, lightning
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
lightning.seed_everything(0)
data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16384), nn.ReLU(), nn.Linear(16384, 10))
    def training_step(self, batch, number):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, number):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
net = Net()
silent = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=CSVLogger("logs"), log_every_n_steps=4, **silent)
trainer.fit(net, DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_size=256))
torch.save(net.state_dict(), sys.argv[1])
"""
ACCELERATE = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with="tensorboard", project_dir="logs")
accelerator.init_trackers("trial")
set_seed(0)
data = TensorDataset(torch.randn(2048, 64), torch.randint(0, 10, (2048,)))
net = nn.Sequential(nn.Linear(64, 16384), nn.ReLU(), nn.Linear(16384, 10))
optimizer = torch.optim.AdamW(net.parameters())
net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=32, shuffle=True))
for a, b in loader:
    with accelerator.accumulate(net):
        loss = nn.functional.cross_entropy(net(a), b)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        accelerator.log({"loss": loss, "text": "is no curve"})
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(net).state_dict(), sys.argv[1])
accelerator.end_training()
"""
TRANSFORMERS = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.set_num_threads(1)
torch.manual_seed(0)
class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        ids = torch.randint(0, 100, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}
net = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=2))
settings = TrainingArguments(output_dir="out", per_device_train_batch_size=8, num_train_epochs=1, use_cpu=True, report_to=[],
    save_strategy="no", disable_tqdm=True, eval_strategy="epoch", logging_steps=8, seed=0)
Trainer(model=net, args=settings, train_dataset=Text(), eval_dataset=Text()).train()
torch.save({key: value.clone() for key, value in net.state_dict().items()}, sys.argv[1])
"""


def attributed(rows: Any, folder: Path) -> float:
    """The share of a step's time that has a name, also beside its phases."""
    beside = read_beside(folder)[: len(rows)]
    named = sum(rows[f"{phase}_ns"] for phase in PHASES) + sum(beside[f"{name}_ns"] for name in BESIDE)
    return float(np.median((named / rows["total_ns"])[rows["warmup"] == 0]))


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "launcher", "steps", "ranks", "logged"),
    [
        (LIGHTNING, (), 32, 1, {"train_loss": range(4, 33, 4), "val_loss": (16, 32)}),
        (TRANSFORMERS, (), 32, 1, {"loss": range(8, 33, 8), "eval_loss": (32,)}),
        (ACCELERATE, (), 32, 1, {"loss": range(1, 33)}),
        (
            ACCELERATE,
            ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"),
            16,
            2,
            {"loss": range(1, 17)},
        ),
    ],
    ids=["lightning", "transformers", "accelerate", "accelerate launch"],
)
def test_other_trainers(
    cli: Cli,
    frameworks: Path,
    script: str,
    launcher: tuple[str, ...],
    steps: int,
    ranks: int,
    logged: dict[str, Sequence[int]],
) -> None:
    write(cli, "other", script)
    found = attach(cli, str(frameworks), *launcher, "other.py", "attached.pt", timeout=600)
    assert found.returncode == 0, found.stderr
    alone = [str(frameworks), *launcher, "other.py", "alone.pt"]
    subprocess.run(alone, cwd=cli.folder, check=True, timeout=600, capture_output=True)
    assert same_bits(cli.folder / "attached.pt", cli.folder / "alone.pt")
    run = last(cli)
    rows = [read_steps(folder / "steps.bin") for folder in run.rank_folders()]
    assert [len(each) for each in rows] == [steps] * ranks
    assert min(attributed(each, folder) for each, folder in zip(rows, run.rank_folders(), strict=True)) > 0.95
    curves = {each.name: each.steps for each in RunView(run.folder).logged()}
    assert {name: curves[name] for name in logged} == {name: list(at) for name, at in logged.items()}
    assert "text" not in curves
    if ranks > 1:
        assert run.spec().placement.strategy == "ddp"
    if script is not ACCELERATE:
        assert (run.summary() or {})["eval_seconds"] > 0


BOARD = """
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
torch.set_num_threads(1)
writer = SummaryWriter("board")
net = nn.Linear(64, 10)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(20):
    optimizer.zero_grad()
    loss = net(torch.ones(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    writer.add_scalar("train/loss", loss, 100 * step)
    writer.add_scalars("both", {"one": 1, "other": step}, step)
writer.close()
"""


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(900)
def test_what_is_logged_is_in_every_view(cli: Cli, frameworks: Path) -> None:
    """The steps are the optimizer's, whatever the script counts."""
    write(cli, "board", BOARD)
    for name in ("one", "two"):
        assert attach(cli, str(frameworks), "board.py", options=("--name", name), timeout=600).returncode == 0
    logged = RunView(cli.runs / "one").logged()
    assert [each.name for each in logged] == ["train/loss", "both/one", "both/other"]
    assert logged[0].steps == list(range(1, 21))
    first = logged[0].values[:8]  # later ones are rounding
    assert first == sorted(first, reverse=True)
    assert logged[2].values == list(range(20))
    assert "train/loss" in cli("show", "one").stdout
    for words in (
        ("report", "one", "two", "-o", "page.html"),
        ("compare", "one", "two"),
        ("export", "one", "--what", "logged", "-o", "logged.csv"),
    ):
        answer = cli(*words)
        assert answer.returncode == 0, (words, answer.stderr)
    page = (cli.folder / "page.html").read_text()
    assert "logged-loss" in page
    assert "train/loss" in page
    assert len((cli.folder / "logged.csv").read_text().splitlines()) == 1 + 3 * 20
    charts = [
        chart.id for part in make(Asked(runs=[str(cli.runs / "one")])).parts for chart in part.charts
    ]  # of the dashboard
    assert {"logged-loss", "logged-other", "step"} <= set(charts)
    board = cli("export", "one", "--format", "tensorboard", "-o", "out")
    assert board.returncode == 0, board.stderr
    assert b"logged/train/loss" in next((cli.folder / "out" / "one").iterdir()).read_bytes()


# Those that need PyTorch alone, and one of each framework; the size of the others matters more, and the machine may be busy.
CHEAP = (
    "slow loader",
    "values read one by one",
    "per-parameter update",
    "profiler left on",
    "DataParallel",
    "gc.collect every step",
    "double precision",
    "threads over cores",
    "evaluation on every rank",
    "evaluation that pads",
    "no set_epoch",
    "anomaly detection",
    "schedule per process",
    "slow callback",
    "find_unused_parameters",
    "checkpoint every other step",
)


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause.name in CHEAP], ids=lambda cause: cause.name)
def test_a_planted_cause_is_named_first(frameworks: Path, cause: Cause) -> None:
    found = executed(cause, frameworks)
    assert found["right"], found


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cause", [cause for cause in NOTHING if cause.script != "ddp.py"], ids=lambda cause: cause.name
)
def test_nothing_is_named_where_nothing_is_planted(frameworks: Path, cause: Cause) -> None:
    found = executed(cause, frameworks)
    assert found["right"], found


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(900)
def test_ddp_where_nothing_is_planted(frameworks: Path) -> None:
    """On a busy machine ranks wait for each other, and exchanges and waiting are named: that is true. Nothing that the script does is."""
    (cause,) = (cause for cause in NOTHING if cause.script == "ddp.py")
    found = executed(cause, frameworks)
    assert set(found["named"]) <= {*MACHINE, "exchange", "waiting"}, found


def test_each_planted_cause_is_one_that_explain_can_name() -> None:
    source = " ".join(path.read_text() for path in (ROOT / "src/lockstep/explain").glob("*.py"))
    assert len(CAUSES) == 25
    assert all(f'"{cause.named}"' in source for cause in CAUSES)
