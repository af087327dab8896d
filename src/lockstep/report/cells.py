"""The comparison as a table: a row for each cell, intervals, verdicts, and what was published beside what was measured."""

from __future__ import annotations

from typing import Any

from lockstep.metrics import metric_of
from lockstep.report import doubt
from lockstep.report.subject import Subject
from lockstep.report.views import Cell, Claim, Published, Table
from lockstep.units import text

Document = dict[str, Any]
MOST_BARS = 3


def table(subject: Subject) -> Table | None:
    """Every cell; of a single run there is nothing to compare."""
    document = subject.comparison
    if subject.kind == "run":
        return None
    metrics, sources = document["metrics"], document.get("published", [])
    labels = [metric_of(metric).title(document["target_accuracy"]) for metric in metrics]
    published = [f"published ({source['source'].partition(':')[0]})" for source in sources]
    # Where nothing is asked about time, runs were made with no thought of it.
    speeds = ["speed-up"] if not all(metric_of(metric).learned for metric in metrics) else []
    speeds += ["efficiency"] if speeds and any(cell.get("efficiency") is not None for cell in document["cells"]) else []
    columns = ["cell", "runs", *labels, *speeds, *published]
    starved = bool(document["stability"].get("starved"))
    rows = [_row(cell, metrics, speeds, sources, starved) for cell in document["cells"]]
    first, last = 2, 2 + len(metrics)
    beyond = last + len(speeds)
    # The rate says what the time says.
    rate = [first + metrics.index("images_per_second")] if {"seconds", "images_per_second"} <= {*metrics} else []
    return Table(
        id="cells",
        title="Comparison",
        says=_says(document),
        columns=columns,
        rows=rows,
        right=list(range(1, beyond)),
        spare=[*range(beyond, len(columns)), *range(last + 1, beyond), *rate, 1, *range(last, beyond)[:1]],
        bars=list(range(first, last))[:MOST_BARS],
        below=doubt.note(rows, starved),
    )


def _says(document: Document) -> str:
    """What stands in the cells, as far as it stands in any."""
    compared = [
        against
        for cell in document["cells"]
        for m in cell["metrics"].values()
        if (against := m.get("against_baseline"))
    ]
    told = ["Median of each cell with its 95 % interval."]
    if compared:
        told.append(
            f"Below it: the ratio or difference to '{document['baseline']}', pair by pair, with its interval; {document['family']}. "
            "Grey: no difference that counts."
        )
    raced = bool(document.get("race"))
    if raced:
        told.append("Time and memory are from turns, by start; accuracies are from trainings, by seed.")
    more = "starts, of an accuracy seeds," if raced else "repeats"
    if any(against["verdict"] == "not significant" and (against["more"] or (0, 0))[1] for against in compared):
        told.append(
            f"'7 to 40 more': 7 more {more} would settle it if the difference is as large as it looks, 40 whatever it is, "
            "on a machine as noisy as this."
        )
    return " ".join(told)


def effects(subject: Subject) -> Table | None:
    """Of a factorial study: what each factor does, and how factors change each other's effect."""
    found = subject.comparison.get("effects") or []
    starved = bool(subject.comparison["stability"].get("starved"))
    rows = [
        [
            Cell(metric_of(one["metric"]).title(subject.comparison["target_accuracy"])),
            Cell(one["factor"]),
            Cell(one["level"]),
            Cell(one["text"], one["effect"]),
            Cell(_of_times(one["metric"], one["verdict"], starved), faint=one["verdict"] == "not settled"),
        ]
        for one in found
    ]
    if not rows:
        return None
    return Table(
        id="effects",
        title="What each factor does",
        says="Each factor's effect, averaged over the other factors; of two factors: how much the effect of one changes with the other. "
        "Intervals hold for all rows of a metric together at 95 %.",
        columns=["metric", "factor", "level", "effect", "verdict"],
        rows=rows,
        right=[3],
        spare=[],
        below=doubt.note(rows, starved),
    )


def _row(cell: Document, metrics: list[str], speeds: list[str], sources: list[Document], starved: bool) -> list[Cell]:
    trouble = ["left out"] if cell["left_out"] else [f"{len(cell['failed'])} failed"] if cell["failed"] else []
    head = Cell(text=cell["cell"], notes=trouble)
    counts = Cell(text=f"{cell['done']}/{cell['planned']}", value=cell["done"])
    speed, efficiency = cell.get("speed_up"), cell.get("efficiency")
    compared = starved and any(column.get("against_baseline") for column in cell["metrics"].values())
    by_speed = [
        Cell(text=doubt.doubted(text(speed, "times"), compared), value=speed),
        Cell(text="–" if efficiency is None else doubt.doubted(f"{efficiency:.0%}", compared), value=efficiency),
    ][: len(speeds)]
    return [
        head,
        counts,
        *(_figure(metric, cell["metrics"].get(metric), starved) for metric in metrics),
        *by_speed,
        *(Cell(text=source["figures"].get(cell["cell"], "")) for source in sources),
    ]


def _figure(metric: str, column: Document | None, starved: bool) -> Cell:
    if not column or not column["n"]:
        return Cell(text="–")
    against = column.get("against_baseline")
    compared = [effect(metric, against), _of_times(metric, verdict(against), starved)] if against else ["baseline"]
    missed = f"reached in {column['n'] - column['missed']} of {column['n']} runs" if column["missed"] else ""
    return Cell(
        text=metric_of(metric).text(column["median"], column["low"], column["high"], column["n"]),
        value=column["median"],
        notes=[note for note in (missed, *compared) if note],
        faint=against is not None and against["verdict"] in ("not significant", "too few", "the same"),
    )


def _of_times(metric: str, verdict: str, starved: bool) -> str:
    """What was learned and what was needed do not depend on who else had the machine."""
    return doubt.doubted(verdict, starved and metric_of(metric).timed)


def verdict(against: Document) -> str:
    """The verdict, and how many more repeats would settle what it could not."""
    if against["verdict"] == "not significant":
        few, most = against["more"] or (0, 0)
        return f"not settled, {most if few == most else f'{few} to {most}'} more" if most else "not settled"
    return "too few pairs" if against["verdict"] == "too few" else str(against["verdict"])


def effect(metric: str, against: Document) -> str:
    return metric_of(metric).effect(against["effect"], against["low"], against["high"], against["n"])


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
        ours = f"here {metric_of(metric).effect(claim['ours'], claim['low'], claim['high'], claim['n'])}"
    return Claim(
        text=claim["text"],
        verdict=claim["verdict"],
        figures=", ".join(part for part in (theirs, ours) if part),
        why=reason(claim),
    )


def reason(claim: Document) -> str:
    """Why it came out otherwise: the explanation, and what is known about the difference, where there is one."""
    parts = {"differs": (claim["why"], claim["known"]), "not settled": (claim["why"],)}.get(claim["verdict"], ())
    return "; ".join(part for part in parts if part)
