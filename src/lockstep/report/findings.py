"""The findings of `lockstep explain`, for one run of each cell; and what is known of runs that did not end well."""

from __future__ import annotations

import re

import msgspec

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
    return shared(found, "every cell" if len(told) <= MOST_CELLS else f"the first {MOST_CELLS} cells")


def shared(found: list[About], all_of_them: str = "every cell") -> list[About]:
    """What is found in every cell is said once, with the figures of the cell that it costs most."""
    kinds = [{_kind(said): said for said in about.findings} for about in found]
    everywhere = [
        kind for kind in (kinds[0] if kinds else {}) if len(kinds) > 1 and all(kind in each for each in kinds)
    ]
    told = []
    for kind in everywhere:
        place = max(range(len(found)), key=lambda index: kinds[index][kind].cost)
        said = kinds[place][kind]
        if any(msgspec.structs.replace(each[kind], cost=said.cost) != said for each in kinds):
            why = f"these figures are of '{found[place].name}'" + (f": {said.why}" if said.why else "")
            said = msgspec.structs.replace(said, why=why)
        told.append(said)
    rest = [About(about.name, [said for said in about.findings if _kind(said) not in everywhere]) for about in found]
    return [about for about in (About(all_of_them, told), *rest) if about.findings]


def _kind(said: Said) -> tuple[str, str]:
    """The question and the answer without its figures; but in what to choose the figures are the answer."""
    if said.question == "recommendation":
        return said.question, said.verdict
    return said.question, re.sub(r"[+−-]?\d[\d,.]*(?: ?(?:%|[µm]?s|[kMG]?B)\b)?", "#", said.verdict)


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
