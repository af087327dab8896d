"""`lockstep verify -- COMMAND`: the judge, on records made by hand."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.report.document import of_parts
from lockstep.report.html import page, page_file
from lockstep.report.proof import proof_part
from lockstep.report.views import Lines
from lockstep.verify.foreign.judge import DIFFERENT, OPEN, SAME, Judge
from lockstep.verify.foreign.records import Line, Pass, Rank, Step, Tensor

WEIGHTS = 6


def step(number: int, rank: int, own: np.ndarray, exchanged: np.ndarray, samples: list[str], lr: float = 0.1) -> Step:
    tensor = Tensor("w", WEIGHTS, "float32", "o", f"{number - 1}", f"{number}", False, True, "", "")
    line = Line(
        number,
        0,
        [{"lr": lr}],
        [Pass(samples, [], 0, 0, "r", False)],
        [1.0],
        1.0,
        False,
        [],
        [tensor],
        {},
        [],
        False,
        [],
        [],
    )
    return Step(line, own, np.abs(own), exchanged, exchanged, -lr * exchanged, np.ones(WEIGHTS))


def script(steps: int = 4, wrong: int = 0, times: float = 1.0, lr: float = 0.1) -> tuple[list[Rank], Rank]:
    """Two ranks and one process. In step `wrong`, the exchanged gradient is so many times what it should be, or the learning rate another."""
    generator = np.random.default_rng(0)
    many: list[Rank] = [[], []]
    one: Rank = []
    for number in range(1, steps + 1):
        own = [generator.normal(size=WEIGHTS) for _ in range(2)]
        mean = (own[0] + own[1]) / 2
        names = [[f"{number}{rank}{place}" for place in "ab"] for rank in "01"]
        got = mean * (times if number == wrong else 1.0)
        for rank in range(2):
            many[rank].append(step(number, rank, own[rank], got, names[rank], lr if number == wrong else 0.1))
        one.append(step(number, 0, mean, mean, [*names[0], *names[1]]))
    return many, one


def test_what_is_the_same_passes_and_the_first_difference_is_named() -> None:
    many, one = script()
    assert Judge(many, one, one).verdict().verdict == SAME
    for number in (1, 3):
        many, one = script(wrong=number, times=2.0)
        found = Judge(many, one, one).verdict()
        assert found.sentence.startswith(
            f"NOT the same: from step {number} on, gradients of 2 ranks are 2.00 times those of one process"
        )
        many, one = script(wrong=number, times=1.00001)
        assert (Judge(many, one, one).verdict().reason, Judge(many, None, None, "why").verdict().reason) == (
            "scaled",
            "scaled",
        )
        many, one = script(wrong=number, lr=0.2)
        assert Judge(many, one, one).verdict().reason == "lr scaled"
    many, one = script(wrong=2, times=float("nan"))
    assert Judge(many, one, one).verdict().verdict == DIFFERENT


def test_what_is_not_finite_in_one_process_too_proves_nothing() -> None:
    many, one = script()
    for steps in (*many, one):
        for each in steps[1:]:
            for name in ("own", "size", "exchanged", "final", "update"):
                setattr(each, name, getattr(each, name) * np.nan)
    found = Judge(many, one, one).verdict()
    assert (found.verdict, found.reason, found.findings[0].step) == (OPEN, "not finite", 2)
    assert found.sentence.startswith("not proven: from step 2 on, the gradient of one process is not finite ('w')")


@pytest.mark.parametrize(("noise", "verdict"), [(0.01, SAME), (0.2, OPEN), (3.0, OPEN)])
def test_a_script_whose_roundings_matter_too_much_proves_nothing(noise: float, verdict: str) -> None:
    """What is allowed is six times what rounding does: where that is half of a gradient, half of it could be wrong."""
    many, one = script()
    twin = deepcopy(one)
    for each in twin:
        each.own = each.own * (1 + noise)
    found = Judge(many, one, twin).verdict()
    assert found.verdict == verdict
    if verdict == OPEN:
        assert found.reason == "rounding"
        assert f"changes so much that {6 * noise:.0%} of it has to be allowed ('w')" in found.sentence
        assert found.sentence.endswith("rounding; seed whatever is random"), "a first step has no learning rate"
    for each in many[0] + many[1]:
        each.exchanged = each.exchanged * 1.01
    assert Judge(many, one, twin).verdict().verdict == DIFFERENT, "the exchange is judged within the ranks"


def test_what_can_be_done_about_it_depends_on_where_it_begins() -> None:
    many, one = script()
    twin = deepcopy(one)
    for each in twin[2:]:
        each.own = each.own * 1.5
    said = Judge(many, one, twin).verdict().sentence
    assert said.endswith("seed whatever is random, or take a smaller learning rate or fewer steps (--steps 2)")
    for each in one:
        each.line.autocast = True
    said = Judge(many, one, twin).verdict().sentence
    assert said.endswith("prove it in float32, or take a smaller learning rate or fewer steps (--steps 2)")


def split(ranks: list[Rank], **parameters: int) -> None:
    """The same records, of parameters with these names and lengths."""
    for each in [step for steps in ranks for step in steps]:
        layout = [replace(each.line.layout[0], name=name, length=length) for name, length in parameters.items()]
        each.line.layout = layout


@pytest.mark.parametrize("times", [float("nan"), 1e4])
def test_an_update_that_rounding_could_hide_in_one_parameter_of_many_proves_nothing(times: float) -> None:
    many, one = script()
    twin = deepcopy(one)
    split([*many, one, twin], a=2, b=2, c=1, d=1)
    assert Judge(many, one, twin).verdict().verdict == SAME
    first = np.array([1, 1, 0, 0, 0, 0], dtype=bool)
    for each in twin:
        each.update = np.where(first, times * each.update, each.update)
    found = Judge(many, one, twin).verdict()
    assert (found.verdict, found.reason) == (OPEN, "rounding")
    assert "the update of one process" in found.sentence
    assert "('a')" in found.sentence
    for each in many[0] + many[1]:
        each.update = np.where(first, 5000 * each.update, each.update)
    assert Judge(many, one, twin).verdict().verdict == OPEN
    assert Judge(many, one, one).verdict().reason == "update"


@pytest.mark.parametrize(("times", "verdict"), [(1.0, SAME), (1.1, SAME), (1.5, DIFFERENT), (0.0, DIFFERENT)])
def test_where_all_signs_of_a_parameter_are_open_its_update_is_judged_by_its_size(times: float, verdict: str) -> None:
    """Adam makes whole steps of a gradient that is 0 but for rounding, as that of the keys' bias in attention."""
    many, one = script()
    split([*many, one], a=2, b=2, c=2)
    first = np.array([1, 1, 0, 0, 0, 0], dtype=bool)
    for each in [step for steps in (*many, one) for step in steps]:
        each.line.settings[0]["eps"] = 1e-8
        each.update = np.full(WEIGHTS, -0.1)
    twin = deepcopy(one)
    for each in twin:
        each.update = np.where(first, [0.1, -0.1, 0, 0, 0, 0], each.update)
    for each in many[0] + many[1]:
        each.update = np.where(first, np.array([-0.1, 0.1, 0, 0, 0, 0]) * times, each.update)
    assert Judge(many, one, twin).verdict().verdict == verdict
    for each in many[0] + many[1]:
        each.update = one[0].update
    for each in twin:  # its size is open, too
        each.update = np.where(first, 2 * each.update, each.update)
    assert Judge(many, one, twin).verdict().reason == "rounding"


def test_an_update_of_a_few_roundings_of_its_weight_may_be_rounding_alone() -> None:
    """As that of a learning rate that warms up."""
    many, one = script()
    for each in [step for steps in (*many, one) for step in steps]:
        each.update = each.update * 1e-6
    twin = deepcopy(one)
    for each in twin:
        each.update = each.update * 1.2
    assert Judge(many, one, twin).verdict().verdict == SAME
    for each in [step for steps in (*many, one, twin) for step in steps]:
        each.weights = each.weights / 100
    assert Judge(many, one, twin).verdict().reason == "rounding"


@pytest.mark.parametrize(("off", "verdict"), [(1.0, SAME), (1.2, SAME), (1.35, DIFFERENT)])
def test_of_signs_the_root_of_what_the_gradient_does_is_allowed(off: float, verdict: str) -> None:
    """Adam's first steps in 16 bits: 1 % of a gradient is 11 % of an update, and 6 % is 28 %, not 68 %."""
    many, one = script()
    for each in [step for steps in (*many, one) for step in steps]:
        each.line.autocast = True
        each.line.settings[0]["beta2"] = 0.999
    twin = deepcopy(one)
    for each in twin:
        each.own, each.update = each.own * 1.01, each.update * 1.11
    for each in many[0] + many[1]:
        each.update = each.update * off
    assert Judge(many, one, twin).verdict().verdict == verdict
    for each in one:  # SGD's follow the gradients themselves
        each.line.settings[0] = {"lr": 0.1}
    assert Judge(many, one, twin).verdict().verdict == OPEN


def test_a_single_sign_of_a_gradient_that_is_nearly_nothing_is_no_fault() -> None:
    """Adam turns it into a whole step; that of an entry that is not small is a fault."""
    for size, verdict in ((1e-3, SAME), (0.5, DIFFERENT)):
        many, one = script()
        last = np.array([0, 0, 0, 0, 0, 1], dtype=bool)
        for each in [step for steps in (*many, one) for step in steps]:
            for name in ("own", "size", "exchanged", "final"):
                setattr(each, name, np.where(last, size, 1.0))
            each.update = np.full(WEIGHTS, -0.1)
            each.line.settings[0]["eps"] = 1e-8
        for each in many[0] + many[1]:
            each.update = np.where(last, 0.1, -0.1)
        assert Judge(many, one, one).verdict().verdict == verdict, size


def test_a_gradient_that_is_nothing_beside_the_others_may_be_rounding_alone() -> None:
    """As that of a bias before batch norm, which is 0 but for rounding."""
    many, one = script()
    twin = deepcopy(one)
    split([*many, one, twin], b=2, w=4)
    for each in [step for steps in (*many, one, twin) for step in steps]:
        for name in ("own", "size", "exchanged", "final", "update"):
            setattr(each, name, getattr(each, name) * np.array([1e-7, 1e-7, 1, 1, 1, 1]))
    for each in twin:
        each.own = each.own * np.array([3, 3, 1, 1, 1, 1])
    assert Judge(many, one, twin).verdict().verdict == SAME


def test_other_numbers_of_steps_are_a_difference() -> None:
    many, one = script()
    found = Judge(many, one[:3], one[:3]).verdict()
    assert found.sentence == "NOT the same: from step 4 on, 2 ranks take 4 steps, and one process takes 3"
    found = Judge([many[0], many[1][:2]], one, one).verdict()
    assert found.sentence == "NOT the same: from step 3 on, rank 0 takes 4 steps, and rank 1 takes 2"


def test_samples_that_were_not_seen_are_not_called_right() -> None:
    many, one = script()
    assert "samples of every step" in {check.what for check in Judge(many, one, one).verdict().checks}
    for each in [step for steps in (*many, one) for step in steps]:
        each.line.passes[0].inputs = []
    found = Judge(many, one, one).verdict()
    assert found.verdict == SAME
    assert found.sentence.endswith("what one process computes; the samples that they took were not seen")
    assert "samples of every step" not in {check.what for check in found.checks}


def test_without_one_process_nothing_is_proven() -> None:
    many, _ = script()
    found = Judge(many, None, None, "1 process: it ended with exit code 1").verdict()
    assert (found.verdict, found.sentence) == (OPEN, "not proven: 1 process: it ended with exit code 1")


def test_the_page_has_every_step_with_what_is_allowed() -> None:
    many, one = script(wrong=3, times=2.0)
    part = proof_part(Judge(many, one, one).verdict(), ["torchrun", "train.py"], "train.py")
    assert part.headlines[0].verdict.startswith("NOT the same: from step 3 on")
    assert part.headlines[0].next == "mend it, and prove it again: lockstep verify -- torchrun train.py"
    loss, differences = part.charts
    assert isinstance(loss, Lines)
    assert isinstance(differences, Lines)
    assert all(f"\n  {chart.section}: [" in page_file("page.js") for chart in part.charts), "the page has their section"
    assert [len(series.x) for series in loss.series] == [4, 4]
    assert loss.series[1].low[0] == pytest.approx(1.0 - 1e-4)
    drawn = {series.name: dict(zip(series.x, series.y, strict=True)) for series in differences.series}
    assert drawn["allowed"] == {1: 1, 4: 1}
    assert (drawn["gradient"][2] or 0) < 1 < (drawn["gradient"][3] or 0)
    assert set(drawn["gradient"]) == {1, 2, 3}, "from then on they have other weights"
    assert [mark.x for mark in differences.marks] == [3]
    many, one = script()
    assert proof_part(Judge(many, one, one).verdict(), ["torchrun"], "train.py").facts[0] == ("verdict", "same")
    assert page(of_parts([part])).count("</html>") == 1
