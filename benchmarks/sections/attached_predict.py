"""What `lockstep predict` makes of attached runs: steps of held-out scripts, predicted from what was seen and then measured.

From one process: two ranks, and two passes a step. From two ranks: one rank. Each script is attached anew for every prediction and every
measurement, in turns. More ranks than cores are not asked about: they would be on another host.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from typing import Any, NamedTuple

from benchmarks import parts
from benchmarks.attached.launch import SCRIPTS, Attached
from benchmarks.processes import ContenderFailed
from benchmarks.record import Measurement, Section, compare
from benchmarks.settings import Settings


class Question(NamedTuple):
    """What is seen, and what is asked about it."""

    seen: int
    ranks: int
    passes: int = 1

    @property
    def text(self) -> str:
        passes = f", {self.passes} passes" if self.passes > 1 else ""
        return f"{self.seen} to {self.ranks} rank{'s' if self.ranks > 1 else ''}{passes}"


QUESTIONS = (Question(1, 2), Question(1, 1, 2), Question(1, 2, 2), Question(2, 1))


def measure(settings: Settings) -> Section:
    """A share of 102 % means that the script took 2 % less than predicted."""
    title = "Steps of attached scripts, predicted from other runs of them"
    section = Section("attached-predict", title, "step", "milliseconds", [])
    kinds = list(SCRIPTS)[::2] if settings.quick else list(SCRIPTS)
    rows: list[dict[str, Any]] = []
    for number in range(1, settings.repeats + 1):
        for kind in kinds:
            part = f"{kind}, {number}"
            found = parts.kept("attached-predict", part, partial(_round, kind))
            if "failed" in found:
                section.refuse(f"{part} failed: {found['failed']}")
                continue
            for row in found["rows"]:
                rows.append({**row, "kind": kind, "round": number})
    for row in rows:
        for words in ("predicted", "measured"):
            name = f"{row['kind']}, {row['text']}, {words}"
            order = len(section.measurements) + 1
            section.measurements.append(Measurement(order, row["round"], name, 1, row[f"{words}_ms"] / 1e3, 0.0))
    for name in dict.fromkeys(f"{row['kind']}, {row['text']}" for row in rows):
        if one := compare(section.measurements, f"{name}, predicted", f"{name}, measured", "share"):
            section.comparisons.append(one)
    for question in QUESTIONS:
        mine = [row for row in rows if row["text"] == question.text]
        if mine:
            errors = [abs(row["measured_ms"] / row["predicted_ms"] - 1) for row in mine]
            held = sum(row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in mine)
            section.notes.append(
                f"{question.text}: {len(mine)} predictions, median error {statistics.median(errors):.1%}, worst {max(errors):.1%}; "
                f"the range held in {held}."
            )
    section.notes.append("An error is (measured - predicted) / predicted, of each prediction by itself.")
    return section


def _round(kind: str) -> dict[str, Any]:
    """All questions about one script, one after the other."""
    try:
        rows = [_asked(kind, question) for question in QUESTIONS]
    except ContenderFailed as error:
        return {"failed": str(error)}
    return {"rows": rows}


def _asked(kind: str, question: Question) -> dict[str, Any]:
    words = [f"accumulation={question.passes}"] if question.passes > 1 else []
    with Attached(kind, question.seen) as seen:
        row = seen.predicted(question.ranks, *words)
    with Attached(kind, question.ranks, question.passes) as real:
        measured = real.step_ms
    low, high = row["interval_ms"]
    print(
        f"[attached-predict] {kind}, {question.text}: {row['step_ms']:.3g} ({low:.3g} to {high:.3g}), measured {measured:.3g}",
        file=sys.stderr,
        flush=True,
    )
    return {
        "text": question.text,
        "predicted_ms": row["step_ms"],
        "low_ms": low,
        "high_ms": high,
        "measured_ms": measured,
    }
