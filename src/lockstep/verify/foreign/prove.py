"""The proof for a foreign script: its ranks, then one process with the batches of all of them, then that process a few roundings away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lockstep.errors import RunFailed
from lockstep.turns import guard
from lockstep.verify.foreign import words
from lockstep.verify.foreign.data import Samples
from lockstep.verify.foreign.finding import ORDER_OF
from lockstep.verify.foreign.judge import Judge, Verdict
from lockstep.verify.foreign.observe import Watched, observe
from lockstep.verify.foreign.records import Order, Rank, is_coarse, rows_of_pass
from lockstep.verify.foreign.undo import left

# How far the twin's weights are moved, as a share of themselves: 32 roundings; in 16 bits, one.
PERTURBED, PERTURBED_COARSELY = 32 * 2.0**-24, 2.0**-8


@dataclass(frozen=True)
class Planned:
    """The command of the ranks, and that of the one process."""

    ranks: int
    together: list[str]
    alone: list[str]
    stretches: bool
    """The one process is given the batches of all ranks by its loader; else `{batch}` says how large they are."""


def plan(argv: Sequence[str], batch: int | None = None, ranks: int | None = None) -> Planned:
    """What would be run. Raises InputError."""
    of = words.ranks_of(argv, ranks)
    together, alone = (words.command(argv, count, of, batch) for count in (of, 1))
    guard.check("verify", argv[0])
    return Planned(of, together, alone, stretches=batch is None)


def prove(
    planned: Planned, folder: Path, steps: int, no_dropout: bool = False, tell: Callable[[str], None] = lambda _: None
) -> Verdict:
    """Run the command three times below `folder`, for a few steps each, and judge."""
    of, alone = planned.ranks, planned.alone
    for line in left(folder.parent):
        tell(line)
    tell(f"1/3  {of} ranks: {' '.join(planned.together)}")
    many = observe(f"{of} ranks", planned.together, folder / "ranks", Watched(steps, no_dropout))
    if len(many) != of:
        raise RunFailed(f"verify: {of} ranks were expected, and {len(many)} took a step: one process may train for all")
    if any(rank[-1].line.unknown for rank in many):
        return Judge(many, None, None).verdict()
    stretch = stretched(many) if planned.stretches else None
    said = f", its loader's batches of {stretch[0]} made {stretch[1]}" if stretch else ""
    tell(f"2/3  1 process: {' '.join(alone)}{said}")
    watched = Watched(steps, no_dropout, stretch=stretch)
    try:
        one = observe("1 process", alone, folder / "one", watched)[0]
    except RunFailed as error:
        return Judge(many, None, None, str(error).removeprefix("verify: ")).verdict()
    lines = (
        [f"the one process got batches of {stretch[1]} from its loader, which is made for {stretch[0]}"]
        if stretch
        else []
    )
    other = Samples(many, one).finding(0)
    replay = replayed(many, one) if other is not None and other.key == ORDER_OF else None
    if replay is not None:
        tell("2/3  1 process, again: it shuffles otherwise, and is given the samples of the ranks")
        lines.append(
            "the one process shuffles otherwise: it was given the samples that the ranks had, in the same steps"
        )
        watched = msgspec.structs.replace(watched, replay=replay)
        one = observe("1 process", alone, folder / "replayed", watched)[0]
    tell("3/3  1 process, with weights that are a few roundings away")
    watched = msgspec.structs.replace(watched, perturb=perturbation(many))
    twin = observe("1 process, again", alone, folder / "twin", watched)[0]
    verdict = Judge(many, one, twin).verdict()
    verdict.lines = lines
    return verdict


def stretched(many: list[Rank]) -> tuple[int, int] | None:
    """What a loader's batch has to become for one process; None where the loaders are not made for what a rank gets."""
    each, together = rows_of_pass(many)
    made = {size for rank in many if rank for size in rank[-1].line.batch_sizes}
    return (each, together) if each in made and each != together else None


def replayed(many: list[Rank], one: Rank) -> Order | None:
    """What the one process's sampler has to hand out for the samples of all ranks; None where that is not known."""
    each, _ = rows_of_pass(many)
    samplers = [_sampler(rank, each) for rank in many]
    theirs = _sampler(one, rows_of_pass([one])[0])
    if theirs is None or any(sampler is None for sampler in samplers):
        return None
    passes = [
        [[index for batch in batches for index in batch] for batches in zip(*together, strict=False)]
        for together in zip(*(sampler.batches for sampler in samplers if sampler is not None), strict=False)
    ]
    return Order(theirs.size, theirs.length, passes)


def _sampler(rank: Rank, size: int) -> Order | None:
    """The sampler that a rank trains from: of those for its batches, the one that has handed out most."""
    found = [order for order in rank[-1].line.orders if order.size == size]
    return max(found, key=lambda order: sum(map(len, order.batches)), default=None)


def perturbation(many: list[Rank]) -> float:
    """By how much the twin's weights are moved: as much as the coarsest number format of the script can tell."""
    return PERTURBED_COARSELY if is_coarse(many) else PERTURBED
