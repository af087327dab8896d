"""Did it have its cores? Where it had not, that comes first: every time that other findings speak of has the waiting in it."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.machine import starving
from lockstep.units import percent
from lockstep.ways import BESIDE, spent_in

CAUSE = "neighbour"


def answer(evidence: Evidence) -> Iterator[Finding]:
    """Of the run, and of what was measured beside it."""
    had = evidence.run.cores_had
    if had is not None and starving.starved(had):
        yield _finding(had, starving.sentence(had), "of the processor time that its threads asked for while it trained")
    beside = starving.had(spent_in(evidence.run.folder / BESIDE)) if evidence.ways else None
    if beside is not None and starving.starved(beside):
        what = "of the processor time that was asked for by what --measure timed"
        yield _finding(beside, starving.sentence(beside, "the measurement beside it had", "its"), what)


def _finding(had: float, verdict: str, what: str) -> Finding:
    return Finding(
        verdict=verdict,
        why=f"it got {percent(had)} {what}: for the rest of it they could run and had no processor, while other processes ran",
        next=starving.ADVICE,
        cost=1 - had,
        cause=CAUSE,
        inflates=True,
        figures={"cores_had": had},
    )


def doubted(finding: Finding) -> Finding:
    """A finding about times of a starved run. What blames the other work itself is no less true for it."""
    return finding if finding.cause == CAUSE else replace(finding, why=f"{finding.why}; {starving.DOUBT}")
