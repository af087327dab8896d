"""The planted causes: the script that each is in, how it is launched, and the word by which `lockstep explain` has to name it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent / "scripts"
ONE = ("{python}",)
TORCHRUN = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    "{python}",
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes",
    "2",
    "--main_process_port",
    "0",
)


@dataclass(frozen=True)
class Cause:
    """`named`: the cause that `explain` has to give first; "" where nothing is planted, and nothing may be named."""

    name: str
    script: str
    named: str
    launch: tuple[str, ...] = ONE

    def command(self, python: str) -> list[str]:
        words = [word.format(python=python) for word in self.launch]
        return [*words, str(HERE / self.script), self.name]


CAUSES = (
    Cause("slow loader", "plain.py", "loader"),
    Cause("workers anew", "plain.py", "workers"),
    Cause("values read one by one", "plain.py", "reading"),
    Cause("histograms every step", "plain.py", "logging"),
    Cause("per-parameter update", "plain.py", "optimizer"),
    Cause("profiler left on", "plain.py", "profiler"),
    Cause("evaluation with gradients", "plain.py", "no-grad"),
    Cause("DataParallel", "plain.py", "data-parallel"),
    Cause("gc.collect every step", "plain.py", "collecting"),
    Cause("busy neighbour", "plain.py", "neighbour"),
    Cause("double precision", "plain.py", "float64"),
    Cause("tiny buckets", "ddp.py", "buckets", TORCHRUN),
    Cause("threads over cores", "ddp.py", "threads", TORCHRUN),
    Cause("evaluation that pads", "ddp.py", "padding", TORCHRUN),
    Cause("no set_epoch", "ddp.py", "order", TORCHRUN),
    Cause("evaluation on every rank", "ddp.py", "unsharded", TORCHRUN),
    Cause("slow rank", "ddp.py", "rank", TORCHRUN),
    Cause("slow collective", "ddp.py", "exchange", TORCHRUN),
    Cause("slow callback", "with_lightning.py", "callbacks"),
    Cause("validation every few steps", "with_lightning.py", "evaluation"),
    Cause("anomaly detection", "with_lightning.py", "anomaly"),
    Cause("find_unused_parameters", "with_accelerate.py", "unused", ACCELERATE),
    Cause("schedule per process", "with_accelerate.py", "schedule", ACCELERATE),
    Cause("accumulation without no_sync", "with_accelerate.py", "no-sync", ACCELERATE),
    Cause("checkpoint every other step", "with_trainer.py", "checkpoints"),
)
NOTHING = (
    Cause("nothing, plain", "plain.py", ""),
    Cause("nothing, DDP", "ddp.py", "", TORCHRUN),
    Cause("nothing, Lightning", "with_lightning.py", ""),
    Cause("nothing, Accelerate", "with_accelerate.py", ""),
    Cause("nothing, Trainer", "with_trainer.py", ""),
)
