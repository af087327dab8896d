"""Pictures of what commands print: `.venv/bin/python docs/terminals.py [PAGE...]` writes docs/pictures/terminal-PAGE.svg from real ones.

Each is carried out in a folder that goes away, as a reader would do it: what comes before it first, without a picture.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from pictures import FORMAT, HERE, environment, terminal
from rich.console import Console
from rich.text import Text

BIN = Path(sys.executable).parent
EXAMPLES = HERE.parent / "examples"
COLUMNS = 90
TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 12800
    def __getitem__(self, at): return torch.randn(256), at % 10
optimizer = torch.optim.Adam(model.parameters())
for x, y in DataLoader(Rows(), batch_size=64):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
FIRST = """import lockstep

if __name__ == "__main__":
    print(lockstep.run(data="embedded", epochs=1, ranks=2))
    print(lockstep.race("threads=2", "ranks=2 backend=shm", data="embedded", global_batch=256))
"""


class Shown(NamedTuple):
    command: str
    """What is typed, with its program; several lines are several commands."""
    before: tuple[str, ...] = ()
    most: int = 42
    folder: str = ""
    may_fail: bool = False


COLOR = "data=embedded-color model=cifar-vgg"
STUDIES = HERE / "studies"
WRONG = """lockstep run rnks=2
lockstep run data=embedded ranks=2 global_batch=1
lockstep race ranks=1
lockstep show nothing
lockstep data fetch minst
lockstep run data=embedded model=nets.py:Net"""
SHOWN = {
    "attach": Shown("lockstep explain last", ("lockstep attach -- python train.py",)),
    "augmentation": Shown(
        "lockstep race augment.flip=false augment.flip=true augment.crop=4 augment.rotation=15 --all data=embedded"
    ),
    "checkpoints": Shown(
        "lockstep run --resume last ranks=2 epochs=4", ("lockstep run data=embedded epochs=2 --checkpoint-every 1",)
    ),
    "clusters": Shown(
        "lockstep comms hosts=emulated:2 ranks=2 link=1gbit,0.5ms --collective all_reduce --backend gloo"
    ),
    "data": Shown("lockstep data show embedded --count 6"),
    "emulated-hosts": Shown("lockstep run data=embedded ranks=4 hosts=emulated:2 link=1gbit,0.5ms"),
    "export": Shown(
        "lockstep export last -o run.csv\nlockstep export last --what steps -o steps.csv\n"
        "lockstep export last --format tensorboard -o board",
        ("lockstep run data=embedded epochs=1",),
    ),
    "extending": Shown("lockstep models"),
    "labs": Shown("lockstep lab list"),
    "labs-students": Shown("lockstep lab status", ("lockstep lab new devices --student 'Ana Li'",), folder="devices"),
    "machine": Shown("lockstep doctor", most=60),
    "mpi": Shown("lockstep run data=embedded backend=mpi ranks=2"),
    "optimizers": Shown("lockstep study show optimizers", (f"lockstep study unpack {STUDIES}/optimizers.study.zip",)),
    "own-loop": Shown("lockstep run own_loop.py ranks=2"),
    "placements": Shown("lockstep run data=embedded ranks=4 global_batch=256 accumulation=2 --dry-run"),
    "precision": Shown(f"lockstep race precision=fp32 precision=bf16 precision=pure-bf16 --all '{COLOR}'"),
    "preflight": Shown("lockstep preflight hosts=emulated:2 link=1gbit", may_fail=True),
    "published-recipes": Shown("lockstep recipes"),
    "python": Shown("cat first.py\npython first.py"),
    "ray": Shown("lockstep run data=embedded launcher=ray ranks=2"),
    "recipes": Shown("lockstep run data=embedded optimizer.name=sgd optimizer.lr=0.05 schedule.name=cosine epochs=3"),
    "regularization": Shown(
        "lockstep race regularize.dropout=0 regularize.dropout=0.3 regularize.batch_norm=per-rank regularize.mixup=0.2 --all data=embedded"
    ),
    "robustness": Shown(WRONG, may_fail=True),
    "shares": Shown("lockstep run data=embedded ranks=2 'shares=[3,1]'"),
    "shm": Shown("lockstep comms --collective all_reduce --quick"),
    "slurm": Shown("lockstep run data=embedded launcher=slurm hosts=2 ranks=4 threads=1 --dry-run", most=50),
    "studies": Shown("lockstep study show batch-size", (f"lockstep study unpack {STUDIES}/batch-size.study.zip",)),
    "tasks": Shown("lockstep run model=gpt data=embedded-text loss=next-token epochs=1 train_limit=4000"),
    "tune": Shown("lockstep tune data=embedded --budget 40s"),
    "tutorial": Shown("lockstep run data=embedded epochs=2 ranks=2"),
    "verify": Shown("lockstep verify data=embedded ranks=2"),
}


def main(words: list[str]) -> None:
    for page in words or SHOWN:
        out = terminal_of(SHOWN[page])
        out.save_svg(str(HERE / "pictures" / f"terminal-{page}.svg"), code_format=FORMAT, title=page)
        print(page, flush=True)


def terminal_of(shown: Shown) -> Console:
    with tempfile.TemporaryDirectory(prefix="lockstep-pictures-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        (folder / "first.py").write_text(FIRST)
        for example in EXAMPLES.glob("own_*.py"):
            shutil.copy(example, folder)
        for line in shown.before:
            said(folder, line)
        lines: list[Text] = []
        for line in shown.command.splitlines():
            text = said(folder / shown.folder, line, check=not shown.may_fail)
            lines += [Text(f"$ {line}", style="bold"), *Text.from_ansi(text.rstrip("\n")).split("\n")]
    out = terminal(width=COLUMNS + 4)
    for one in lines[: shown.most]:
        out.print(one)
    if len(lines) > shown.most:
        out.print(Text("…", style="dim"))
    return out


def said(folder: Path, line: str, check: bool = True) -> str:
    """What a terminal shows at the end: progress that was overwritten is gone."""
    more = {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        shlex.split(line),
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=check,
    )
    return "\n".join(screen(done.stdout.decode().replace(str(folder), "~").replace(str(Path.home()), "~")))


def screen(text: str) -> list[str]:
    """The lines that a terminal is left with. What is drawn live goes back or up, and rubs out what it drew before."""
    lines, back = [""], False
    for part in re.split(r"(\x1b\[1A|\x1b\[2K|\r|\n)", text):
        if part == "\x1b[1A":
            lines.pop()
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part == "\n":
            lines.append("")
        elif part and part != "\r":
            lines[-1] = part if back else lines[-1] + part
        back = part == "\r" or (back and not part)
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
