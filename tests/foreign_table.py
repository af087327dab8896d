"""Foreign scripts with planted faults, many in one pair of processes, and what `lockstep verify -- COMMAND` says of each.

`records` runs them as the command does (inside/witness.py is in every process), and `verdicts` judges them as the command does.
`python tests/foreign_table.py [PYTHON WITH ACCELERATE]` writes the table of docs/verify.md, which a test holds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.inside.site.sitecustomize import PROOF
from lockstep.turns import guard
from lockstep.verify.foreign.judge import Judge, Verdict
from lockstep.verify.foreign.prove import perturbation, stretched
from lockstep.verify.foreign.records import Rank, problem, read

SCRIPTS = Path(__file__).with_name("foreign")
# These faults are in the script whatever the number of ranks, so the one process has them too.
EVERYWHERE = ("padding", "loss summed", "not divided", "set_epoch")


class Row(NamedTuple):
    """One script: its kind, its fault, the step in which that begins, and a seed."""

    kind: str = "plain"
    fault: str = ""
    start: int = 1
    seed: int = 0

    @property
    def alone(self) -> Row:
        """What one process makes of it."""
        return Row(self.kind, self.fault if self.fault in EVERYWHERE else "", 1, self.seed)


def records(
    script: str, rows: Sequence[Row], settings: Sequence[dict[str, object]], folder: Path, launcher: Sequence[str]
) -> list[list[Rank]]:
    """Run the rows one after the other in one set of ranks."""
    folder.mkdir(parents=True)
    asked = {"steps": 8, "no_dropout": False, "perturb": 0.0, "stretch": None, "replay": None, "park": False}
    (folder / "settings.json").write_text(json.dumps(asked))
    given = [
        {"arguments": [row.kind, row.fault, str(row.start), str(row.seed)], "settings": {**asked, **more}}
        for row, more in zip(rows, settings, strict=True)
    ]
    (folder / "rows.json").write_text(json.dumps(given))
    words = [*launcher, str(SCRIPTS / "driver.py"), str(SCRIPTS / f"{script}.py"), str(folder)]
    done = subprocess.run(words, env=guard.hooked(PROOF, folder), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = []
    for number, row in enumerate(rows):
        assert problem(folder / str(number)) is None, (row, problem(folder / str(number)))
        found.append(read(folder / str(number)))
    return found


def verdicts(
    script: str,
    rows: Sequence[Row],
    folder: Path,
    launch: tuple[Sequence[str], Sequence[str]] | None = None,
) -> dict[Row, Verdict]:
    """What the command would say of each row."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    ranks, one = launch or ([*torchrun, "2"], [*torchrun, "1"])
    many = records(script, rows, [{}] * len(rows), folder / "ranks", ranks)
    asked: dict[Row, dict[str, object]] = {}
    for row, found in zip(rows, many, strict=True):
        if row.alone not in asked:
            asked[row.alone] = {"stretch": stretched(found), "perturb": perturbation(found)}
    alone, settings = list(asked), list(asked.values())
    plain = [{**each, "perturb": 0.0} for each in settings]
    # The one process and its twin: in one process, one after the other.
    both = records(script, [*alone, *alone], [*plain, *settings], folder / "one", one)
    ones = {row: each[0] for row, each in zip(alone, both[: len(alone)], strict=True)}
    twins = {row: each[0] for row, each in zip(alone, both[len(alone) :], strict=True)}
    return {
        row: Judge(found, ones[row.alone], twins[row.alone]).verdict() for row, found in zip(rows, many, strict=True)
    }


def both(faults: str, kind: str = "plain") -> list[Row]:
    """From the first step on, and from the fifth."""
    return [Row(kind, fault, start) for fault in faults.split(", ") for start in (1, 5)]


def once(faults: str, kind: str = "plain", start: int = 1) -> list[Row]:
    return [Row(kind, fault, start) for fault in faults.split(", ")]


MUTANTS: dict[str, list[Row]] = {
    "ddp": [
        *both("sum, divided twice, two per mille, bf16, fp16, maximum, rank 0's gradient, no_sync left on"),
        *once("stale bucket", start=3),
        *once("stale bucket", start=5),
        *once("parameter left out, no sampler, padding, set_epoch, loss summed"),
        *both("order of rank, sample twice, wrong label, rank 1 counts for nothing"),
        *both("loss times ranks, loss divided by ranks, lr scaled, momentum, scheduler N times"),
        *both("state forgotten, an update skipped, drifts between steps"),
        *both("augmentation of rank", "augmented"),
        *both("not divided on ranks, no_sync left on, exchanges the first pass alone", "accumulation"),
        *both("clip by ranks", "clip"),
        *once("last batch by rank", "uneven"),
        *once("", "norm"),
        *once("buffers", "norm"),
        *once("not divided", "accumulation"),
        *once("seed of rank"),
        *once("", "dropout"),
        *once("sum", start=9),
    ],
    "by_hand": [
        *both("no exchange, parameter left out, stale bucket, bf16, fp16, maximum, rank 0's gradient"),
        *both("divided by ranks, divided by the local batch, two per mille, one entry 1 % off, not a number"),
        *both("one share 1 % off, one rank 1 % off, clip before the exchange, last batch by rank"),
        *both("sample of another rank, a sample missing, inputs scaled, decay per rank, buffers"),
        *once("seed of rank"),
    ],
    "sharded": [
        *both("sum, loss times ranks, wrong label, rank 1 counts for nothing, sample twice"),
        *both("state forgotten, an update skipped, a part 1 % off, lr of one rank, drifts between steps"),
        *once("bf16, lr scaled, no sampler, seed of rank"),
        *both("clip of a part", "clip"),
        *both("not divided on ranks", "accumulation"),
    ],
    "accelerated": [
        *once("model not prepared, loader not prepared, scheduler N times"),
        *both("loss times ranks"),
        *both("clip by ranks", "clip"),
    ],
}
# What cannot be found, and why.
NOT_FOUND = {
    ("ddp", "not divided"): "one process does the same: a fault of the script, not of its ranks",
    ("ddp", "seed of rank"): "DDP sends the weights of rank 0 to all: it is no fault",
    ("ddp", "dropout"): '"not proven": masks differ by nature; `--no-dropout` takes them away',
    ("ddp", "sum", 9): "it begins after the steps that are compared; `--steps N` compares more",
}
RIGHT = {
    "ddp": ("plain", "hook", "accumulation", "clip", "amp", "optimizers", "uneven", "augmented", "compiled"),
    "by_hand": ("plain",),
    "sharded": ("plain", "whole", "adam", "clip", "accumulation"),
    "accelerated": ("plain", "accumulation", "clip"),
}
# The faults in plain words, where their names are not.
WORDS = {
    "sum": "gradients summed, not averaged",
    "divided twice": "gradients divided by the ranks twice",
    "two per mille": "gradients 0.2 % too large on all ranks",
    "bf16": "exchange rounds to bf16",
    "fp16": "exchange rounds to fp16",
    "maximum": "maximum of the gradients instead of their sum",
    "rank 0's gradient": "rank 0's gradient is sent to all",
    "no_sync left on": "`no_sync` left on",
    "stale bucket": "gradients of the step before",
    "parameter left out": "one parameter left out of the exchange",
    "no sampler": "no `DistributedSampler`",
    "padding": "a sampler that pads the last batch",
    "set_epoch": "no `set_epoch`",
    "loss summed": "a loss that is a sum, with DDP's mean",
    "order of rank": "each rank draws its own order",
    "sample twice": "rank 1 takes a sample twice",
    "wrong label": "rank 1 has wrong labels",
    "rank 1 counts for nothing": "rank 1's loss times 0",
    "loss times ranks": "loss multiplied by the ranks",
    "loss divided by ranks": "loss divided by the ranks",
    "lr scaled": "learning rate scaled by the ranks",
    "momentum": "momentum 0.95 instead of 0.9",
    "scheduler N times": "scheduler steps once per rank",
    "state forgotten": "momentum forgotten in every step",
    "an update skipped": "rank 1 updates with a gradient of 0",
    "drifts between steps": "weights times 1.001 after every step",
    "augmentation of rank": "augmentation by a seed of the rank",
    "not divided on ranks": "accumulated loss not divided, on the ranks",
    "not divided": "accumulated loss not divided, in one process either",
    "exchanges the first pass alone": "`no_sync` on the last pass instead of the others",
    "clip by ranks": "clipping at N times the norm",
    "last batch by rank": "last batch averaged by rank, not by sample",
    "buffers": "buffers not synchronised",
    "seed of rank": "weights seeded by rank",
    "divided by ranks": "sum divided by the ranks, of losses divided by the global batch",
    "divided by the local batch": "sum of losses divided by the local batch",
    "one entry 1 % off": "one entry of one tensor 1 % off",
    "not a number": "NaN in one entry",
    "one share 1 % off": "rank 1's gradient weighs 1 % more",
    "one rank 1 % off": "rank 1 gets a gradient 1 % larger",
    "sample of another rank": "rank 1 takes a sample of rank 0",
    "a sample missing": "rank 1 leaves a sample out",
    "inputs scaled": "rank 1's inputs times 1.002",
    "decay per rank": "weight decay times the ranks",
    "a part 1 % off": "rank 1's part of one gradient 1 % larger",
    "lr of one rank": "learning rate of rank 1 1 % larger",
    "clip of a part": "every rank clips by the norm of its own part",
}
NAMES = {"ddp": "DDP", "by_hand": "by hand", "sharded": "fully_shard", "accelerated": "Accelerate"}
PAGE = Path(__file__).parents[1] / "docs/verify.md"
BEGIN, END = "<!-- faults in foreign scripts -->\n", "<!-- written by tests/foreign_table.py -->\n"


def unseen(script: str, row: Row) -> str:
    return (
        NOT_FOUND.get((script, row.fault, row.start), "")  # type: ignore[call-overload]
        or NOT_FOUND.get((script, row.fault or row.kind), "")
    )


def table(script: str, found: dict[Row, Verdict]) -> str:
    """The rows of the page for one script."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row, verdict in found.items():
        fault = (
            WORDS.get(row.fault, row.fault)
            if row.fault
            else {"norm": "batch norm of each rank's own"}.get(row.kind, row.kind)
        )
        fault += ", with batch norm" if row.fault and row.kind == "norm" else ""
        fault += ", accumulating" if row == Row("accumulation", "no_sync left on", row.start) else ""
        reason = unseen(script, row) or verdict.reason
        first = "" if unseen(script, row) else str(verdict.findings[0].step)
        lines.setdefault((fault, reason), []).append(
            f"{row.start}" + (f" ({first})" if first != str(row.start) and first else "")
        )
    return "".join(
        f"| {fault} | {NAMES[script]} | {', '.join(starts)} | {reason} |\n" for (fault, reason), starts in lines.items()
    )


def launchers(python: str) -> tuple[list[str], list[str]]:
    """Of Accelerate."""
    launch = [python, "-m", "accelerate.commands.launch"]
    return [*launch, "--multi_gpu", "--num_processes", "2"], [*launch, "--num_processes", "1"]


def written(script: str) -> str:
    """What the page says of a script."""
    inside = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    return "".join(line for line in inside.splitlines(keepends=True) if f"| {NAMES[script]} |" in line)


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rows = ""
        for script, mutants in MUTANTS.items():
            launch = launchers(sys.argv[1]) if script == "accelerated" else None
            rows += table(script, verdicts(script, mutants, Path(folder, script), launch))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    head = "| planted fault | script | begins in step (seen in) | reason given |\n|---|---|---|---|\n"
    PAGE.write_text(f"{before}{BEGIN}{head}{rows}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
