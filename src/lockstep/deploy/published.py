"""Document D's figures of its quantized MNIST net, beside ours: the shape is compared, never seconds."""

from __future__ import annotations

from typing import Any

from lockstep.recipe import Recipe

MODEL = "mnist-convnet"
# What D measured its inference with: its test batch.
BATCH, THREADS = 128, 1


def beside(document: dict[str, Any], recipe: Recipe) -> list[dict[str, str]]:
    """One row for each of D's tables that this document has something for; none for other models."""
    if recipe.model != MODEL:
        return []
    accuracy, size = document["accuracy"], document["bytes"]
    rows = [
        _row(
            "test accuracy, fp32 → int8",
            "93.49 → 93.59 % on 2x1, 91.88 → 92.01 % on 2x2 (of two trainings)",
            f"{accuracy['fp32']:.2%} → {accuracy['int8']:.2%} (of one)",
        ),
        _row("checkpoint", "19 KB → 8.7 KB (2.2x)", _sizes(size["fp32"]["file"], size["int8"]["file"])),
        _row("… its weights alone", "not stated", _sizes(size["fp32"]["weights"], size["int8"]["weights"])),
    ]
    found = _latency(document.get("timing", []), document["engine"])
    if found:
        rows.append(_row(f"inference, batch {BATCH}, {THREADS} thread", "not stated so", found))
    if "operators" in document:
        rows += _operators(document["operators"])
    known = {row["route"]: row.get("growth_bytes") for row in document.get("memory", [])}
    ours = known.get(f"int8 {document['engine']}")
    if ours is not None and known.get("fp32 eager") is not None:
        rows.append(_row("resident memory, growth", "not measured", _sizes(known["fp32 eager"], ours)))
    return rows


def _row(what: str, published: str, ours: str) -> dict[str, str]:
    return {"what": what, "published": published, "ours": ours}


def _sizes(before: int, after: int) -> str:
    ratio = f" ({before / after:.2f}x)" if after > 0 else ""
    return f"{before / 1e3:,.1f} KB → {after / 1e3:,.1f} KB{ratio}"


def _latency(timing: list[dict[str, Any]], engine: str) -> str:
    rows = {
        row["route"]: row
        for row in timing
        if "failed" not in row and (row["batch"], row["threads"]) == (BATCH, THREADS)
    }
    ours, theirs = rows.get(f"int8 {engine}"), rows.get("fp32 eager")
    if not ours or not theirs:
        return ""
    return f"{1e3 * theirs['seconds']:.3g} ms → {1e3 * ours['seconds']:.3g} ms ({ours['speed_up']:.2f}x)"


def _operators(tables: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """As D counted: the profiler's sums over all operators."""
    time = {name: sum(row["self_cpu_us"] for row in rows) for name, rows in tables.items()}
    made = {name: sum(max(0, row["self_cpu_memory_bytes"]) for row in rows) / 1e3 for name, rows in tables.items()}
    # Memory that is given back between operators has a row of its own.
    back = {
        name: -sum(row["self_cpu_memory_bytes"] for row in rows if row["name"] == "[memory]") / 1e3
        for name, rows in tables.items()
    }
    ratio = f" ({time['fp32'] / time['int8']:.2f}x)" if time["int8"] else ""
    return [
        _row(
            "inference, self CPU time in the profiler",
            "75.4 ms → 19.3 ms (3.75x to 3.9x)",
            f"{time['fp32'] / 1e3:,.1f} ms → {time['int8'] / 1e3:,.1f} ms{ratio}",
        ),
        _row(
            "self memory in the profiler",
            "4.74 MB → 4.61 KB (it does not see qnnpack give memory back)",
            f"taken {made['fp32']:,.0f} → {made['int8']:,.0f} KB; given back {back['fp32']:,.0f} → {back['int8']:,.0f} KB",
        ),
    ]
