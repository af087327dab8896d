"""Write docs/studies/*.md from the packs beside them: `.venv/bin/python docs/study_pages.py`, or with a folder of runs to pack its studies first.

docs/studies/batch-size.study.zip    lockstep study pack batch-size --no-steps
docs/studies/batch-size.md           written from it
docs/studies/pictures/*.svg          its plots, as the report draws them
docs/studies/README.md               the claims of all of them, counted
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.explain import overfitting
from lockstep.metrics import METRICS, RECORDED
from lockstep.report.answers import ANSWER, answers
from lockstep.report.cells import effect, reason
from lockstep.report.cells import verdict as short_verdict
from lockstep.report.document import part
from lockstep.report.latex import file_name
from lockstep.report.subject import of_study as of_study_folder
from lockstep.report.vega import files
from lockstep.report.views import AnyChart, Said
from lockstep.study.compare import study_document
from lockstep.study.definition import PublishedEpoch
from lockstep.study.folder import StudyFolder, list_studies
from lockstep.study.gather import Group, of_study
from lockstep.study.pack import ENDING, pack
from lockstep.study.unpack import unpack
from lockstep.units import clock, counted

HERE = Path(__file__).parent / "studies"
PICTURES = HERE / "pictures"
HEAD = """# The published experiments, with our figures

Each study was run for real: its cells raced in turns, its recipes were trained to their end, and
its claims were judged by both ([how a study works](../studies.md)). Documents A to D are
[four published course reports](../published-recipes.md#the-four-documents). A published figure is
compared by its shape (which cell has more, and by what ratio), never in seconds. Each page is
written by `docs/study_pages.py` from the pack beside it, which `lockstep study unpack` reads on any
machine.
"""
FOOT = """
## Every table of the reports

| report | its table | ours |
|---|---|---|
| A | one and two GPUs, batch 32 and 256; the curve by epoch; batch norm, dropout, early stopping | [cifar](cifar.md) |
| A | mixed precision | `lockstep study run precision` ([precision](../precision.md)) |
| A0 | five regularizers | `lockstep study run regularization` ([regularization](../regularization.md)) |
| A | which collective works on which backend | [comms](../comms.md#capabilities) |
| A, B, C, D | backends | [backends](backends.md) |
| B | launchers; batch sizes; accumulation; optimizers | [launchers](launchers.md), [batch-size](batch-size.md), [accumulation](accumulation.md), [optimizers](optimizers.md) |
| C | the fused kernel, forward and backward | [fused-kernel](fused-kernel.md) |
| C | CIFAR-10 with augmentation | `lockstep study run augmentation` ([augmentation](../augmentation.md)) |
| C | batch sizes on two GPUs | `lockstep study run augmentation`; on Fashion-MNIST: [batch-size](batch-size.md) |
| D | nodes x cores: time, accuracy | [topology](topology.md), [scaling](scaling.md); what it leaves open: [d-open-settings](d-open-settings.md) |
| D | quantization-aware training; sizes, inference and memory of int8 | [quantization](quantization.md) |
"""
# Where what a study is about speaks of one of them.
LETTERED = re.compile(r"\b[Dd]ocuments? [A-D]\b|\b[A-D] had\b")
DOCUMENTS = "(Documents A to D: [four published course reports](../published-recipes.md#the-four-documents).)"


class Note(NamedTuple):
    """What the records do not say of themselves."""

    of: tuple[str, ...]
    """How names of the runs begin that it is about, or "race of 861 s": where a pack has none of them any more, it does not apply."""
    text: str


NOTES = {
    "cifar": Note(
        ("20261117-085101-", "20261117-223814-"),
        "The trainings of 2026-11-17 were made before the race, with slower kernels, and the second of them shared the machine with "
        "other work: their accuracies are sound, and a check by them says nothing of the race.",
    ),
    "optimizers": Note(
        ("race of 861 s",),
        "Another learning rate does not change what a step computes, so the 1 to 1.5 % that cells with a rate of their own take longer "
        "are not explained by it. All starts of this race were made in the order of the table; races draw that order now.",
    ),
    "fused-kernel": Note(
        ("20261118-",),
        "The trainings of 2026-11-18 were made beside other work; windows beside them were without cores, and do not count in the check.",
    ),
}
# What a page shows of a report's plots, by the start of their ids: time, accuracy and where a step goes.
PLOTS = ("seconds-by-", "accuracy-by-", "step")
# And beside a published learning curve.
CURVES = ("accuracy", "loss")
WORDS = ("agrees", "differs", "not settled", "not measured here")


def main(runs: Path | None) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob("*.svg"):
        old.unlink()
    for folder in list_studies(runs) if runs else []:
        pack(folder, HERE / f"{folder.name}{ENDING}", steps=False)
    rows = []
    for file in sorted(HERE.glob(f"*{ENDING}")):
        with tempfile.TemporaryDirectory() as place:
            folder = StudyFolder(Path(unpack(file, Path(place)).folder))
            document = study_document(folder)
            (HERE / f"{folder.name}.md").write_text(page(folder, document))
            rows.append(row(folder.name, document))
    (HERE / "README.md").write_text("\n".join([HEAD, *table(rows), FOOT]))


def row(name: str, document: dict[str, Any]) -> dict[str, Any]:
    verdicts = Counter(claim["verdict"] for published in document["published"] for claim in published["claims"])
    race, check = document["race"] or {}, document["check"]
    return {
        "study": f"[{name}]({name}.md)",
        "cells": len(document["cells"]),
        "trainings": len({run for cell in document["cells"] for run in cell["runs"]}),
        "race": clock(race["seconds"]) if race else "–",
        "whole training off by": f"{check['median']:.1%}" if check else "–",
        **{word: verdicts[word] for word in WORDS},
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["No study is packed yet."]
    total = {word: sum(row[word] for row in rows) for word in WORDS}
    rows = [*rows, {**dict.fromkeys(rows[0], ""), "study": "all", **total}]
    lines = [list(rows[0]), ["---"] + ["---:"] * (len(rows[0]) - 1), *([str(v) for v in row.values()] for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def page(folder: StudyFolder, document: dict[str, Any]) -> str:
    groups = of_study(folder, folder.read())
    spec = next(group for group in groups if group.measured).spec
    made = (
        f"{spec.recipe.model} on {spec.recipe.data}, {spec.plan.train_samples:,} images, {counted(spec.recipe.epochs, 'epoch')}; "
        f"{machines(groups)}."
    )
    subject = of_study_folder(folder)
    told = [said for said in answers(subject) if said.question == ANSWER]
    charts = {chart.id: chart for chart in part(subject).charts}
    # Where all cells share their trainings, their accuracies are one value.
    trained = len({tuple(cell["runs"]) for cell in document["cells"] if cell["runs"]})
    plots = PLOTS if trained > 1 else tuple(id_ for id_ in PLOTS if id_ != "accuracy-by-")
    lines = [
        f"# {folder.name}\n",
        *sentences(told),
        "",
        *pictures(folder.name, [chart for id_, chart in charts.items() if id_.startswith(plots)]),
        str(document["about"]),
        *([DOCUMENTS] if document["published"] or LETTERED.search(document["about"]) else []),
    ]
    lines += ["", made, "", *cells_table(document), ""]
    lines += [f"- {text}" for text in measured(document, groups)]
    for cell in document["cells"]:
        if cell["left_out"]:
            lines.append(f"- Left out, `{cell['cell']}`: {cell['left_out']}")
        lines += [f"- Failed, `{cell['cell']}`: {failure}" for failure in cell["failed"]]
    lines += [f"- {text}" for text in (*document["fairness"], *note(folder.name, document))]
    if document["effects"]:
        lines += ["", "## What each factor does", "", *effects_table(document), ""]
    for published, stated in zip(document["published"], folder.read().study.published, strict=True):
        lines += claims(published, [claim.metric for claim in stated.claims])
        for group in groups:
            if group.name in stated.curves and group.done:
                lines += curve(group, stated.curves[group.name])
                lines += ["", *pictures(folder.name, [charts[id_] for id_ in CURVES if id_ in charts])]
    lines += deployed(folder.name)
    lines += ["", f"    lockstep study unpack docs/studies/{folder.name}{ENDING}", f"    lockstep report {folder.name}"]
    return "\n".join(part for line in lines for part in wrapped(line)) + "\n"


def machines(groups: list[Group]) -> str:
    """All that the pack's race and its trainings were made on, once where that is the same."""

    def words(seen: dict[str, Any], cores: str) -> str:
        return f"{seen.get(cores)} cores of an {seen.get('cpu')}, torch {seen.get('torch')}, Lockstep {seen.get('lockstep')}"

    state = next((group.time.race.state for group in groups if group.time), None)
    raced = words(state.machine, "cores") if state and state.machine else ""
    samples = [each.run.environment() for group in groups for each in group.done]
    trained = list(dict.fromkeys(words(environment, "cores_machine") for environment in samples))
    if len({raced, *trained} - {""}) <= 1:
        return raced or trained[0]
    return "; ".join([*([f"raced on {raced}"] if raced else []), f"trained on {'; and on '.join(trained)}"])


def note(study: str, document: dict[str, Any]) -> list[str]:
    found = [run for cell in document["cells"] for run in cell["runs"]]
    found += [f"race of {document['race']['seconds']:.0f} s"] if document["race"] else []
    known = NOTES.get(study)
    return [known.text] if known and any(each.startswith(known.of) for each in found) else []


def pictures(study: str, charts: list[AnyChart]) -> list[str]:
    lines = []
    for chart in charts:
        name = f"{study}-{file_name(chart.id)}.svg"
        (PICTURES / name).write_text(files.svg(chart))
        lines += [f"![{chart.title}]({PICTURES.name}/{name})", "", chart.says, ""]
    return lines


def sentences(told: list[Said]) -> list[str]:
    """What it comes to, as every view says it, and why."""
    return [
        line for said in told for line in (f"- **{said.verdict}.**", *([f"  Why: {said.why}."] if said.why else []))
    ]


def measured(document: dict[str, Any], groups: list[Group]) -> list[str]:
    race, check, stability, found = document["race"], document["check"], document["stability"], []
    if race:
        spread = "" if stability["spread"] is None else f", starts of one cell differ by {stability['spread']:.1%}"
        found.append(
            f"Time and memory: up to {counted(race['starts'], 'start')} of a cell, {counted(race['rounds'], 'round')}, "
            f"{clock(race['seconds'])}; {race['disturbed']} of them disturbed, and taken again. The machine was {stability['verdict']}{spread}."
        )
    seeds = [len({each.seed for each in group.done}) for group in groups if group.done]
    if seeds:
        least, most = min(seeds), max(seeds)
        seeds_text = counted(most, "seed") if least == most else f"{least} to {most} seeds"
        found.append(f"Accuracy: {seeds_text} of each recipe.")
    if check and check.get("starved"):
        found.append(
            f"Not in the check below: {counted(check['starved'], 'training')} that had to share the cores with other work."
        )
    if check:
        signed = statistics.median(one["off"] for one in check["runs"])
        when = "right before and after it" if check["beside"] else "in the race"
        found.append(
            f"Check: {counted(check['n'], 'whole training')} took {abs(signed):.1%} {'more' if signed > 0 else 'less'} than their steps and "
            f"evaluations come to, as timed {when} (median; the worst was off by {check['worst']:.1%})."
        )
    return found


def cells_table(document: dict[str, Any]) -> list[str]:
    metrics = document["metrics"]
    labels = [METRICS[metric].title(document["target_accuracy"]) for metric in metrics]
    timed = any(METRICS[metric].by_ratio for metric in metrics)
    rows = [["cell", "n", *labels, *["speed-up"] * timed], ["---", *["---:"] * (len(labels) + 1 + timed)]]
    for cell in document["cells"]:
        if cell["metrics"]:
            figures = [figure(metric, cell["metrics"].get(metric)) for metric in metrics]
            speed = "–" if cell.get("speed_up") is None else f"{cell['speed_up']:.2f}"
            rows.append([f"`{cell['cell']}`", str(cell["done"]), *figures, *[speed] * timed])
    return [f"| {' | '.join(row)} |" for row in rows]


def figure(metric: str, column: dict[str, Any] | None) -> str:
    """The value, and what it is beside the baseline."""
    if not column or not column["n"]:
        return "–"
    text = METRICS[metric].text(column["median"], column["low"], column["high"], column["n"])
    against = column.get("against_baseline")
    if not against:
        return text
    return f"{text}<br>{effect(metric, against)} *{short_verdict(against)}*"


def effects_table(document: dict[str, Any]) -> list[str]:
    target = document["target_accuracy"]
    rows = [["metric", "factor", "level", "effect", "verdict"], ["---"] * 5]
    for one in document["effects"]:
        rows.append([METRICS[one["metric"]].title(target), one["factor"], one["level"], one["text"], one["verdict"]])
    return [f"| {' | '.join(row)} |" for row in rows]


def claims(published: dict[str, Any], metrics: list[str]) -> list[str]:
    document, _, about = published["source"].partition(": ")
    lines = ["", f"## Published by {document}", "", *([f"{about[0].upper()}{about[1:]}.", ""] if about else [])]
    lines += [f"- `{cell}`: {text}" for cell, text in published["figures"].items()]
    lines += ["", "| claim | published | here | |", "|---|---:|---:|---|"]
    for claim, metric in zip(published["claims"], metrics, strict=True):
        theirs = "" if claim["published_ratio"] is None else f"{claim['published_ratio']:.2f}×"
        ours = METRICS[metric].effect(claim["ours"], claim["low"], claim["high"], claim["n"])
        why = f": {found}" if (found := reason(claim)) else ""
        lines.append(f"| {claim['text']} | {theirs} | {ours} | **{claim['verdict']}**{why} |")
    return lines


def deployed(name: str) -> list[str]:
    """What `lockstep quantize --measure --profile --json` found of the same net, where that was kept beside the pack."""
    file = HERE / f"{name}.deployed.json"
    if not file.exists():
        return []
    document = json.loads(file.read_text())
    rows = [[row["what"], row["published"], row["ours"]] for row in document["published"]]
    return [
        "",
        "## The int8 model: sizes, inference, memory",
        "",
        "    lockstep run published/d-mnist quantize=qat",
        "    lockstep quantize last --method qat --engine qnnpack --measure --profile",
        "",
        *(f"| {' | '.join(row)} |" for row in [["what", "published", "here"], ["---"] * 3, *rows]),
    ]


def curve(group: Group, published: list[PublishedEpoch]) -> list[str]:
    """A published learning curve beside ours, epoch by epoch, and since when each of the two overfits."""
    names = ("train_accuracy", "test_accuracy", "test_loss")
    theirs = {each.epoch: each for each in published}
    ours: dict[int, list[dict[str, Any]]] = {}
    for each in group.done:
        for epoch in each.run.epochs():
            ours.setdefault(int(epoch["epoch"]), []).append(epoch)
    means = {
        epoch: {name: statistics.fmean(one[name] for one in found) for name in names} for epoch, found in ours.items()
    }
    heads = [f"{name.replace('_', ' ')}, {whose}" for name in names for whose in ("published", "here")]
    rows = [["epoch", *heads], ["---:"] * (1 + len(heads))]
    for epoch in sorted({*theirs, *means}):
        cells = [
            "–" if found is None else RECORDED[name].text(found)
            for name in names
            for found in (getattr(theirs.get(epoch), name, None), means.get(epoch, {}).get(name))
        ]
        rows.append([str(epoch), *cells])
    known = {each.epoch: each.test_loss for each in published if each.test_loss is not None}
    return [
        "",
        f"### `{group.name}`, epoch by epoch",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"Overfitting, by the test loss: published {since(known)}; here {since({e: m['test_loss'] for e, m in sorted(means.items())})}.",
    ]


def since(losses: dict[int, float]) -> str:
    """The epoch of the least test loss, where it rose after it by more than it jitters."""
    curve = list(losses.values())
    if len(curve) < overfitting.FEWEST_EPOCHS:
        return "too few epochs to say"
    rise, jitter, sure = overfitting.rose(curve)
    best = list(losses)[overfitting.turning_point(curve)]
    rose = f"it rose by {rise:.3f} after epoch {best}, and jitters by {jitter:.3f}"
    return f"since epoch {best} ({rose})" if sure else f"not to be told ({rose})"


def wrapped(line: str) -> list[str]:
    """Prose in lines of at most 100 characters; a table's rows stay whole."""
    if line.startswith(("|", "    ")) or len(line) <= 100:
        return [line]
    bullet = line[: len(line) - len(line.lstrip(" -"))]
    return textwrap.wrap(line, 100, subsequent_indent=" " * len(bullet), break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
