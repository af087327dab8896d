"""How long ranks wait for the slowest: planted noise, planted correlation and planted tails against what really comes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.predict.lateness import FEWEST, Lateness
from lockstep.predict.waiting import Noise, late, noise_of, slowest

Values = np.ndarray[Any, Any]
STEPS = 20_000


def alone(values: Values) -> Noise:
    """Of one rank."""
    return noise_of(values[None, :], values.size)


def planted(kind: str, correlation: float, steps: int, hosts: int, per_host: int, seed: int) -> Values:
    """Deviations by step, host and rank: a part that a host's ranks have in common, and one of their own."""
    chance = np.random.default_rng(seed)

    def draw(*shape: int) -> Values:
        return chance.standard_normal(shape) if kind == "normal" else chance.exponential(1.0, shape) - 1

    return 0.1 * (correlation**0.5 * draw(steps, hosts, 1) + (1 - correlation) ** 0.5 * draw(steps, hosts, per_host))


def test_the_slowest_of_many_is_what_a_bootstrap_says() -> None:
    chance = np.random.default_rng(1)
    few = chance.exponential(0.2, size=FEWEST - 1)
    few -= few.mean()
    for ranks in (2, 16, 300):
        drawn = few[chance.integers(few.size, size=(20_000, ranks))].max(axis=1).mean()
        assert slowest(alone(few), ranks) == pytest.approx(drawn, rel=0.02)
    assert slowest(alone(few), 1) == slowest((), 8) == 0
    # Over rounds of 16 steps a rank's noise averages out, about by the root.
    assert slowest(alone(few), 4, 16) == pytest.approx(slowest(alone(few), 4) / 4, rel=0.25)
    assert slowest(((-0.1, 0.1),), 2) == pytest.approx(0.05), "the larger of two coins: +0.1 in 3 of 4"


@pytest.mark.parametrize("kind", ["normal", "exponential"])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_ranks_that_are_late_together(kind: str, correlation: float) -> None:
    """Two ranks of a host are measured; more hosts like it come out to a few per cent, more ranks on a host nearly so."""
    found = planted(kind, correlation, STEPS, 1, 2, seed=3)[:, 0].T
    noise = noise_of(found, found.size)
    independent = {0.0: 2.0, 0.5: 1.6, 1.0: 1.0}[correlation]
    assert late(noise).independent == pytest.approx(independent, abs=0.06)
    for hosts, per_host, off in ((1, 2, 0.03), (8, 2, 0.03), (64, 2, 0.04), (16, 1, 0.03), (1, 4, 0.06), (1, 8, 0.09)):
        real = planted(kind, correlation, STEPS // hosts + 2000, hosts, per_host, seed=4).max(axis=(1, 2)).mean()
        got = slowest(noise, hosts * per_host, 1, per_host)
        assert got == pytest.approx(real, rel=off, abs=2e-3), (hosts, per_host)


def test_whole_steps_are_drawn_so_that_ranks_stay_late_together() -> None:
    chance = np.random.default_rng(5)
    for correlation in (0.0, 0.5, 1.0):
        found = planted("exponential", correlation, STEPS, 1, 2, seed=6)[:, 0].T
        measured = late(noise_of(found, found.size))
        drawn = np.array([measured.drawn(50, 2, chance) for _ in range(400)])
        assert drawn.shape == (400, 100)
        pairs = drawn.reshape(-1, 2)
        assert np.corrcoef(pairs.T)[0, 1] == pytest.approx(correlation, abs=0.05)
        assert pairs.mean() == pytest.approx(0.0, abs=5e-3)
        assert drawn.max(axis=1).mean() == pytest.approx(measured.slowest(50, 2), rel=0.04), "two ways to the same"
    assert measured.drawn(3, 5, chance).shape == (15,), "more ranks than were measured"


def test_late_in_turns_is_not_late_together() -> None:
    values = np.random.default_rng(7).normal(size=400)
    opposite = late(noise_of(np.stack([values, -values]), 800))
    assert opposite.independent == 2.0
    assert opposite.slowest(1, 2) == pytest.approx(np.abs(values).mean(), rel=0.02), "as measured"


@pytest.mark.parametrize(
    ("draw", "off"),
    [
        (lambda chance, shape: chance.exponential(1.0, shape), 0.12),
        (lambda chance, shape: chance.standard_normal(shape), 0.12),
        (lambda chance, shape: chance.random(shape), 0.05),
        (lambda chance, shape: chance.pareto(5.0, shape), 0.25),
    ],
)
def test_the_latest_of_many_ranks_is_later_than_all_that_was_measured(draw: Any, off: float) -> None:
    """2,000 values, 20,000 ranks. Over ten samples: one has fifty values to tell the tail from."""
    chance = np.random.default_rng(8)
    real = np.mean([draw(chance, 20_000).max() for _ in range(300)])
    samples = [Lateness(draw(chance, 2000)) for _ in range(10)]
    got = np.mean([one.largest(20_000) for one in samples])
    assert got == pytest.approx(real, rel=off)
    bound = np.mean([one.largest(1e-9 + 1) for one in samples])
    assert bound == pytest.approx(np.mean([one.mean for one in samples]), abs=0.05), "the largest of one is the mean"


def test_no_tail_from_few_values_or_from_equal_ones() -> None:
    assert Lateness(np.arange(FEWEST - 1.0)).tail is None
    assert Lateness(np.zeros(FEWEST)).tail is None
    assert Lateness(np.zeros(FEWEST)).largest(1e6) == 0
    assert Lateness(np.arange(FEWEST - 1.0)).largest(1e9) == FEWEST - 2, "no later than the latest"


def test_what_is_kept_of_many_steps_stays_by_rank_and_step() -> None:
    kept = noise_of(np.arange(20.0).reshape(2, 10), 10)
    assert kept == ((0.0, 2.0, 4.0, 6.0, 8.0), (10.0, 12.0, 14.0, 16.0, 18.0))
