"""The findings of `lockstep explain`, for one run of each cell; and what is known of runs that did not end well."""

from __future__ import annotations

from lockstep.explain import analyzers, explain
from lockstep.explain.evidence import Evidence, study_of
from lockstep.explain.finding import Finding
from lockstep.measure.view import RunView
from lockstep.report.subject import Subject
from lockstep.report.views import About, Said
from lockstep.study.gather import Group

MOST_CELLS = 12


def findings(subject: Subject) -> list[About]:
    """Of each cell's first finished run, the costliest first."""
    cells = subject.groups if subject.study else study_of(subject.runs[0]) if subject.kind == "run" else []
    told = [group for group in subject.begun if not group.done or any(each.own for each in group.done)]
    found = [About(name=group.name, findings=_of(group, subject.peers, cells)) for group in told[:MOST_CELLS]]
    return [about for about in found if about.findings]


def definitions() -> dict[str, str]:
    return {each.name: f"{each.question} {each.definition}" for each in analyzers()}


def _of(group: Group, peers: list[RunView], cells: list[Group]) -> list[Said]:
    if not group.done:
        return [_state(group)]
    run = next(each.run for each in group.done if each.own)
    if damaged := run.rank_damage():
        text = "; ".join(damaged)
        return [Said(question="state", verdict="damaged: not explained", why=text, next=f"lockstep show {run.id}")]
    return [said(each) for each in explain(Evidence(run, peers, cells=cells))]


def said(found: Finding) -> Said:
    return Said(
        question=found.question,
        verdict=found.verdict,
        why=found.why,
        next=found.next,
        cost=round(found.cost, 4),
    )


def _state(group: Group) -> Said:
    """Nothing has ended well: say how far it has come."""
    first = group.samples[0]
    epochs = len(first.run.epochs())
    return Said(
        question="state",
        verdict=f"{first.state}: {first.cause}" if first.cause else f"{first.state}, and not ended yet",
        why="its epochs are not known"
        if first.spec.options.attached
        else f"{epochs} of {first.spec.recipe.epochs} epochs are on record",
        next=f"lockstep show {first.run.id}",
    )
