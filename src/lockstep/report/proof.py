"""The proof of a foreign script as a part of the document: the verdict, what differs first, and every step with what rounding may do drawn."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from lockstep import units
from lockstep.report.views import AnyChart, Axis, Cell, Command, Lines, Mark, Part, Said, Series, Table, shorts
from lockstep.verify.checks import ratio
from lockstep.verify.foreign.judge import DIFFERENT, SAME, Verdict

COLUMNS = ["check", "difference", "allowed", "", "at"]
# A difference of nothing has no place on a logarithmic axis.
LEAST = 1e-6
DRAWN = {
    "exchanged gradient against the ranks' own": "exchange",
    "gradient against one process": "gradient",
    "loss against one process": "loss",
    "clipping against one process": "clipping",
    "update against one process": "update",
}


def proof_part(verdict: Verdict, command: Sequence[str], name: str) -> Part:
    words = f"lockstep verify -- {shlex.join(command)}"
    return Part(
        name=name,
        kind="proof",
        about=f"{shlex.join(command)}: {units.counted(verdict.steps, 'step')} of {units.counted(verdict.ranks, 'rank')}, and of one process",
        facts=[
            ("verdict", verdict.verdict),
            *([("reason", verdict.reason)] if verdict.reason else []),
            ("ranks", str(verdict.ranks)),
            ("steps", str(verdict.steps)),
            *([("samples a step", str(verdict.batch))] if verdict.batch else []),
        ],
        headlines=[said(verdict, words)],
        notes=[*(f"then: step {each.step}: {each.text}" for each in verdict.findings[1:4]), *verdict.lines],
        table=_table(verdict),
        charts=_charts(verdict),
        commands=[Command("verify", [words])],
    )


def said(verdict: Verdict, words: str) -> Said:
    question = "Do the ranks compute what one process computes?"
    if verdict.verdict == SAME:
        return Said(
            question,
            verdict.sentence,
            _closest(verdict),
            "go on with it; lockstep attach -- COMMAND shows where its steps go",
        )
    again = "mend it" if verdict.verdict == DIFFERENT else "take it away"
    return Said(question, verdict.sentence, _closest(verdict), f"{again}, and prove it again: {words}")


def _closest(verdict: Verdict) -> str:
    """The check that came closest to what is allowed, or went beyond it."""
    if not verdict.checks:
        return ""
    worst = max(verdict.checks, key=lambda check: ratio(check.difference, check.allowed))
    where = f", {worst.where}" if worst.where else ""
    if not worst.passed:
        return f"{worst.what}: {worst.difference:.2g}, and {worst.allowed:.2g} is allowed{where}"
    return (
        f"closest to what is allowed: {worst.what}, {worst.difference:.2g} of {worst.allowed:.2g}{where}"
        if worst.allowed
        else ""
    )


def _table(verdict: Verdict) -> Table:
    rows = [
        [
            Cell(check.what),
            Cell(f"{check.difference:.2g}", _finite(check.difference)),
            Cell(f"{check.allowed:.2g}", _finite(check.allowed)),
            Cell(check.verdict, faint=check.passed),
            Cell(check.where),
        ]
        for check in verdict.checks
    ]
    says = "Where each check came closest to what is allowed, or first went beyond it. Differences of tensors are shares of their length."
    return Table("checks", "Checks", says, COLUMNS, rows, right=[1, 2])


def _charts(verdict: Verdict) -> list[AnyChart]:
    first = verdict.findings[0] if verdict.findings else None
    marks = [Mark(x=first.step, text=first.key, colour="warn")] if first else []
    return [*_losses(verdict, marks), *_differences(verdict, marks)]


def _losses(verdict: Verdict, marks: list[Mark]) -> list[AnyChart]:
    known = [each for each in verdict.losses if each.ranks is not None]
    if not known:
        return []
    steps = shorts(each.step for each in known)
    series = [Series(units.counted(verdict.ranks, "rank"), "c0", steps, shorts(each.ranks for each in known))]
    if all(each.one is not None for each in known):
        one = [each.one or 0.0 for each in known]
        low, high = (
            shorts(value + side * each.allowed for value, each in zip(one, known, strict=True)) for side in (-1, 1)
        )
        series.append(Series("one process", "c1", steps, shorts(one), low, high, dash=True))
    says = "The loss of every step, over all samples of it. The band around the one process is what rounding does to this very script, six times."
    return [Lines("loss", "proof", "Loss", says, Axis("step"), Axis("loss"), series, marks)]


def _differences(verdict: Verdict, marks: list[Mark]) -> list[AnyChart]:
    """Every check of a step as a share of what is allowed: 1 is the line."""
    series = []
    for number, (what, name) in enumerate(DRAWN.items()):
        worst: dict[int, float] = {}
        for step, difference, allowed in verdict.compared.get(what, []):
            worst[step] = max(worst.get(step, LEAST), min(ratio(difference, allowed), 1 / LEAST))
        if worst:
            series.append(Series(name, f"c{number}", shorts(worst), shorts(worst.values())))
    if not series:
        return []
    series.append(Series("allowed", "warn", [1, verdict.steps], [1, 1], dash=True))
    says = (
        "How far each step of the ranks is from what it should be, as a multiple of what rounding may do (the line at 1). What only one process "
        "can tell is compared up to the first difference: from then on the two runs have other weights."
    )
    return [
        Lines(
            "differences",
            "proof",
            "Differences",
            says,
            Axis("step"),
            Axis("of what is allowed", "times", log=True),
            series,
            marks,
        )
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
