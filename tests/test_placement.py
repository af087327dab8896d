"""Batch algebra: shares cover every sample once, whatever the ranks; what does not divide is refused with the numbers."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.plan import micro_shares, plan, share_of
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.settings import load


@given(ranks=st.integers(1, 9), micro=st.integers(1, 7), accumulation=st.integers(1, 4), short=st.integers(0, 300))
def test_shares_cover_a_batch_once_and_in_order(ranks: int, micro: int, accumulation: int, short: int) -> None:
    batch = ranks * micro * accumulation
    worked = plan(Recipe(global_batch=batch), Placement(ranks=ranks, micro_batch=micro), 10 * batch, 10)
    count = max(1, batch - short % batch)
    seen: list[int] = []
    for rank in range(ranks):
        shares = list(micro_shares(count, rank, worked))
        assert len(shares) >= 1, "every rank takes part in the exchange"
        assert len(shares) <= accumulation
        assert all(high - low <= micro for low, high in shares)
        seen += [sample for low, high in shares for sample in range(low, high)]
    assert seen == list(range(count))


@given(total=st.integers(0, 5000), parts=st.integers(1, 64))
def test_parts_differ_by_at_most_one(total: int, parts: int) -> None:
    sizes = [high - low for low, high in (share_of(total, part, parts) for part in range(parts))]
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1


def test_the_plan_of_a_set_that_does_not_divide() -> None:
    worked = plan(Recipe(global_batch=256, epochs=3), Placement(ranks=2, accumulation=4), 60_000, 10_000)
    assert (worked.micro_batch, worked.accumulation) == (32, 4)
    assert (worked.steps_per_epoch, worked.last_batch, worked.total_steps) == (235, 96, 705)
    assert worked.line() == (
        "global batch 256 = 2 ranks x 32 micro batch x 4 accumulation; 235 steps an epoch (last batch 96), 705 in all"
    )
    long = plan(Recipe(global_batch=32, epochs=3), Placement(), 60_000, 10_000)
    assert long.line().endswith("; 1,875 steps an epoch, 5,625 in all"), "as `show` writes numbers"


def test_the_command_of_the_compose_file_divides() -> None:
    """No test starts these containers, so their own command is at least planned."""
    text = (Path(__file__).parents[1] / "examples/slurm-compose/compose.yaml").read_text()
    (words,) = re.findall(r"login lockstep run (.+)", text)
    assert plan(*load([], words.split()), 60_000, 10_000).ranks == 2


def test_max_steps_and_limits() -> None:
    recipe = Recipe(global_batch=32, epochs=5, max_steps=7, train_limit=100, test_limit=10)
    worked = plan(recipe, Placement(), 60_000, 10_000)
    assert (worked.train_samples, worked.test_samples, worked.steps_per_epoch, worked.last_batch) == (100, 10, 4, 4)
    assert worked.total_steps == 7


def test_a_batch_larger_than_the_set_is_one_short_step() -> None:
    worked = plan(Recipe(global_batch=512), Placement(), 100, 10)
    assert (worked.steps_per_epoch, worked.last_batch) == (1, 100)


@pytest.mark.parametrize(
    ("recipe", "placement", "words"),
    [
        (
            Recipe(global_batch=100),
            Placement(ranks=3),
            "global_batch=100 does not divide by ranks=3: choose global_batch=99 or 102",
        ),
        (Recipe(global_batch=2), Placement(ranks=3), "choose global_batch=3"),
        (
            Recipe(global_batch=64),
            Placement(ranks=2, micro_batch=5),
            "micro_batch=5 does not divide the share of one rank, 32",
        ),
        (Recipe(global_batch=64), Placement(ranks=2, accumulation=3), "accumulation=3 does not divide"),
        (Recipe(global_batch=64), Placement(ranks=2, accumulation=2, micro_batch=8), "state one of the two"),
    ],
)
def test_what_does_not_divide_is_refused(recipe: Recipe, placement: Placement, words: str) -> None:
    with pytest.raises(InputError) as error:
        plan(recipe, placement, 1000, 100)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement(launcher="single", ranks=2), "launcher=single has one rank"),
        (Placement(launcher="mpi"), "launcher=mpi: no such launcher; did you mean 'mpirun'?"),
        (Placement(ranks=3, hosts=2, rendezvous="a:1"), "ranks=3 do not divide over hosts=2"),
        (Placement(ranks=2, hosts=2), "add rendezvous="),
        (Placement(ranks=2, hosts=2, launcher="spawn"), "stays on one host"),
        (Placement(ranks=2, rendezvous="a:1"), "rendezvous has no effect with launcher=spawn"),
        (Placement(ranks=2, launcher="torchrun", rendezvous="nowhere"), "is not HOST:PORT"),
        (Placement(ranks=2, strategy="single"), "strategy=single does not exchange"),
        (Placement(ranks=2, strategy="dpp"), "no such strategy"),
        (Placement(backend="nccl", device="cpu"), "backend=nccl works on CUDA only"),
    ],
)
def test_what_cannot_work_is_refused(placement: Placement, words: str) -> None:
    with pytest.raises(InputError) as error:
        resolve(Recipe(), placement)
    assert words in str(error.value)


def test_auto_comes_to_something() -> None:
    alone = resolve(Recipe(), Placement()).placement
    assert (alone.launcher, alone.strategy) == ("single", "single")
    two = resolve(Recipe(), Placement(ranks=2)).placement
    assert (two.launcher, two.strategy) == ("spawn", "flat")
    assert two.threads
    assert alone.threads
    assert two.threads <= alone.threads
    hosts = resolve(Recipe(), Placement(ranks=2, hosts=2, rendezvous="10.0.0.1:29500")).placement
    assert hosts.launcher == "torchrun"


def test_batch_per_rank_becomes_the_global_batch_and_stays_visible() -> None:
    recipe = resolve(Recipe(batch_per_rank=32), Placement(ranks=4)).recipe
    assert (recipe.global_batch, recipe.batch_per_rank) == (128, 32)


@pytest.mark.parametrize("words", [{"backend": "shm"}, {"backend": "mpi", "launcher": "mpirun"}])
def test_powersgd_is_refused_where_it_would_hang(words: dict[str, str]) -> None:
    placement = msgspec.convert({"ranks": 2, "ddp": {"hook": "powersgd"}, **words}, type=Placement)
    with pytest.raises(InputError, match="choose backend=gloo"):
        resolve(Recipe(), placement)
