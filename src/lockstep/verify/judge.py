"""Judging what the witnesses of two runs wrote down: is it the same computation, up to rounding? (docs/verify.md derives the tolerances.)

The steps themselves are judged in steps.py; here, what surrounds them: samples, settings, ranks that agree, evaluations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from lockstep.verify.checks import Check, Worst
from lockstep.verify.records import Records
from lockstep.verify.steps import MARGIN, PASS_ROUNDING, TERMS, Rounding, Steps, own_rounding

# Measures of ours that are numbers with a point; what a function of the user's own does to roundings is not known.
EXACT = ("mae", "perplexity")


def judge(reference: Records, other: Records, name: str, rounding: Rounding | None = None) -> Iterator[Check]:
    """All checks of a placement against the one process (or of the one process against float64)."""
    against = f"{name} against 1 process" if other is not reference else f"{name} against float64"
    rounding = rounding or own_rounding(reference)
    steps = Steps(reference, other, against, rounding)
    if other is not reference:
        yield _samples(reference, other, against)
        yield _settings(reference, other, against)
        yield _ranks_agree(other, name)
        yield _undisturbed(other, name)
    yield from steps.checks()
    yield from _evaluations(reference, other, against, rounding)


def _samples(reference: Records, other: Records, against: str) -> Check:
    wrong, where = 0, ""
    for step, row in reference.rows[0].items():
        difference = _unlike(row["samples"], [s for rows in other.rows for s in rows.get(step, {}).get("samples", [])])
        if difference and not where:
            where = f"step {step + 1}"
        wrong += difference
    wrong += sum(len(rows.keys() ^ reference.rows[0].keys()) for rows in other.rows)
    return Check("samples of every step", against, wrong, 0, where)


def _unlike(ours: list[str], theirs: list[str]) -> int:
    """How many samples one has and the other has not, twice counted twice."""
    one, two = Counter(ours), Counter(theirs)
    return max((one - two).total(), (two - one).total())


def _settings(reference: Records, other: Records, against: str) -> Check:
    worst = Worst()
    for step, row in reference.rows[0].items():
        for rows in other.rows:
            for key in ("lr", "momentum", "clip_norm", "l1", "l2"):
                ours, theirs = float(row[key] or 0), float(rows.get(step, {}).get(key) or 0)
                worst.add(
                    abs(ours - theirs) / (abs(ours) or 1.0), 0.0, f"step {step + 1}, {key} {theirs:g}, not {ours:g}"
                )
    found = worst.check("learning rate, clipping, penalty of every step", against)
    return found if not found.passed else Check(found.what, against, 0, 0)


def _ranks_agree(other: Records, name: str) -> Check:
    different, where = 0, ""
    for step, row in other.rows[0].items():
        for rows in other.rows[1:]:
            if any(rows.get(step, {}).get(key) != row.get(key) for key in ("gradient", "weights", "optimizer")):
                where = where or f"step {step + 1}"
                different += 1
                break
    return Check("steps after which ranks differ by a bit", name, different, 0, where)


def _undisturbed(other: Records, name: str) -> Check:
    broken = [step for rows in other.rows for step, row in rows.items() if not row["undisturbed"]]
    where = f"before step {min(broken) + 1}" if broken else ""
    return Check("weights that change between steps", name, len(broken), 0, where)


def same_bits(one: Records, two: Records, name: str) -> Check:
    """Two runs of one placement."""
    different = 0
    for ours, theirs in zip(one.rows, two.rows, strict=True):
        keys = ("gradient", "weights", "samples")
        different += sum(any(row[k] != theirs.get(step, {}).get(k) for k in keys) for step, row in ours.items())
        different += len(theirs.keys() - ours.keys())
    return Check("steps that differ by a bit", f"{name}, twice", different, 0)


def _evaluations(reference: Records, other: Records, against: str, rounding: Rounding) -> Iterator[Check]:
    wrong, loss, where = 0, Worst(), ""
    measured: dict[str, Worst] = {}
    for epoch, row in reference.evaluations[0].items():
        rows = [found.get(epoch, {}) for found in other.evaluations]
        if other is not reference:
            unlike = _unlike(row["samples"], [sample for each in rows for sample in each.get("samples", [])])
            unlike += sum(each.get("count") != row["count"] for each in rows)
            where = where or (f"epoch {epoch}" if unlike else "")
            wrong += unlike
        truth = reference.load("evaluation", epoch)
        assert truth is not None
        own = abs(row["loss"] - truth["true_loss"]) / abs(truth["true_loss"] or 1.0)
        allowed = MARGIN * max(own, rounding.loss) + TERMS / 64 * PASS_ROUNDING[other.spec.recipe.precision]
        for each in rows:
            difference = abs(each.get("loss", math.nan) - truth["true_loss"]) / abs(truth["true_loss"] or 1.0)
            loss.add(difference, allowed, f"epoch {epoch}")
            for name, true in truth["true_measures"].items():
                difference = abs(each.get("measures", {}).get(name, math.nan) - true)
                worst = measured.setdefault(name, Worst())
                if name in truth["unsure"]:  # answers are right or wrong, but for those that rounding may decide
                    wrong_answers, most = (
                        round(share * row["count"], 6) for share in (difference, truth["unsure"][name])
                    )
                    worst.add(wrong_answers, most, f"epoch {epoch}")
                elif name in EXACT:  # as exact as the loss; perplexity is its power
                    worst.add(
                        difference / abs(true or 1.0), allowed * max(1.0, abs(truth["true_loss"])), f"epoch {epoch}"
                    )
    if other is not reference:
        yield Check("samples of every evaluation", against, wrong, 0, where)
    if any(not math.isfinite(row["loss"]) for row in reference.evaluations[0].values()):
        why = "training diverged: in one process, too, the test loss is not finite"
        yield Check("test loss", against, math.nan, 0, diverged=why)
        return
    for name, worst in measured.items():
        if worst.count:
            yield worst.check("test samples that are right" if name == "accuracy" else f"test {name}", against)
    yield loss.check("test loss", against)
