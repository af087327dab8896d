"""Ranks that divide a batch unequally: by stated shares, or by what each was measured to need. The mathematics stays the same."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.measure.records import read_steps
from lockstep.placement import Placement
from lockstep.plan import divided, micro_shares, plan
from lockstep.recipe import Recipe
from lockstep.run import Run
from lockstep.training.balance import balanced
from lockstep.verify.records import step_losses
from support import SHORT, Cli, wait_for


@given(
    shares=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    batch=st.integers(50, 400),
    short=st.integers(0, 400),
    passes=st.integers(1, 5),
)
def test_unequal_shares_cover_a_batch_once_and_in_order(shares: list[int], batch: int, short: int, passes: int) -> None:
    batch = max(batch, sum(shares))  # so nobody is left without
    placement = Placement(ranks=len(shares), shares=shares, accumulation=passes)
    worked = plan(Recipe(global_batch=batch), placement, 10 * batch, 10)
    count = max(1, batch - short % batch)
    seen: list[int] = []
    for rank in range(len(shares)):
        ranges = list(micro_shares(count, rank, worked))
        assert 1 <= len(ranges) <= worked.accumulation <= passes
        assert all(high - low <= worked.micro_batch for low, high in ranges)
        seen += [sample for low, high in ranges for sample in range(low, high)]
    assert seen == list(range(count))
    assert sum(worked.parts(count)) == count


def test_the_plan_says_how_a_batch_is_divided() -> None:
    worked = plan(Recipe(global_batch=64), Placement(ranks=2, shares=[3, 1]), 640, 10)
    assert worked.parts(64) == [48, 16]
    assert worked.line().startswith("global batch 64 = 48 + 16 over 2 ranks; 10 steps an epoch")
    passes = plan(Recipe(global_batch=64), Placement(ranks=2, shares=[3, 1], micro_batch=20), 640, 10)
    assert passes.division() == "48 + 16 over 2 ranks, in passes of at most 20"
    assert [len(list(micro_shares(64, rank, passes))) for rank in (0, 1)] == [3, 1]


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement(ranks=2, shares=[3, 1, 1]), "shares has 3 numbers, one for each rank, but ranks=2"),
        (Placement(ranks=2, shares=[1, 100]), "rank 0 would have no sample of global_batch=32"),
        (Placement(ranks=64, shares="auto"), "leaves some of ranks=64 without a sample"),
        (Placement(ranks=2, shares=[3, 1], micro_batch=8, accumulation=3), "not both"),
    ],
)
def test_shares_that_cannot_be(placement: Placement, words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan(Recipe(global_batch=32), placement, 100, 10)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("shares=[0,1]",), "shares"),
        (("shares=half",), "shares=half: expected auto, or a list such as [3,1]"),
        (("shares=auto", "compile=true"), "shares=auto does not go with compile=true"),
        (("shares=auto", "strategy=fsdp"), "shares=auto does not go with strategy=fsdp"),
        (("shares=[3,1]", "strategy=local-sgd"), "shares does not go with strategy=local-sgd"),
        (("shares=auto", "regularize.batch_norm=synchronised"), "shares=auto does not go with regularize.batch_norm"),
    ],
)
def test_bad_words_are_one_line(cli: Cli, words: tuple[str, ...], said: str) -> None:
    found = cli("run", *SHORT, "ranks=2", *words)
    assert found.returncode == 2
    assert said in found.stderr
    assert "Traceback" not in found.stderr


# ---------------------------------------------------------------- the division


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(1e-4, 1.0)), min_size=1, max_size=8))
def test_a_new_division_is_of_the_same_batch_and_sooner_done(ranks: list[tuple[int, float]]) -> None:
    samples, seconds = [each[0] for each in ranks], [each[1] for each in ranks]
    shares = balanced(samples, seconds)
    if shares is None:
        return
    assert sum(shares) == sum(samples)
    assert min(shares) >= 1
    each = [seconds[rank] * shares[rank] / samples[rank] for rank in range(len(shares))]
    assert max(each) < max(seconds)


def test_a_rank_of_half_the_speed_gets_half_as_much() -> None:
    assert balanced([48, 48], [0.1, 0.2]) == [64, 32]
    assert balanced([48, 48], [0.1, 0.101]) is None, "not for every breath of the machine"
    assert balanced([1, 1], [0.1, 10.0]) is None, "nobody can have less than one sample"


def test_with_a_fixed_cost_it_comes_to_rest_where_all_need_the_same() -> None:
    samples = [64, 64]
    for _ in range(20):
        seconds = [0.02 + 0.001 * samples[0], 0.04 + 0.002 * samples[1]]
        samples = balanced(samples, seconds) or samples
    assert max(seconds) / min(seconds) < 1.05


def test_the_plan_changes_with_the_shares() -> None:
    placement = Placement(ranks=2, shares="auto")
    worked = plan(Recipe(global_batch=64), placement, 640, 10)
    assert (worked.parts(64), worked.micro_batch) == ([32, 32], 32)
    later = divided(worked, placement, [50, 14])
    assert (later.parts(64), later.micro_batch, later.accumulation) == ([50, 14], 50, 1)


# ---------------------------------------------------------------- real ranks


def test_unequal_shares_compute_the_same(cli: Cli) -> None:
    """Three ranks, unequal, with passes of their own number, against one process: the loss of every step."""
    base = (*SHORT, "global_batch=48", "max_steps=12", "regularize.dropout=0.2")
    alone = cli.run(*base)
    divided_ = cli.run(*base, "ranks=3", "strategy=ddp", "shares=[7,2,3]", "micro_batch=10")
    losses = [step_losses(Run(cli.runs / run["id"])) for run in (alone, divided_)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
    rows = [read_steps(Run(cli.runs / divided_["id"]).rank_folder(rank) / "steps.bin") for rank in range(3)]
    assert [int(row["samples"][0]) for row in rows] == [28, 8, 12]
    shown = cli("show", divided_["id"])
    assert "28 + 8 + 12 over 3 ranks" in shown.stdout


def test_verify_proves_unequal_shares(cli: Cli) -> None:
    found = cli("verify", "ranks=2", "shares=[3,1]", "data=embedded", "strategy=ddp", "backend=gloo", "--json")
    assert found.returncode == 0, found.stdout + found.stderr
    checks = json.loads(found.stdout)
    assert checks
    assert all(each["passed"] for each in checks)
    auto = cli("verify", "ranks=2", "shares=auto", "data=embedded")
    assert auto.returncode == 0, auto.stdout + auto.stderr
    assert "shares=auto was tried as shares=[" in auto.stdout


@pytest.mark.cold
@pytest.mark.alone
def test_a_throttled_rank_is_given_less_and_more_again(cli: Cli) -> None:
    words = (
        "ranks=2",
        "shares=auto",
        "backend=gloo",
        "global_batch=256",
        "train_limit=6000",
        "epochs=9999",
        "--time-limit",
        "25",
    )
    process = cli.start("run", *SHORT, *words, "--name", "unequal")
    run = Run(cli.runs / "unequal")
    ranks = wait_for(lambda: (found := run.rank_statuses()) and len(found) == 2 and found, what="both ranks")
    begin = time.monotonic()
    pid, over = int(ranks[1]["pid"]), threading.Event()

    def throttle() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.005)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.005)

    helper = threading.Thread(target=throttle, daemon=True)
    helper.start()
    time.sleep(max(0.0, begin + 13 - time.monotonic()))
    over.set()
    helper.join()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    rows = read_steps(run.rank_folder(1) / "steps.bin")
    whole = rows["samples"]  # every batch is whole
    assert whole.min() >= 1
    assert whole.min() < 105, "the slow rank's share of 256 while it was throttled"
    assert np.median(whole[-50:]) > 110, "and when it no longer was"
    assert sum(json.loads((run.folder / "summary.json").read_text())["shares"]) == 256
