"""The document of `lockstep quantize` as the rows of tables. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
MOST_OPERATORS = 12


class Table(NamedTuple):
    title: str
    headers: list[str]
    rows: list[list[str]]
    right: Sequence[int] = ()
    """Columns that hold numbers."""


def tables(document: Row) -> Iterator[Table]:
    """All that the document has, in the order in which it is read, but for the layers."""
    if "sensitivity" in document:
        yield sensitivity(document["sensitivity"])
    for name, rows in document.get("operators", {}).items():
        yield operators(name, rows)
    if "timing" in document:
        yield timing(document["timing"])
        yield memory(document["memory"])
    if document["published"]:
        yield published(document["published"])


def layers(rows: list[Row]) -> Table:
    return Table(
        "",
        ["layer", "kind", "parameters", "int8", "input from", "to", "scale", "zero", "why not"],
        [
            [
                row["layer"],
                row["kind"],
                f"{row['parameters']:,}",
                "yes" if row["quantized"] else "–",
                *(_number(row[key]) for key in ("input_low", "input_high", "scale", "zero")),
                row["why"],
            ]
            for row in rows
        ],
        (2, 4, 5, 6, 7),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def sensitivity(rows: list[Row]) -> Table:
    return Table(
        "Only this layer quantized, the one that changes most answers first:",
        ["layer", "accuracy", "points", "loss", "answers as fp32"],
        [
            [
                row["layer"],
                f"{row['accuracy']:.2%}",
                f"{row['points']:+.2f}",
                f"{row['loss']:.4f}",
                f"{row['agreement']:.2%}",
            ]
            for row in rows
        ],
        range(1, 5),
    )


def operators(name: str, rows: list[Row]) -> Table:
    total = sum(row["self_cpu_us"] for row in rows) / 1e3
    return Table(
        f"Operators of {name}, 10 batches of 128, {total:.2f} ms of self CPU in all:",
        ["operator", "self CPU %", "self CPU ms", "CPU total ms", "average µs", "self memory KB", "calls"],
        [
            [
                row["name"],
                f"{row['self_cpu_share']:.1%}",
                f"{row['self_cpu_us'] / 1e3:.2f}",
                f"{row['cpu_total_us'] / 1e3:.2f}",
                f"{row['cpu_total_us'] / max(1, row['calls']):.1f}",
                f"{row['self_cpu_memory_bytes'] / 1e3:,.1f}",
                f"{row['calls']:,}",
            ]
            for row in rows[:MOST_OPERATORS]
        ],
        range(1, 7),
    )


def timing(rows: list[Row]) -> Table:
    return Table(
        "Latency of a batch, and how much faster than eager fp32 (median, 95 % interval, ratio within a round):",
        ["threads", "batch", "route", "ms", "images/s", "times as fast", "rounds"],
        [_failed(row) if "failed" in row else _timed(row) for row in rows],
        (0, 1, 3, 4, 5, 6),
    )


def _timed(row: Row) -> list[str]:
    ends = "" if row["speed_up_low"] is None else f" ({row['speed_up_low']:.2f} to {row['speed_up_high']:.2f})"
    return [
        str(row["threads"]),
        str(row["batch"]),
        row["route"],
        f"{1e3 * row['seconds']:.3g}",
        f"{row['images_per_second']:,.0f}",
        f"{row['speed_up']:.2f}{ends}",
        str(row["rounds"]),
    ]


def _failed(row: Row) -> list[str]:
    return [str(row["threads"]), "", f"{row['route']}: not measured: {row['failed']}", "", "", "", ""]


def memory(rows: list[Row]) -> Table:
    def grown(row: Row) -> str:
        if "failed" in row:
            return f"not measured: {row['failed']}"
        return "unknown" if row["growth_bytes"] is None else f"{row['growth_bytes'] / 1e6:.1f}"

    return Table(
        "Peak growth of resident memory, one thread, after the model was loaded and had answered one image:",
        ["route", "batch", "MB"],
        [[row["route"], str(row["batch"]), grown(row)] for row in rows],
        (1, 2),
    )


def published(rows: list[Row]) -> Table:
    return Table(
        "Document D, one of four published course reports (docs/published-recipes.md), beside this (another machine, engine qnnpack: compare the "
        "ratios; training times: the study 'quantization'):",
        ["what", "published", "ours"],
        [[row["what"], row["published"], row["ours"]] for row in rows],
    )
