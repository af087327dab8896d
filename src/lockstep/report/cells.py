"""The comparison as a table: a row for each cell, intervals, verdicts, and what was published beside what was measured."""

from __future__ import annotations

from typing import Any

from lockstep.report.subject import Subject
from lockstep.report.units import span, text
from lockstep.report.views import Cell, Claim, Published, Said, Table
from lockstep.study.measures import METRICS

Document = dict[str, Any]
SETTLED = ("faster", "slower", "better", "worse", "higher", "lower")


def table(subject: Subject) -> Table | None:
    """Every cell; of a single run there is nothing to compare."""
    document = subject.comparison
    if len(document["cells"]) < 2:
        return None
    metrics, sources = document["metrics"], document.get("published", [])
    labels = [METRICS[metric].title(document["target_accuracy"]) for metric in metrics]
    published = [f"published, {source['source'].partition(':')[0]}" for source in sources]
    columns = ["cell", "runs", "speed-up", "efficiency", *labels, *published]
    rows = [_row(cell, metrics, sources) for cell in document["cells"]]
    return Table(
        id="cells",
        title="Comparison",
        says=f"Middle of each cell's runs with its 95 % interval; below it the ratio or difference to '{document['baseline']}', pair by pair, with "
        f"its interval: {document['family']}. Grey: no difference that counts. '7 to 40 more': so many more repeats would settle it, if the "
        "machine stays as noisy: 7 if the difference is as large as it looks, 40 whatever it is.",
        columns=columns,
        rows=rows,
        right=list(range(1, len(labels) + 4)),
    )


def _row(cell: Document, metrics: list[str], sources: list[Document]) -> list[Cell]:
    trouble = cell["left_out"] or "; ".join(cell["failed"])
    head = Cell(
        text=cell["cell"], notes=[f"{'left out' if cell['left_out'] else 'failed'}: {trouble}"] if trouble else []
    )
    counts = Cell(text=f"{cell['done']}/{cell['planned']}", value=cell["done"])
    speed, efficiency = cell.get("speed_up"), cell.get("efficiency")
    return [
        head,
        counts,
        Cell(text=text(speed, "times"), value=speed),
        Cell(text="–" if efficiency is None else f"{efficiency:.0%}", value=efficiency),
        *(_figure(metric, cell["metrics"].get(metric)) for metric in metrics),
        *(Cell(text=source["figures"].get(cell["cell"], "")) for source in sources),
    ]


def _figure(metric: str, column: Document | None) -> Cell:
    if not column or not column["n"]:
        return Cell(text="–")
    against = column.get("against_baseline")
    compared = [effect(metric, against), verdict(against)] if against else ["baseline"]
    missed = f"reached in {column['n'] - column['missed']} of {column['n']} runs" if column["missed"] else ""
    return Cell(
        text=span(column["median"], column["low"], column["high"], METRICS[metric].unit),
        value=column["median"],
        notes=[note for note in (missed, *compared) if note],
        faint=against is not None and against["verdict"] in ("not significant", "too few", "the same"),
    )


def verdict(against: Document) -> str:
    """The verdict, and how many more repeats would settle what it could not."""
    if against["verdict"] == "not significant" and against["more"]:
        few, most = against["more"]
        return f"not significant, {most if few == most else f'{few} to {most}'} more"
    return "too few pairs" if against["verdict"] == "too few" else str(against["verdict"])


def effect(metric: str, against: Document) -> str:
    """0.625× (0.601–0.648), or +0.31 points (−0.12 to +0.74)."""
    if against["effect"] is None:
        return ""
    if METRICS[metric].kind not in ("accuracy", "loss"):
        return _ratio(against["effect"], against["low"], against["high"])
    between = "" if against["low"] is None else f" ({_points(against['low'])} to {_points(against['high'])})"
    return f"{_points(against['effect'])} points{between}"


def _ratio(effect: float, low: float | None, high: float | None) -> str:
    """As many places as the interval bears."""
    if low is None or high is None:
        return f"{effect:.2f}×"
    places = 2 if high - low > 0.1 else 3
    return f"{effect:.{places}f}× ({low:.{places}f}–{high:.{places}f})"


def _points(value: float) -> str:
    return f"{100 * value:+.2f}".replace("-", "−")


def published(subject: Subject) -> list[Published]:
    """What reports claim, beside what came out here."""
    found = subject.comparison.get("published", [])
    stated = subject.study.read().study.published if subject.study else []
    return [
        Published(
            source=source["source"],
            claims=[_claim(claim, one.metric) for claim, one in zip(source["claims"], own.claims, strict=True)],
        )
        for source, own in zip(found, stated, strict=True)
    ]


def _claim(claim: Document, metric: str) -> Claim:
    """Accuracies are compared by their difference, all else by its ratio."""
    theirs = None if claim["published_ratio"] is None else f"published {text(claim['published_ratio'], 'times')}"
    ours = None
    if claim["ours"] is not None:
        ours = f"here {effect(metric, {'effect': claim['ours'], 'low': claim['low'], 'high': claim['high']})}"
    return Claim(
        text=claim["text"],
        verdict=claim["verdict"],
        figures=", ".join(part for part in (theirs, ours) if part),
        why=claim["why"] if claim["verdict"] in ("differs", "not settled") else "",
    )


def headlines(subject: Subject) -> list[Said]:
    """What a comparison comes to: for each cell, in what it differs from the baseline for certain."""
    document = subject.comparison
    if len(document["cells"]) < 2:
        return []
    found = []
    for cell in document["cells"]:
        against = {m: c["against_baseline"] for m, c in cell["metrics"].items() if c.get("against_baseline")}
        certain = {m: a for m, a in against.items() if a["verdict"] in SETTLED}
        if certain:
            # Two words for one thing: the ratio of speeds is that of times turned over.
            certain = {m: a for m, a in certain.items() if m != "images_per_second" or "seconds" not in certain}
            said = "; ".join(
                f"{METRICS[m].title(document['target_accuracy'])} {a['verdict']}, {effect(m, a)}"
                for m, a in certain.items()
            )
            found.append(Said(question="comparison", verdict=f"{cell['cell']}: {said}"))
    open_ones = [c["cell"] for c in document["cells"] if _nothing_settled(c)]
    if open_ones:
        names = ", ".join(f"'{name}'" for name in open_ones[:4]) + (
            f" and {len(open_ones) - 4} more" if len(open_ones) > 4 else ""
        )
        found.append(
            Said(
                question="comparison",
                verdict=f"no difference to '{document['baseline']}' can be told for {names}",
                next="repeat them: the table says how many more repeats would settle each figure, where that can be known",
            )
        )
    for cell in document["cells"]:
        found += [
            Said(question="failed", verdict=f"{cell['cell']} failed", why=failure) for failure in cell["failed"][:2]
        ]
    return found


def _nothing_settled(cell: Document) -> bool:
    verdicts = [c["against_baseline"]["verdict"] for c in cell["metrics"].values() if c.get("against_baseline")]
    return bool(verdicts) and not any(verdict in (*SETTLED, "the same") for verdict in verdicts)
