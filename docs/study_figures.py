"""Write docs/study-figures.md from the studies in a folder of runs: `.venv/bin/python docs/study_figures.py RUNS`."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from lockstep.metrics import METRICS
from lockstep.study.compare import study_document
from lockstep.study.folder import StudyFolder, list_studies
from lockstep.study.gather import of_study

HERE = Path(__file__).parent
HEAD = """# The built-in studies, with our figures

Each study was run for real, one run at a time, with its cells in turns. A table shows the number of runs
(n) and, for each metric, the median with its 95 % interval. Verdicts compare a cell with the first row,
pair by pair; those of one metric hold together at 95 %. A published figure is compared by its shape (which
cell has more, and by what ratio), never in seconds. `docs/study_figures.py` writes this page;
[studies.md](studies.md) explains how a study works.
"""


def main(runs: Path) -> None:
    parts = [HEAD]
    for folder in list_studies(runs):
        parts.append(section(folder))
    (HERE / "study-figures.md").write_text("\n".join(parts))


def section(folder: StudyFolder) -> str:
    document = study_document(folder)
    groups = of_study(folder, folder.read())
    sample = next(each for group in groups for each in group.done)
    environment = sample.environment
    recipe = sample.spec.recipe
    quick = folder.name.endswith("-quick")
    name = folder.name.removesuffix("-quick")
    made = (
        f"`lockstep study run {name}{' --quick' if quick else ''}`: {recipe.model} on {recipe.data}, "
        f"{sample.spec.plan.train_samples:,} images, {recipe.epochs} epochs; {environment.get('cores_machine')} cores of an "
        f"{environment.get('cpu')}, torch {environment.get('torch')}."
    )
    lines = [f"\n## {name}\n", str(document["about"]), "", made, "", *table(document), ""]
    stability = document["stability"]
    spread = "" if stability["spread"] is None else f", runs of one cell differ by {stability['spread']:.1%}"
    lines.append(f"- The machine was {stability['verdict']}{spread}.")
    for cell in document["cells"]:
        if cell["left_out"]:
            lines.append(f"- Left out, `{cell['cell']}`: {cell['left_out']}")
        lines += [f"- Failed, `{cell['cell']}`: {failure}" for failure in cell["failed"]]
    lines += [f"- {text}" for text in document["fairness"]]
    for published in document.get("published", []):
        lines += claims(published)
    return "\n".join(part for line in lines for part in wrapped(line)) + "\n"


def wrapped(line: str) -> list[str]:
    """Prose in lines of at most 100 characters; a table's rows stay whole."""
    if line.startswith("|") or len(line) <= 100:
        return [line]
    bullet = line[: len(line) - len(line.lstrip(" -"))]
    return textwrap.wrap(line, 100, subsequent_indent=" " * len(bullet), break_long_words=False, break_on_hyphens=False)


def table(document: dict[str, Any]) -> list[str]:
    metrics = document["metrics"]
    labels = [METRICS[metric].title(document["target_accuracy"]) for metric in metrics]
    rows = [["cell", "n", *labels, "speed-up", "verdict on time", "verdict on accuracy"]]
    rows.append(["---"] * len(rows[0]))
    for cell in document["cells"]:
        if not cell["done"]:
            continue
        rows.append(
            [
                f"`{cell['cell']}`",
                str(cell["done"]),
                *(figure(metric, cell["metrics"].get(metric)) for metric in metrics),
                "–" if cell.get("speed_up") is None else f"{cell['speed_up']:.2f}",
                verdict(cell["metrics"].get("seconds")),
                verdict(cell["metrics"].get("accuracy")),
            ]
        )
    return [f"| {' | '.join(row)} |" for row in rows]


def figure(metric: str, column: dict[str, Any] | None) -> str:
    return METRICS[metric].text(column["median"], column["low"], column["high"]) if column else "–"


def verdict(column: dict[str, Any] | None) -> str:
    against = (column or {}).get("against_baseline")
    return against["text"] if against else "–"


def claims(published: dict[str, Any]) -> list[str]:
    lines = [f"- Published, {published['source']}:"]
    lines += [f"  - `{cell}`: {text}" for cell, text in published["figures"].items()]
    for claim in published["claims"]:
        theirs = "" if claim["published_ratio"] is None else f"published {claim['published_ratio']:.2f}, "
        ours = "" if claim["ours"] is None else f" ({theirs}ours {claim['ours']:.3g})"
        why = f": {claim['why']}" if claim["why"] and claim["verdict"] in ("differs", "not settled") else ""
        lines.append(f"  - **{claim['verdict']}**: {claim['text']}{ours}{why}")
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]))
