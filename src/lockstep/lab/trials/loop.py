"""A training loop of the student's own, a plain script for torchrun: `lockstep verify -- torchrun …`. Its speed does not count."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.errors import RunFailed
from lockstep.lab.own_code import Request
from lockstep.lab.trials import Failed, source
from lockstep.verify.foreign.prove import plan, prove

# Enough steps to show an error that occurs only every 25th step.
STEPS = 30
DDP = "DistributedDataParallel"


def judge(request: Request, folder: Path) -> tuple[str, str]:
    """What is wrong, or what was found right."""
    tree = source.parsed(request.file)
    if tree is not None and DDP in source.names(tree):
        return f"{Path(request.file).name} uses {DDP}, and the task is to do without it", ""
    try:
        verdict = prove(plan(command(request.file)), folder / "proof", STEPS)
    except RunFailed as error:
        raise Failed(f"it fails: {str(error).removeprefix('verify: ')}") from None
    return ("", verdict.sentence) if verdict.verdict == "same" else (verdict.sentence, "")


def command(file: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", file]
