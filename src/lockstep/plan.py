"""The batch algebra: how ranks divide each global batch, and into how many passes each divides its share.

global_batch = sum over ranks of share, share = sum over passes of at most micro_batch
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec

from lockstep.errors import InputError
from lockstep.placement import Placement, Ranks
from lockstep.recipe import NonNegativeFloat, Positive, Recipe
from lockstep.shapes import Count
from lockstep.units import counted

# A line has no room for the shares of a thousand ranks.
MOST_SHOWN = 8


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The batch algebra of one recipe on one placement, worked out."""

    ranks: Ranks
    global_batch: Count
    micro_batch: Count
    """Samples in one pass of one rank, at most."""
    accumulation: Count
    """Passes in a step, at most."""
    train_samples: Count
    test_samples: Count
    steps_per_epoch: Count
    last_batch: Count
    """Samples in the last global batch of an epoch; smaller than the others where the set does not divide."""
    total_steps: Count
    lr: NonNegativeFloat = 0.0
    """The learning rate after `lr_rule`."""
    lr_note: str = ""
    shares: list[Positive] = []
    """What each rank takes of a batch, in proportion; [] where all take the same."""

    def part(self, count: int, rank: int) -> tuple[int, int]:
        """The half-open range of `count` samples that belongs to `rank`."""
        if not self.shares:
            return share_of(count, rank, self.ranks)
        before, whole = sum(self.shares[:rank]), sum(self.shares)
        return count * before // whole, count * (before + self.shares[rank]) // whole

    def parts(self, count: int) -> list[int]:
        """How many of `count` samples each rank takes."""
        if not self.shares:
            return [high - low for low, high in (share_of(count, rank, self.ranks) for rank in range(self.ranks))]
        bounds = [count * before // sum(self.shares) for before in itertools.accumulate(self.shares, initial=0)]
        return [high - low for low, high in itertools.pairwise(bounds)]

    def line(self) -> str:
        """The one line that every run starts with."""
        if not self.steps_per_epoch:  # an attached command: only what was seen and told is known
            return f"global batch {self.batch_text()}; {counted(self.total_steps, 'step')} in all"
        last = f" (last batch {self.last_batch})" if self.last_batch != self.global_batch else ""
        return f"global batch {self.batch_text()}; {self.steps_per_epoch:,} steps an epoch{last}, {self.total_steps:,} in all"

    def batch_text(self) -> str:
        """The global batch and how it is divided."""
        if not self.global_batch:
            return "not known; --batch N tells"
        return f"{self.global_batch} = {self.division()}"

    def division(self) -> str:
        """How a global batch is divided, in words."""
        if not self.micro_batch:
            return f"over {counted(self.ranks, 'rank')}, as --batch says"
        if not self.shares:
            return f"{counted(self.ranks, 'rank')} x {self.micro_batch} micro batch x {self.accumulation} accumulation"
        each = [str(samples) for samples in self.parts(self.global_batch)]
        shown = " + ".join(each if len(each) <= MOST_SHOWN else [*each[: MOST_SHOWN - 2], "…", each[-1]])
        passes = f", in passes of at most {self.micro_batch}" if self.accumulation > 1 else ""
        return f"{shown} over {counted(self.ranks, 'rank')}{passes}"


def plan(recipe: Recipe, placement: Placement, train_samples: int, test_samples: int) -> Plan:
    """Work out the batch algebra; a batch that does not divide is an error that quotes the numbers."""
    ranks, batch, shares = placement.ranks, recipe.global_batch, placement.shares
    if shares is None:
        micro, accumulation = _micro(_equal_share(batch, ranks), placement, ranks)
    else:
        _check_shares(shares, batch, ranks)
        micro, accumulation = batch, 1  # until `divided` knows the largest share
    train = min(train_samples, recipe.train_limit or train_samples)
    test = min(test_samples, recipe.test_limit or test_samples)
    steps = -(-train // recipe.global_batch)
    total = steps * recipe.epochs
    ratio, note = _lr_ratio(recipe)
    found = Plan(
        ranks=ranks,
        global_batch=recipe.global_batch,
        micro_batch=micro,
        accumulation=accumulation,
        train_samples=train,
        test_samples=test,
        steps_per_epoch=steps,
        last_batch=train - (steps - 1) * recipe.global_batch,
        total_steps=min(total, recipe.max_steps or total),
        lr=recipe.optimizer.lr * ratio,
        lr_note=note,
    )
    return found if shares is None else divided(found, placement, [1] * ranks if shares == "auto" else shares)


def divided(plan: Plan, placement: Placement, shares: list[int]) -> Plan:
    """The same plan, with each global batch divided in proportion to `shares`."""
    plan = msgspec.structs.replace(plan, shares=shares)
    parts = plan.parts(plan.global_batch)
    if 0 in parts:
        raise InputError(
            f"shares={shares}: rank {parts.index(0)} would have no sample of global_batch={plan.global_batch}: "
            "give it a larger share, or choose a larger batch"
        )
    most = max(parts)
    micro, passes = placement.micro_batch, placement.accumulation
    if micro is None:
        micro = -(-most // (passes or 1))
    elif passes is not None:
        raise InputError("shares: ranks take unequal numbers of passes: state micro_batch or accumulation, not both")
    return msgspec.structs.replace(plan, micro_batch=min(micro, most), accumulation=-(-most // micro))


def _equal_share(batch: int, ranks: int) -> int:
    if batch % ranks:
        below, above = batch - batch % ranks, batch - batch % ranks + ranks
        options = f"{above}" if below == 0 else f"{below} or {above}"
        raise InputError(f"global_batch={batch} does not divide by ranks={ranks}: choose global_batch={options}")
    return batch // ranks


def _check_shares(shares: str | list[int], batch: int, ranks: int) -> None:
    if batch < ranks:
        raise InputError(
            f"global_batch={batch} leaves some of ranks={ranks} without a sample: choose global_batch={ranks} or more"
        )
    if not isinstance(shares, str) and len(shares) != ranks:
        raise InputError(f"shares has {counted(len(shares), 'number')}, one for each rank, but ranks={ranks}")


def _lr_ratio(recipe: Recipe) -> tuple[float, str]:
    """What the learning-rate rule makes of another global batch, and the words for it."""
    rule, batch, meant = recipe.lr_rule, recipe.global_batch, recipe.lr_batch or recipe.batch_per_rank
    if rule == "keep":
        return 1.0, ""
    if meant is None:
        raise InputError(
            f"lr_rule={rule} needs lr_batch: the global batch that optimizer.lr={recipe.optimizer.lr:g} was meant for"
        )
    ratio = batch / meant if rule == "linear" else (batch / meant) ** 0.5
    lr = recipe.optimizer.lr
    return (
        ratio,
        f"learning rate {lr:g} x {ratio:.4g} = {lr * ratio:.4g} ({rule} rule: global batch {batch}, meant for {meant})",
    )


def _micro(share: int, placement: Placement, ranks: int) -> tuple[int, int]:
    micro, accumulation = placement.micro_batch, placement.accumulation
    where = f"the share of one rank, {share} (global_batch / ranks={ranks})"
    if micro is None and accumulation is None:
        return share, 1
    if micro is None:
        assert accumulation is not None
        if share % accumulation:
            raise InputError(f"accumulation={accumulation} does not divide {where}: choose {_divisors(share)}")
        return share // accumulation, accumulation
    if share % micro:
        raise InputError(f"micro_batch={micro} does not divide {where}: choose {_divisors(share)}")
    if accumulation is not None and micro * accumulation != share:
        raise InputError(
            f"micro_batch={micro} x accumulation={accumulation} is not {where}: state one of the two and leave the other out"
        )
    return micro, share // micro


def _divisors(number: int) -> str:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    found = [str(d) for d in sorted({*small, *(number // d for d in small)})]
    return "one of " + ", ".join(found if len(found) <= 12 else [*found[:6], "…", *found[-5:]])


def share_of(total: int, part: int, parts: int) -> tuple[int, int]:
    """The half-open range of `total` items that belongs to `part`; the parts differ by at most one item."""
    return total * part // parts, total * (part + 1) // parts


def micro_shares(count: int, rank: int, plan: Plan) -> Iterator[tuple[int, int]]:
    """The micro batches of `rank` within a global batch of `count` samples, as ranges within that batch.

    A full batch, divided equally, gives `accumulation` ranges of `micro_batch` samples. A partial one, or a smaller share, gives fewer or shorter ones, down
    to a single empty range: a rank without samples must still take part in the exchange.
    """
    start, stop = plan.part(count, rank)
    if start == stop:
        yield start, start
    for low in range(start, stop, plan.micro_batch):
        yield low, min(low + plan.micro_batch, stop)
