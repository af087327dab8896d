"""A strategy of the student's own: `lockstep verify` on two ranks, then a race against the reference strategy."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lockstep.errors import RunFailed
from lockstep.lab.own_code import Request
from lockstep.lab.trials import Failed, source
from lockstep.lab.trials.racing import REFERENCE, YOURS
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.turns import Contender, Ranks
from lockstep.verify.prove import verify
from lockstep.words import read_words

# A step of little data that both ranks share; partial batches, momentum and decay show what a plain case hides.
WORDS = (
    "data=embedded",
    "test_limit=400",
    "global_batch=24",
    "ranks=2",
    "threads=1",
    "backend=gloo",
    "fused=false",
    "optimizer.lr=0.005",
    "optimizer.weight_decay=0.0005",
    # A rank that waits for a message which never comes fails after this time.
    "timeout_s=60",
)
DDP = "DistributedDataParallel"
# Of Lockstep's strategies a student builds on the base class alone: the others have the exchange in them.
STRATEGIES, BASE = "lockstep.strategies.", ("Strategy", "base")


def settings(file: str, name: str) -> tuple[Recipe, Placement]:
    recipe, placement = read_words(WORDS)
    return recipe, msgspec.structs.replace(placement, strategy=f"{file}:{name}")


def judge(request: Request, folder: Path) -> tuple[str, str]:
    """What is wrong, or what was found right."""
    if others := _of_others(request.file, request.object):
        return others, ""
    recipe, placement = settings(request.file, request.object)
    try:
        verdict = verify(recipe, placement, folder / "proof", repeat=False)
    except RunFailed as error:
        raise Failed(f"it fails: {str(error).removeprefix('verify: ')}") from None
    failed = [check for check in verdict.checks if not check.passed]
    if failed:
        first = failed[0]
        where = f", {first.where}" if first.where else ""
        return (
            f"2 ranks do not compute what one process computes: '{first.what}' ({first.against}{where}) differs by "
            f"{first.difference:.2g}, and rounding allows {first.allowed:.2g}; {len(failed)} of {len(verdict.checks)} checks failed"
        ), ""
    return "", f"2 ranks compute what one process computes: {len(verdict.checks)} checks over {verdict.steps} steps"


def _of_others(file: str, name: str) -> str:
    """Where the text shows that the strategy is not the student's own; "" where it does not."""
    tree = source.parsed(file)
    if tree is None:
        return ""
    file = Path(file).name
    if name not in source.classes(tree):
        return f"{file} defines no class {name}"
    ours = (one for one in source.imports(tree) if one.startswith(STRATEGIES))
    taken = sorted(one for one in ours if not one.removeprefix(STRATEGIES).startswith(BASE))
    taken += [DDP] if DDP in source.names(tree) else []
    return f"{file} uses {taken[0]}, and the task is to write the exchange yourself" if taken else ""


def contenders(request: Request, folder: Path) -> list[Contender]:
    return [
        Ranks(name, *settings(file, request.object), folder / f"race-{name}")
        for name, file in ((REFERENCE, request.reference), (YOURS, request.file))
    ]
