"""Draw the newest results of `make bench` for the pages that speak of them: `.venv/bin/python docs/benchmark_pictures.py` writes
docs/pictures/bench-*.svg, in the style of the report's own plots.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark_figures import newest

from lockstep.report.vega import files
from lockstep.report.views import AnyChart, Axis, Dot, Lines, Point, Points, Scatter, Series

PICTURES = Path(__file__).parent / "pictures"
Comparison = dict[str, Any]
Document = dict[str, Any]
PEERS = {
    "report_loop": "the loop of the reports",
    "tensor_loader": "a DataLoader over tensors",
    "lightning": "Lightning",
    "fabric": "Fabric",
    "accelerate": "Accelerate",
    "tensor_loader+tuned": "that DataLoader, tuned by hand",
}


def main() -> None:
    results = {path.stem[11:]: json.loads(path.read_text(encoding="utf-8")) for path in newest()}
    for name, draw in PLOTS.items():
        (PICTURES / f"bench-{name}.svg").write_text(files.svg(draw(results[name])), encoding="utf-8")


def peers(document: Document) -> Points:
    rows = [(PEERS[one["theirs"]], one) for one in _judged(document) if one["theirs"] in PEERS]
    return _ratios(document, "Lockstep's speed on document D's job, as a multiple of each peer's", rows)


def kernels(document: Document) -> Points:
    """Whole nets: layers are in a table."""
    shown = {"eager": "eager PyTorch", "torch.compile": "torch.compile", "ONNX Runtime": "ONNX Runtime"}
    rows = []
    for one in _judged(document):
        what, _, against = one["theirs"].rpartition(": ")
        if "@" not in what and against in shown:
            rows.append((f"{what}: {shown[against]}", one))
    return _ratios(document, "Speed with our kernels, as a multiple of that without them", rows)


def quantization(document: Document) -> Points:
    shown = ("fp32 eager", "fp32 compiled", "onnx fp32", "onnx int8", "onnx int8 by its own quantizer")
    rows = []
    for one in _judged(document):
        what, _, against = one["theirs"].rpartition(": ")
        if what in ("A's net, 1 thread, batch 32", "D's net, 1 thread, batch 128") and against in shown:
            rows.append((f"{what}: {against}", one))
    return _ratios(document, "Speed of int8, as a multiple of that of other engines", rows)


def slow_link(document: Document) -> Points:
    rows = [(one["ours"], one) for one in _judged(document)]
    return _ratios(document, "Speed over 100 Mbit/s and 20 ms, as a multiple of that of DDP", rows)


def turns(document: Document) -> Lines:
    """Every trial by itself."""
    series = [
        Series(one["ours"], f"c{index}", list(range(1, 1 + len(one["values"]))), [value - 1 for value in one["values"]])
        for index, one in enumerate(_judged(document))
    ]
    return Lines(
        id="turns",
        section="bench",
        title="Planted differences, as each race found them",
        says="",
        x=Axis("race"),
        y=Axis("found", "percent"),
        series=series,
    )


def predict(document: Document) -> Scatter:
    """Every held-out placement: measured and predicted, on the diagonal where both agree."""
    found = {one["contender"]: one["wall_seconds"] for one in document["measurements"]}
    nets = sorted({name.partition(",")[0] for name in found})
    dots = [
        Dot(net, f"c{nets.index(net)}", found[name], found[f"{name.removesuffix(', measured')}, predicted"])
        for name in found
        if name.endswith(", measured")
        for net in [name.partition(",")[0]]
    ]
    axes = [Axis(f"a step, {what}", "seconds", log=True) for what in ("measured", "predicted")]
    return Scatter("predict", "bench", "Predicted and measured steps of held-out placements", "", *axes, Axis(""), dots)


def _judged(document: Document) -> list[Comparison]:
    """Each pair once: by the clock that has the target, else by the wall's."""
    found: dict[tuple[str, str], Comparison] = {}
    for one in sorted(document["comparisons"], key=lambda one: (one["target"] is None, one["clock"] != "wall")):
        found.setdefault((one["ours"], one["theirs"]), one)
    return [found[pair] for pair in dict.fromkeys((one["ours"], one["theirs"]) for one in document["comparisons"])]


def _ratios(document: Document, title: str, rows: Sequence[tuple[str, Comparison]]) -> Points:
    points = [
        Point(name, "c0", one["median"], *(one["interval"] or (None, None)), text=f"{one['median']:.3g}×")
        for name, one in rows
    ]
    return Points(document["section"], "bench", title, "", Axis("speed", "times"), points)


PLOTS: dict[str, Callable[[Document], AnyChart]] = {
    "peers": peers,
    "kernels": kernels,
    "quantization": quantization,
    "slow-link": slow_link,
    "turns": turns,
    "predict": predict,
}

if __name__ == "__main__":
    main()
