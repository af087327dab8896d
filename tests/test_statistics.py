"""The statistics of studies, against independent references: scipy.stats, enumeration, and simulated machines whose truth is known."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest
import scipy.stats

from lockstep.metrics import Kind
from lockstep.statistics import Spread, compare, compare_family, median_interval, permutation, pooled, t_p, t_quantile
from lockstep.statistics.comparisons import _deviation_quartile
from lockstep.statistics.permutation import permutation_p, rank_differences
from lockstep.study.stability import Timed, judge

Noise = Callable[[random.Random], float]


def machine(body: float, disturbed: float) -> Noise:
    """Run-to-run noise in logs: a body, and some runs that something slows by 5 % in the mean, now and then far more."""

    def draw(r: random.Random) -> float:
        return r.gauss(0, body) + (r.expovariate(1 / 0.05) if r.random() < disturbed else 0)

    return draw


# A quiet machine: 1 % from run to run, and one run in twenty disturbed.
QUIET, NOISY = machine(0.01, 0.05), machine(0.04, 0.2)


def pairs(r: random.Random, noise: Noise, n: int, planted: float = 0.0) -> tuple[list[float], list[float]]:
    """Two cells that took turns on a machine that became 6 % slower meanwhile."""
    drift = [0.06 * block / n for block in range(n)]
    return (
        [math.exp(level + noise(r)) * (1 + planted) for level in drift],
        [math.exp(level + noise(r)) for level in drift],
    )


# ---------------------------------------------------------------- the parts


def test_students_t_is_that_of_scipy() -> None:
    """scipy.stats, which is too slow to import for a command, as the reference."""
    for degrees in (1, 2, 3, 4, 5, 8, 11, 200):
        for p in (0.5, 0.05, 0.0025, 1e-6):
            value = t_quantile(p, degrees)
            assert value == pytest.approx(scipy.stats.t.isf(p / 2, degrees), rel=1e-9), degrees
            assert t_p(value, degrees) == t_p(-value, degrees) == pytest.approx(p, rel=1e-9)


def test_accuracies_have_the_p_value_of_a_signed_rank_test() -> None:
    """With the scores 1, 3, 5, … in place of Wilcoxon's 1, 2, 3, …: the rank differences within the common ranking of both sides."""
    r = random.Random(30)
    for n in (7, 10, 12):
        a, b = ([r.gauss(middle, 0.01) for _ in range(n)] for middle in (0.905, 0.9))
        differences = np.subtract(a, b)
        scores = (2 * scipy.stats.rankdata(abs(differences)) - 1) * np.sign(differences)
        expected = scipy.stats.permutation_test(
            (scores,), np.sum, permutation_type="samples", n_resamples=2**n, vectorized=True
        )
        assert compare(a, b, "accuracy").p == pytest.approx(expected.pvalue, rel=1e-12), n
        near = scipy.stats.wilcoxon(a, b, method="exact").pvalue
        assert compare(a, b, "accuracy").p == pytest.approx(near, abs=0.05), n


def test_times_without_drift_have_the_p_value_of_a_permutation_test_on_ranks() -> None:
    r = random.Random(31)
    for n in (7, 9, 11):
        a, b = ([r.gauss(middle, 0.01) for _ in range(n)] for middle in (0.008, 0.0))
        ranks = scipy.stats.rankdata([*a, *b])
        expected = scipy.stats.permutation_test(
            (ranks[:n], ranks[n:]),
            lambda x, y, axis: (x - y).sum(axis=axis),
            permutation_type="samples",
            n_resamples=2**n,
        )
        assert permutation_p(rank_differences(a, b, 0.0)) == pytest.approx(expected.pvalue, rel=1e-12)


def test_the_interval_of_a_median_is_that_of_scipy() -> None:
    r = random.Random(32)
    for n in range(6, 40):
        values = [r.gauss(0, 1) for _ in range(n)]
        expected = scipy.stats.quantile_test(values, p=0.5).confidence_interval(0.95)
        found = median_interval(values)
        assert found is not None
        assert (found.low, found.high) == (expected.low, expected.high), n


def test_the_estimate_of_an_accuracy_is_between_the_smallest_and_the_largest_difference_and_moves_with_them() -> None:
    """The Hodges-Lehmann shift: adding a constant to one side adds it to the estimate, whatever outliers there are."""
    r = random.Random(33)
    a, b = ([r.gauss(0.9, 0.01) for _ in range(9)] for _ in range(2))
    a[0] += 0.5
    plain, moved = compare(a, b, "accuracy"), compare([value + 0.02 for value in a], b, "accuracy")
    assert plain.effect is not None
    assert moved.effect == pytest.approx(plain.effect + 0.02, abs=1e-6)
    assert abs(plain.effect - statistics.median(x - y for x, y in zip(a, b, strict=True))) < 0.02


def test_the_upper_quartile_of_a_deviation_is_one_that_three_quarters_of_samples_stay_below() -> None:
    rng = np.random.default_rng(34)
    for n in (3, 5, 12):
        deviations = rng.normal(size=(20_000, n)).std(axis=1, ddof=1)
        assert np.mean(deviations * _deviation_quartile(n) >= 1) == pytest.approx(0.75, abs=0.01), n


def test_the_p_value_is_what_all_swaps_give() -> None:
    r = random.Random(1)
    for _ in range(40):
        ranks = [r.randint(-9, 9) for _ in range(r.randint(1, 9))]
        sums = [
            sum(sign * p for sign, p in zip(signs, ranks, strict=True))
            for signs in itertools.product((1, -1), repeat=len(ranks))
        ]
        counted = sum(abs(each) >= abs(sum(ranks)) for each in sums) / len(sums)
        assert permutation_p(ranks) == pytest.approx(min(1.0, counted)), ranks


def test_above_the_exact_range_the_normal_distribution_agrees_with_the_exact_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    r = random.Random(2)
    ranks = [r.randint(-30, 40) for _ in range(20)]
    exact = permutation_p(ranks)
    monkeypatch.setattr(permutation, "EXACT_UP_TO", 19)
    assert permutation_p(ranks) == pytest.approx(exact, abs=0.02)


def enumerated(a: np.ndarray, b: np.ndarray, levels: np.ndarray, shift: float) -> float:
    """The test from scratch: rank all runs together, then exchange the pairs in every possible way."""
    values = np.concatenate([a - levels - shift, b - levels])
    ranks = np.array([(values < each).sum() + (values <= each).sum() for each in values])
    mine, theirs = ranks[: len(a)], ranks[len(a) :]
    swaps = np.array(list(itertools.product((False, True), repeat=len(a))))
    sums = np.where(swaps, theirs - mine, mine - theirs).sum(axis=1)
    return float(np.mean(np.abs(sums) >= abs((mine - theirs).sum())))


@pytest.mark.parametrize("kind", ["time", "accuracy"])
def test_the_interval_ends_where_the_enumerated_test_says_so(kind: Kind) -> None:
    r = random.Random(3)
    for n in (6, 9, 10):
        a, b = (np.array([r.gauss(middle, 0.01) for _ in range(n)]) for middle in (0.01, 0.0))
        middles = (a + b) / 2
        # Times: the level of five neighbouring blocks. Accuracies: that of the pair itself.
        near = (
            [middles[max(0, i - 2) : i + 3] for i in range(n)]
            if kind == "time"
            else [middles[i : i + 1] for i in range(n)]
        )
        levels = np.array([np.median(each) for each in near])
        found = compare(list(np.exp(a)), list(np.exp(b)), "time") if kind == "time" else compare(list(a), list(b), kind)
        assert found.low is not None
        assert found.high is not None
        low, high = (math.log(found.low), math.log(found.high)) if kind == "time" else (found.low, found.high)
        for inside, outside in ((low + 1e-6, low - 1e-6), (high - 1e-6, high + 1e-6)):
            assert enumerated(a, b, levels, inside) > 0.05
            assert enumerated(a, b, levels, outside) <= 0.05


def test_the_interval_of_a_median_is_the_binomial_one_by_hand() -> None:
    six = median_interval([3, 1, 2, 6, 5, 4])
    assert six is not None
    assert (six.low, six.high, six.how) == (1, 6, "exact"), "1 - 2/2^6 = 96.9 %"
    ten = median_interval(list(range(10)))
    assert ten is not None
    assert (ten.low, ten.high) == (1, 8), "97.9 % between the second and the ninth"
    assert median_interval([1.0]) is None


def test_intervals_of_a_cell_cover_and_the_bootstrap_would_not() -> None:
    """The middle of a quiet machine's runs, 400 times; the bootstrap is numpy's, not ours."""
    r, rng, truth = (
        random.Random(4),
        np.random.default_rng(4),
        statistics.median(math.exp(QUIET(random.Random(k))) for k in range(20_001)),
    )
    for n, least in ((3, 0.93), (5, 0.93), (6, 0.93), (10, 0.95)):
        covered = booted = 0
        for _ in range(400):
            values = [math.exp(QUIET(r)) for _ in range(n)]
            interval = median_interval(values, log=True)
            assert interval is not None
            covered += interval.low <= truth <= interval.high
            medians = np.median(np.array(values)[rng.integers(n, size=(400, n))], axis=1)
            low, high = np.quantile(medians, [0.025, 0.975])
            booted += low <= truth <= high
        assert covered / 400 >= least, n
        if n == 3:
            assert booted / 400 < 0.85, "why the bootstrap is not used"


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize("noise", [QUIET, NOISY], ids=["quiet", "noisy"])
def test_a_difference_of_nothing_is_significant_in_one_trial_of_twenty(noise: Noise) -> None:
    r = random.Random(5)
    wrong = [compare(*pairs(r, noise, 10), "time").verdict in ("faster", "slower") for _ in range(300)]
    assert sum(wrong) <= 26, "5 % are meant: more than 26 of 300 happen once in 500 times"


def test_few_repeats_do_not_make_it_sure_of_itself() -> None:
    r = random.Random(6)
    for n in (2, 3, 4, 5, 6, 7, 8):
        wrong = sum(compare(*pairs(r, QUIET, n), "time").verdict in ("faster", "slower") for _ in range(300))
        assert wrong <= 26, f"{wrong} of 300 with n={n}"


@pytest.mark.parametrize("n", [3, 6])
def test_twenty_comparisons_of_nothing_are_as_rarely_wrong_as_one(n: int) -> None:
    """A study of 21 cells that do not differ: any verdict at all is a false one."""
    r, trials = random.Random(20 + n), 200
    wrong = 0
    for _ in range(trials):
        drift = [0.06 * block / n for block in range(n)]
        baseline, *cells = ([math.exp(level + NOISY(r)) for level in drift] for _ in range(21))
        found = compare_family([(cell, baseline) for cell in cells], "time")
        wrong += any(each.verdict in ("faster", "slower") for each in found)
    assert wrong <= 19, f"{wrong} of {trials}: 5 % are meant, and more than 19 happen once in 400 times"


def test_the_verdicts_of_a_family_are_those_of_holm() -> None:
    """The p-values of six cells by hand: 0.05 / 6 is beaten, then 0.05 / 5, and so on until one fails; intervals say the same."""
    r = random.Random(21)
    baseline = [math.exp(r.gauss(0, 0.02)) for _ in range(12)]
    sizes = (0.15, 0.08, 0.04, 0.03, 0.0, 0.0)
    cells = [[value * math.exp(size + r.gauss(0, 0.02)) for value in baseline] for size in sizes]
    found = compare_family([(cell, baseline) for cell in cells], "time")
    failed = False
    for place, each in enumerate(sorted(found, key=lambda one: one.p or 0.0)):
        assert each.p is not None
        failed = failed or each.p > 0.05 / (6 - place)
        assert (each.verdict == "slower") == (not failed)
    assert 2 <= sum(each.verdict == "slower" for each in found) <= 4
    alone = [compare(cell, baseline, "time") for cell in cells]
    assert all(wide.low <= one.low for wide, one in zip(found, alone, strict=True) if wide.low and one.low)


def test_a_planted_three_per_cent_is_found_with_ten_repeats_on_a_quiet_machine() -> None:
    r = random.Random(7)
    found = [compare(*pairs(r, QUIET, 10, planted=0.03), "time") for _ in range(100)]
    assert sum(each.verdict == "slower" for each in found) >= 90
    assert sum(each.verdict == "faster" for each in found) == 0
    covered = sum(each.low is not None and each.high is not None and each.low <= 1.03 <= each.high for each in found)
    assert covered >= 89, "95 % are meant: fewer than 89 of 100 happen once in 200 times"
    assert statistics.median(each.effect or 0 for each in found) == pytest.approx(1.03, abs=0.004)


def test_so_many_more_repeats_settle_it_and_where_no_number_is_honest_none_is_said() -> None:
    """Every study that is not settled is gone on with as it says; the larger number promises that it is settled then, whatever the truth."""
    r = random.Random(8)
    followed, settled, silent = 0, 0, 0
    for noise, planted, n in [(QUIET, 0.02, 3), (NOISY, 0.08, 5), (machine(0.02, 0.0), 0.0, 8)] * 12:
        a, b = pairs(r, noise, n, planted)
        found = compare(a, b, "time")
        if found.verdict != "not significant":
            continue
        if found.more is None:
            silent += 1
            continue
        few, most = found.more
        assert 1 <= few <= most
        more = pairs(r, noise, most, planted)
        followed += 1
        settled += compare([*a, *more[0]], [*b, *more[1]], "time").settled
    assert followed >= 15
    assert settled >= 0.9 * followed, f"{settled} of {followed}"
    assert compare([1.0, 1.3], [1.1, 1.0], "time").more is None, "two pairs say nothing about the noise"
    assert compare([1.0, 3.0, 0.5], [1.1, 1.0, 2.0], "time").more is None, "more than a thousand"


def test_what_nobody_would_act_on_is_the_same_however_certain_it_is() -> None:
    r = random.Random(13)
    tight = machine(0.001, 0.0)
    found = compare(*pairs(r, tight, 10, planted=-0.005), "time")
    assert found.high is not None
    assert found.high < 1, "0.995 for certain"
    assert found.verdict == "the same"
    assert compare(*pairs(r, tight, 10, planted=-0.03), "time").verdict == "faster"


def test_a_time_that_was_not_reached_is_longer_than_any_other() -> None:
    """Quick where it got there, but it got there in two of five and in three of ten."""
    never = math.inf
    five = compare([5.0, 5.1, never, never, never], [10.0, 10.1, 9.9, 10.0, 10.2], "time")
    assert (five.n, five.verdict, five.effect) == (5, "not significant", None)
    ten = compare([5.0, 5.1, 5.2, *[never] * 9], [10.0 + k / 100 for k in range(12)], "time")
    assert ten.verdict == "slower"
    assert ten.effect is None
    quick = compare([5.0] * 8, [10.0] * 6 + [never] * 2, "time")
    assert (quick.verdict, quick.effect) == ("faster", pytest.approx(0.5))
    neither = compare([never] * 8, [never] * 8, "time")
    assert (neither.n, neither.verdict) == (0, "too few"), "two that never got there are not the same"
    family = compare_family([([5.0] * 7, [10.0] * 7), ([never] * 7, [10.0] * 7), ([never] * 7, [never] * 7)], "time")
    assert [each.verdict for each in family] == ["faster", "slower", "too few"]


def test_alike_within_two_per_cent_is_said_to_be_the_same() -> None:
    r = random.Random(9)
    tight = machine(0.002, 0.0)
    assert compare(*pairs(r, tight, 10), "time").verdict == "the same"
    assert compare([0.97] * 8, [0.97] * 8, "accuracy").verdict == "the same"


def test_what_cannot_be_known_is_not_said() -> None:
    assert compare([], [], "time").verdict == "too few"
    assert compare([1.0], [2.0], "time").verdict == "too few"
    three = compare([0.96] * 3, [0.95] * 3, "accuracy")
    assert three.verdict == "not significant", "three equal steps on a grid may be chance"
    assert compare([0.96] * 8, [0.95] * 8, "accuracy").verdict == "better", "eight are not"


def test_what_a_seed_does_to_both_is_not_noise() -> None:
    """Accuracies differ by 0.5 points from seed to seed and by 0.1 between cells of one seed: 0.8 points show in pairs."""
    r = random.Random(10)
    seeds = [r.gauss(0.97, 0.005) for _ in range(10)]
    a = [s + 0.008 + r.gauss(0, 0.001) for s in seeds]
    b = [s + r.gauss(0, 0.001) for s in seeds]
    assert compare(a, b, "accuracy").verdict == "better"
    assert compare(b, a, "accuracy").verdict == "worse"


def test_words_follow_the_metric() -> None:
    up, down = [2.0 + 0.01 * k for k in range(8)], [1.0 + 0.01 * k for k in range(8)]
    assert compare(up, down, "time").verdict == "slower"
    assert compare(up, down, "rate").verdict == "faster"
    assert compare(up, down, "size").verdict == "higher"
    ratio = compare(up, down, "time")
    assert ratio.effect == pytest.approx(1.96, abs=0.03)


# ---------------------------------------------------------------- stability


def series(
    r: random.Random, noise: Noise, cells: int = 3, repeats: int = 5, drift: float = 0.0, first: float = 0.0
) -> list[Timed]:
    total = cells * repeats
    return [
        Timed(
            f"cell {k % cells}",
            float(k),
            (10 + k % cells) * math.exp(noise(r) + drift * k / total) * (1 + (first if k == 0 else 0)),
        )
        for k in range(total)
    ]


def test_a_quiet_machine_is_called_quiet_and_gives_no_false_alarm() -> None:
    r = random.Random(11)
    verdicts = [judge(series(r, machine(0.008, 0.05))).verdict for _ in range(200)]
    assert verdicts.count("quiet") >= 185, {each: verdicts.count(each) for each in set(verdicts)}


@pytest.mark.parametrize(
    ("noise", "drift", "first", "verdict", "advice"),
    [
        (machine(0.1, 0.3), 0.0, 0.0, "noisy", "end other programs"),
        (machine(0.005, 0.0), 0.1, 0.0, "drift", "comparisons stand"),
        (machine(0.005, 0.0), 0.0, 0.4, "first run slow", "cold caches"),
    ],
)
def test_trouble_is_named_with_advice(noise: Noise, drift: float, first: float, verdict: str, advice: str) -> None:
    r = random.Random(12)
    found = [judge(series(r, noise, drift=drift, first=first)) for _ in range(40)]
    assert sum(verdict in each.verdict for each in found) >= 36
    assert any(advice in text for text in next(each for each in found if verdict in each.verdict).advice)


def test_too_few_runs_say_nothing() -> None:
    assert judge([Timed("a", 0, 1.0), Timed("b", 1, 2.0)]).verdict == "too few runs to say"


@pytest.mark.parametrize("repeats", [2, 3, 5, 9])
def test_how_much_runs_of_one_cell_differ_is_right_with_few_repeats(repeats: int) -> None:
    """The true spread is known, since it is planted: the mean over many studies of 12 runs or more is within 6 % of it."""
    r = random.Random(repeats)
    found = [
        judge(series(r, lambda r: r.gauss(0, 0.04), cells=-(-18 // repeats), repeats=repeats)).spread
        for _ in range(300)
    ]
    assert statistics.fmean(spread or 0.0 for spread in found) == pytest.approx(0.04, rel=0.06)


def test_one_pause_of_the_machine_does_not_make_it_noisy() -> None:
    r = random.Random(13)
    runs = series(r, lambda r: r.gauss(0, 0.01), cells=4, repeats=3)
    paused = [*runs[:-1], Timed(runs[-1].cell, runs[-1].began, 3 * runs[-1].seconds)]
    assert judge(paused).spread == pytest.approx(judge(runs).spread, rel=0.5)


def test_a_starved_machine_is_named_however_few_the_runs() -> None:
    told = "you had 23% of your cores"
    found = judge([Timed("a", 0, 1.0), Timed("b", 1, 2.0)], starved=told)
    assert (found.verdict, found.starved) == ("starved, too few runs to say", told)
    assert judge(series(random.Random(14), machine(0.005, 0.0)), starved=told).verdict.startswith("starved")


# ---------------------------------------------------------------- few seeds


def seeded(r: random.Random, deviations: Sequence[float], seeds: int, gap: float = 0.0) -> list[dict[Hashable, float]]:
    """Accuracies of recipes that learn the same, but for the second one. A seed moves all of them, and each by itself."""
    levels = [r.gauss(0, 0.003) for _ in range(seeds)]
    means = [0.75 + gap * (cell == 1) for cell in range(len(deviations))]
    return [
        {seed: mean + level + r.gauss(0, deviation) for seed, level in enumerate(levels)}
        for mean, deviation in zip(means, deviations, strict=True)
    ]


def judged(cells: Sequence[dict[Hashable, float]], spread: Spread | None) -> list[str]:
    base = list(cells[0].values())
    return [
        one.verdict
        for one in compare_family([([*cell.values()], base) for cell in cells[1:]], "accuracy", spread=spread)
    ]


def test_the_pooled_spread_is_that_of_a_two_way_analysis_of_variance() -> None:
    r = random.Random(40)
    cells = seeded(r, [0.004] * 5, 3)
    table = np.array([[cell[seed] for seed in range(3)] for cell in cells])
    residuals = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + table.mean()
    found = pooled(cells)
    assert found is not None
    assert found.degrees == (5 - 1) * (3 - 1)
    assert found.deviation == pytest.approx(math.sqrt((residuals**2).sum() / 8), rel=1e-9)
    # A net that never learns gives the same every time; a recipe that was trained once says nothing either.
    assert pooled([*cells, dict.fromkeys(range(3), 0.1135), {0: 0.7}]) == found
    assert pooled([{0: 0.7, 1: 0.71}]) is None
    assert pooled([]) is None
    # Where a seed is missing in one cell, the others still count.
    some = pooled([*cells[:4], {0: cells[4][0], 2: cells[4][2]}])
    assert some is not None
    assert some.degrees == 7


@pytest.mark.parametrize("deviations", [[0.004] * 5, [0.004] * 4 + [0.012]])
@pytest.mark.parametrize("seeds", [2, 3])
def test_two_seeds_of_five_recipes_keep_the_error_and_find_three_points(deviations: list[float], seeds: int) -> None:
    r, trials, wrong, seen, alone = random.Random(41), 300, 0, 0, 0
    for _ in range(trials):
        cells = seeded(r, deviations, seeds)
        wrong += any(verdict in ("better", "worse") for verdict in judged(cells, pooled(cells)))
        cells = seeded(r, deviations, seeds, gap=0.03)
        seen += judged(cells, pooled(cells))[0] == "better"
        alone += judged(cells, None)[0] == "better"
    assert wrong <= 0.05 * trials + 2.33 * (0.05 * 0.95 * trials) ** 0.5
    assert seen >= (0.55 if seeds == 2 else 0.9) * trials
    assert alone < seen - 0.2 * trials


def test_pairs_that_differ_more_than_the_others_are_believed() -> None:
    quiet = [{0: 0.70, 1: 0.701}, {0: 0.72, 1: 0.7212}, {0: 0.71, 1: 0.7111}, {0: 0.73, 1: 0.7311}]
    wild: dict[Hashable, float] = {0: 0.9, 1: 0.74}
    spread = pooled(quiet)
    assert judged(quiet, spread) == ["better"] * 3
    assert judged([quiet[0], wild], spread) == ["not significant"]
