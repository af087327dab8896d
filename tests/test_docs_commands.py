"""The commands of the pages: each is accepted, and each is carried out, in a folder where what the page speaks of is there.
What it says to type next is accepted too.

Carried out in small: what trains takes a few hundred images, what measures takes seconds. What the machine is found to be is not judged.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from command_lines import Words, next_ones, refused
from house import ROOT
from slurm_cluster import Cluster
from support import Cli

# Those of "extending" need the package that it writes, and those of the tutorial are carried out in full: tests of their own.
README = ROOT / "README.md"
ELSEWHERE_TESTED = ("extending.md", "tutorial.md")
PAGES = [page for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]) if page.name not in ELSEWHERE_TESTED]


def typed(page: Path) -> list[Words]:
    """The command lines that stand by themselves, without the remark behind them. One with an ellipsis or a RUN is not whole."""
    found = re.findall(r"^ {4}(?:\$ )?lockstep ([^\n|>&]*)$", page.read_text(), flags=re.MULTILINE)
    found += re.findall(r"^\$ lockstep ([^\n|>&]*)$", page.read_text(), flags=re.MULTILINE)
    if page == README:  # its commands are in tables
        rows = re.findall(r"^\|.*", page.read_text(), flags=re.MULTILINE)
        found += [line for row in rows for line in re.findall(r"`lockstep ([^`]*)`", row)]
    lines = [
        re.split(r"\s{2,}|\s# |…", line)[0].strip() for line in found if ",…" not in line and "--name …" not in line
    ]
    return [shlex.split(line) for line in lines if line and not re.search(r"\b[A-Z]{3,}\b", line)]


WITH_COMMANDS = [page for page in PAGES if typed(page)]
# Their commands are accepted, and not carried out: test_report_views.py unpacks and shows every one of the packs.
OF_STUDIES = [page for page in sorted(ROOT.glob("docs/studies/*.md")) if typed(page)]


@pytest.mark.parametrize("page", [*WITH_COMMANDS, *OF_STUDIES], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_accepted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one with its options, and of those that train with its keys and their values."""
    monkeypatch.chdir(ROOT)
    for words in typed(page):
        why = refused(words)
        assert not why, f"{page.name}: lockstep {shlex.join(words)}: {why}"


# What is not carried out here, and what carries it out instead.
NOT_HERE = {
    "dashboard": "it serves until it is ended: test_dashboard_server.py, test_dashboard_browser.py",
    "lab": "a lab takes minutes, and answers that are thought out: test_lab_solved.py, test_lab_check.py",
    "predict --check": "an hour: test_predict_real.py takes a part of it",
    "run backend=mpi ranks=2 mpi=openmpi": "needs both MPIs: test_mpi.py",
    "run launcher=ray ranks=4 hosts=2 ray.address=10.0.0.1:6379": "needs a cluster: test_ray.py starts one",
    "data fetch": "needs the network",
    "data show cifar10": "needs the network",
    "export batch-size --format mlflow": "needs MLflow: test_export_trackers.py",
    "export batch-size --format trackio": "needs trackio: test_export_offline.py",
    "kernels bench": "a minute: test_kernels_bench.py",
    "quantize last --measure": "a minute: test_quantize_cli.py",
    "report 'runs/2026*'": "the name of a year: test_report.py",
}
# What takes minutes even in small: the plan is made and printed.
ONLY_PLANNED = ("study run",)
# Names of a cluster that is not ours, and sizes that this one does not have.
ELSEWHERE = {
    "slurm.partition=debug": "slurm.partition=test",
    "threads=8": "threads=1",
    "threads=16": "threads=1",
    "hosts=4": "hosts=2",
    "data=cifar10": "data=embedded-color",
    "--budget": "",
    "5min": "",
    "/data/runs": "runs",
}
SMALL = {"data": "embedded", "train_limit": "256", "test_limit": "64"}


def in_small(words: Words) -> Words:
    """The same command, sooner done. Of `run --resume` the recipe is that of the run."""
    line = shlex.join(words)
    if line.startswith(ONLY_PLANNED):
        return [*words, *([] if "--dry-run" in words else ["--dry-run"])]
    rest = words[words.index("--") :] if "--" in words else []
    words = [ELSEWHERE.get(word, word) for word in words[: len(words) - len(rest)]]
    words = [word for word in words if word]
    ours = [f"{key}={value}" for key, value in SMALL.items() if not any(word.startswith(f"{key}=") for word in words)]
    match words[0]:
        case "run" if not {"--resume", "train.py", "loop.py"} & set(words):
            words += ours if "loss=next-token" not in words else ["train_limit=256", "test_limit=64"]
            words += ["threads=1"] if "examples/slurm.toml" in words else []
        case "verify" if not rest:
            words += [] if "data=sets.py:load" in words else ours
        case "race":
            words += ["--budget", "20s"]
            if "--all" in words:
                words[words.index("--all") + 1] += " " + " ".join(ours)
            elif "$" not in line:
                words += ["--all", " ".join(ours)]
        case "tune":
            words += [*ours, "--budget", "15s"]
        case "predict" if not {"last", "one", "second"} & set(words):
            words += ours
        case "explain" if "--measure" in words:
            words += ["--seconds", "2"]
        case "comms" if "--capabilities" not in words:
            words += [*([] if "--quick" in words else ["--quick"]), "--max-bytes", "1024", "--rounds", "1"]
            words += [] if "--collective" in words else ["--collective", "all_reduce"]
        case "runs" if "--delete" in words:
            words += [] if "--yes" in words else ["--yes"]
        case _:
            pass
    return [*words, *rest]


def not_here(words: Words) -> bool:
    return any(shlex.join(words).startswith(line) for line in NOT_HERE)


NETS = """
from torch import nn
def Net():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
"""
SETS = """
import numpy as np
def load():
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (320, 1, 28, 28), dtype=np.uint8)
    labels = generator.normal(size=(320, 10)).astype(np.float32)
    return {"train_images": images[:256], "train_labels": labels[:256], "test_images": images[256:], "test_labels": labels[256:]}
"""
MINE = """
from torch.nn import functional
def loss(outputs, targets):
    return functional.mse_loss(outputs, targets, reduction="none").sum(1)
def f1(outputs, targets):
    return (outputs > 0).eq(targets > 0).float().mean(1)
"""
RINGS = "import torch.distributed as dist\ndef sum(tensor):\n    dist.all_reduce(tensor)\n"
PLAIN = """
import sys, time
for step in range(100000):
    time.sleep(0.01)
    print("step", step, flush=True)
"""
LOOP = """
import torch
model, data = torch.nn.Linear(200, 10), torch.utils.data.TensorDataset(torch.randn(6400, 200), torch.randn(6400, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in torch.utils.data.DataLoader(data, batch_size=32):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
STUDY = 'baseline = "a"\nrepeats = 2\n[recipe]\ndata = "embedded"\n[cells.a]\nranks = 1\n[cells.b]\nranks = 2\n'


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and runs that the pages speak of."""
    cli = Cli(tmp_path_factory.mktemp("desk"))
    shutil.copytree(ROOT / "examples", cli.folder / "examples", ignore=shutil.ignore_patterns("notebooks"))
    for name in ("own_data.py", "own_model.py"):
        shutil.copy(ROOT / "examples" / name, cli.folder)
    files = {"nets.py": NETS, "sets.py": SETS, "mine.py": MINE, "rings.py": RINGS, "mine.toml": STUDY}
    files["my_data.py"] = "from own_data import stripes as load"
    files["my.toml"] = 'model = "mnist-convnet"\ndata = "embedded"\nglobal_batch = 64\n'
    for name, text in files.items():
        (cli.folder / name).write_text(text)
    for study in ("batch-size", "scaling"):
        pack = ROOT / f"docs/studies/{study}.study.zip"
        shutil.copy(pack, cli.folder)
        assert cli("study", "unpack", str(pack)).returncode == 0
    for name in ("laptop", "ana"):
        shutil.copy(ROOT / "docs/studies/batch-size.study.zip", cli.folder / f"{name}.study.zip")
    small = [f"{key}={value}" for key, value in SMALL.items()]
    for name in ("first", "second"):
        cli.run(*small, "ranks=2", "epochs=3", "strategy=ddp", "--checkpoint-every", "1", "--name", name)
    assert cli("runs", "first", "--tag", "good").returncode == 0
    return cli.folder


def scripts(page: Path) -> dict[str, str]:
    """`train.py` is another one on each page: a loop with Lockstep's session, one for torchrun, or any program."""
    if page.name == "own-loop.md":
        text = (ROOT / "examples/own_loop.py").read_text()
        return {"train.py": text.replace("    words =", "    parser.add_argument('--width')\n    words =")}
    if page == README:
        own_loop = (ROOT / "examples/own_loop.py").read_text()
        ddp = (ROOT / "tests/foreign/ddp.py").read_text()
        return {"train.py": ddp, "loop.py": own_loop, "sets.py": "from own_data import stripes as load"}
    if page.name in ("attach.md", "predict.md"):
        return {"train.py": LOOP}
    if page.name == "race.md":
        return {"train.py": PLAIN, "before/train.py": PLAIN}
    if page.name == "strategies.md":
        found = re.search(r"```python\n# mine.py\n(.*?)```", page.read_text(), re.DOTALL)
        assert found
        return {"mine.py": found[1]}
    if page.name == "verify.md":
        ddp = (ROOT / "tests/foreign/ddp.py").read_text()
        return {"train.py": ddp, "sets.py": "from own_data import stripes as load"}
    return {}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "data"


@pytest.fixture
def at_desk(desk: Path, cache: Path, cli: Cli) -> Iterator[Cli]:
    """A copy of it, with a cache of its own: what is measured here must not change what backend=auto chooses elsewhere."""
    shutil.copytree(desk, cli.folder, dirs_exist_ok=True)
    binaries = Path(sys.executable).absolute().parent
    cli.environment |= {
        "LOCKSTEP_DATA": str(cache),
        "PATH": f"{binaries}:{cli.environment['PATH']}",
    }
    return cli


def carry_out(cli: Cli, page: Path, commands: list[Words]) -> None:
    for name, text in scripts(page).items():
        (cli.folder / name).parent.mkdir(exist_ok=True)
        (cli.folder / name).write_text(text)
    for words in commands:
        if page == README:  # its rows do not follow from each other
            words = ["second" if word == "last" else word for word in words]
        done = cli(*in_small(words), timeout=300)
        codes = (0, 3) if words[0] == "preflight" else (0,)  # 3: it found something, on a machine that others use
        assert done.returncode in codes, (shlex.join(words), shlex.join(in_small(words)), done.stderr[-1500:])
        with chdir(cli.folder):
            wrong = {shlex.join(line): why for line in next_ones(done.stderr) if (why := refused(line))}
        assert not wrong, f"lockstep {shlex.join(words)} says to type what is not accepted: {wrong}"


def on_slurm(page: Path, words: Words) -> bool:
    """A link is measured between hosts."""
    return page.name == "slurm.md" or "launcher=slurm" in words or "measured" in words


def chosen(page: Path, slurm: bool) -> list[Words]:
    """The README's commands are those of the pages; only what is on no other page is carried out for it."""
    others = [words for other in WITH_COMMANDS if page == README != other for words in typed(other)]
    found = [words for words in typed(page) if on_slurm(page, words) == slurm and not not_here(words)]
    return [words for words in found if words not in others]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", [page for page in WITH_COMMANDS if chosen(page, slurm=False)], ids=lambda page: page.stem
)
def test_commands_work(page: Path, at_desk: Cli) -> None:
    carry_out(at_desk, page, chosen(page, slurm=False))


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [page for page in WITH_COMMANDS if chosen(page, slurm=True)], ids=lambda page: page.stem
)
def test_commands_work_on_slurm(page: Path, at_desk: Cli, cluster: Cluster) -> None:
    at_desk.environment |= cluster.environment
    fit = [["predict", "last", "--measure"]] if page.stem == "predict" else []
    carry_out(at_desk, page, [*fit, *sorted(chosen(page, slurm=True), key=lambda words: words[0] != "comms")])


def test_what_is_not_carried_out_is_still_on_a_page() -> None:
    lines = [shlex.join(words) for page in WITH_COMMANDS for words in typed(page)]
    for begin in (*NOT_HERE, *ONLY_PLANNED):
        assert any(line.startswith(begin) for line in lines), begin
