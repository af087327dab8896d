"""One document for everything that shows runs: the page, text and pictures for papers, and whatever comes later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version

import msgspec

from lockstep.measure.records import damage
from lockstep.report import cells, curves, exchange, findings, setup, speed, steps, timeline
from lockstep.report.subject import Subject
from lockstep.report.units import text
from lockstep.report.views import AnyChart, Part, Report
from lockstep.run import DAMAGED


def report(subjects: Sequence[Subject]) -> Report:
    parts = [part(subject) for subject in subjects]
    return Report(
        title=", ".join(each.name for each in parts),
        written=time.time(),
        lockstep=version("lockstep"),
        parts=_with_own_ids(parts),
        definitions=findings.definitions(),
    )


def part(subject: Subject) -> Part:
    rooms = (curves, speed, steps, exchange, timeline)
    charts: list[AnyChart] = [chart for room in rooms for chart in room.charts(subject)]
    differ, same = setup.settings(subject)
    return Part(
        name=subject.name,
        kind=subject.kind,
        about=subject.comparison.get("about", ""),
        facts=run_facts(subject) if subject.kind == "run" else cell_facts(subject),
        headlines=cells.headlines(subject),
        findings=findings.findings(subject),
        notes=[*_damaged(subject), *subject.comparison["fairness"], *_stability(subject)],
        table=cells.table(subject),
        published=cells.published(subject),
        charts=charts,
        settings=differ,
        same=same,
        environment=setup.environment(subject),
        commands=setup.commands(subject),
    )


def _with_own_ids(parts: list[Part]) -> list[Part]:
    """Two parts have plots of the same kind; their files must not have the same name."""
    if len(parts) == 1:
        return parts
    return [
        msgspec.structs.replace(
            part, charts=[msgspec.structs.replace(chart, id=f"{number}-{chart.id}") for chart in part.charts]
        )
        for number, part in enumerate(parts, 1)
    ]


Facts = list[tuple[str, str]]


def run_facts(subject: Subject) -> Facts:
    """The figures that people look for first."""
    sample = subject.groups[0].samples[0]
    spec, summary, placement = sample.spec, sample.summary, sample.spec.placement
    place = f"{placement.hosts} host(s) x {placement.ranks // placement.hosts} rank(s) x {placement.threads} thread(s)"
    known = [growth for growth in summary.get("memory_growth_bytes") or [] if growth is not None]
    found = [
        ("state", sample.state),
        ("model and data", f"{spec.recipe.model} on {spec.recipe.data}"),
        ("placement", f"{place}, {placement.launcher}, {placement.backend}, {placement.strategy}"),
        (
            "global batch",
            f"{spec.plan.global_batch} = {spec.plan.ranks} x {spec.plan.micro_batch} x {spec.plan.accumulation} (ranks, micro batch, accumulation)",
        ),
        ("steps", f"{spec.plan.steps_per_epoch:,} an epoch, {spec.plan.total_steps:,} in all"),
        ("test accuracy", text(summary.get("test_accuracy"), "percent")),
        ("training time", text(summary.get("train_seconds"), "seconds")),
        ("speed", text(summary.get("images_per_second"), "rate")),
        ("memory of a rank", text(max(known), "bytes") if known else "–"),
    ]
    if spec.plan.ranks > 1 and summary.get("ranks_agree") is not None:
        found.append(("weights", "the same on all ranks" if summary["ranks_agree"] else "DIFFERENT between ranks"))
    return [(label, value) for label, value in found if value not in ("–", "")]


def cell_facts(subject: Subject) -> Facts:
    document = subject.comparison
    samples = [each for group in subject.groups for each in group.samples]
    planned = document.get("runs_planned", len(samples))
    spec = samples[0].spec if samples else None
    stability = document["stability"]
    spread = "" if stability["spread"] is None else f", runs of one cell differ by {stability['spread']:.1%}"
    found = [
        ("cells", str(len(subject.groups))),
        ("runs done", f"{sum(each.state == 'done' for each in samples)} of {planned}"),
        ("baseline", document["baseline"] or "–"),
        ("model and data", f"{spec.recipe.model} on {spec.recipe.data}" if spec else "–"),
        ("accuracy that all reached", text(document["target_accuracy"], "percent")),
        ("machine", f"{stability['verdict']}{spread}"),
    ]
    return [(label, value) for label, value in found if value != "–"]


def _damaged(subject: Subject) -> list[str]:
    """What cannot be read, and so is left out: runs as a whole, and files of those that are drawn."""
    whole = [text for group in subject.groups for text in group.unstarted]
    whole += [
        f"{each.run.id} is damaged: {each.cause}" for g in subject.groups for each in g.samples if each.state == DAMAGED
    ]
    drawn = [group.samples[0].run for group in subject.begun]
    return [*whole, *(f"{run.id} is damaged: {text}: left out" for run in drawn for text in damage(run))]


def _stability(subject: Subject) -> list[str]:
    return list(subject.comparison["stability"]["advice"]) if subject.kind != "run" else []
