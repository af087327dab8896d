"""Explain: one analyzer per question. Each answers with verdict, why (a number) and next step, from measurements only.

May import study/, verify/ and what is below them. Its door is `explain`, with the table `ANALYZERS`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from lockstep.errors import InputError
from lockstep.explain import (
    accuracy,
    attached,
    limits,
    outside,
    overfitting,
    overlap,
    precision,
    recommend,
    speedup,
    starved,
    step,
    straggler,
)
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Analyzer, Finding
from lockstep.offered import Offer, offers
from lockstep.plugins import one_line

ANALYZERS = (
    Analyzer(
        "machine",
        "Did the run have its cores?",
        "Processor time that it used, divided by that and what its threads could have used while others did.",
        starved.answer,
    ),
    Analyzer(
        "step",
        "Where does a step go?",
        "The mean time of each phase over the steps after warm-up; waiting is a rank's exchange beyond that of the rank that came last.",
        step.answer,
    ),
    Analyzer(
        "speed-up",
        "Why are N ranks not N times faster?",
        "Differences between contenders that take the same step in turns, each of which adds one cause.",
        speedup.answer,
    ),
    Analyzer(
        "overlap",
        "How much of the exchange is hidden?",
        "Time spent computing while exchanging, divided by time spent exchanging.",
        overlap.answer,
    ),
    Analyzer(
        "straggler",
        "Is a rank slow?",
        "The time that each rank works in a step, beside the others'; all of them wait for the longest.",
        straggler.answer,
    ),
    Analyzer(
        "limits",
        "Is it the loader, the batch, the threads, the buckets?",
        "The same step without a loader, with twice the batch, with fewer threads and with large buckets, measured in turns.",
        limits.answer,
    ),
    Analyzer(
        "outside",
        "What else does the run do?",
        "The time between steps (evaluation, logging, checkpoints), and within them beside their phases.",
        outside.answer,
    ),
    Analyzer(
        "script",
        "What does the script do that costs time, or changes what is learned?",
        "What the hooks of an attached command have seen it do, and the time of the part of a step that it is in.",
        attached.answer,
    ),
    Analyzer(
        "accuracy",
        "Did the distribution change the accuracy, or the recipe?",
        "A checklist of everything that could change the result with the number of ranks, each with its evidence.",
        accuracy.answer,
        timed=False,
    ),
    Analyzer(
        "overfitting",
        "Is it overfitting, and since when?",
        "The rise of the test loss after its minimum, against its own jitter from epoch to epoch.",
        overfitting.answer,
        timed=False,
    ),
    Analyzer(
        "precision",
        "Is mixed precision worth it here?",
        "The same recipe and placement in both number formats, paired by seed.",
        precision.answer,
    ),
    Analyzer(
        "recommendation",
        "Which backend, how many ranks, which batch?",
        "The least training time to the accuracy asked for, of all settings that were run on this task.",
        recommend.answer,
    ),
)


def analyzers() -> tuple[Analyzer, ...]:
    """Ours, and those that other packages offer (docs/extending.md)."""
    ours = {each.name for each in ANALYZERS}
    return (*ANALYZERS, *(_offered(offer) for offer in offers("analyzer") if offer.name not in ours))


def _offered(offer: Offer) -> Analyzer:
    """An analyzer of another package. Where it fails, that is what it found: the others still have their say."""

    def answer(evidence: Evidence) -> Iterator[Finding]:
        try:
            found = offer.load()()
            if not isinstance(found, Analyzer):
                raise InputError(f"{offer.why}: expected a function that returns a lockstep.explain.finding.Analyzer")
            # Whether they can be written down shows now, not where they are written.
            yield from msgspec.convert(msgspec.to_builtins(list(found.answer(evidence))), list[Finding])
        except Exception as error:  # another package's code may raise anything
            why = str(error) if isinstance(error, InputError) else f"{offer.why}: {one_line(error)}"
            yield Finding(verdict=f"the analyzer '{offer.name}' failed", why=why, next=f"update {offer.package}")

    return Analyzer(offer.name, f"What does '{offer.name}' say?", f"By the package {offer.package}.", answer)


def explain(evidence: Evidence, questions: tuple[str, ...] = ()) -> list[Finding]:
    """All findings: what changes what is learned, a starved machine, what inflates the others, then the costliest first; among those that
    cost nothing, in the order of the questions."""
    chosen = [each for each in analyzers() if not questions or each.name in questions]
    starving = bool(list(starved.answer(evidence)))
    found = [
        replace(
            starved.doubted(finding) if starving and each.timed and not finding.wrong else finding, question=each.name
        )
        for each in chosen
        for finding in each.answer(evidence)
    ]
    return sorted(
        found,
        key=lambda finding: (not finding.wrong, finding.question != "machine", not finding.inflates, -finding.cost),
    )
