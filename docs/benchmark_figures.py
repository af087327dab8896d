"""Write docs/benchmark-figures.md and the tables of the README and docs/kernels.md from benchmarks/results:
`.venv/bin/python docs/benchmark_figures.py`.

The page has the newest result of every section, and tests/test_docs.py holds it and the pages that quote it to the results.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks/results"
PAGE = HERE / "benchmark-figures.md"
README = HERE.parent / "README.md"
KERNELS = HERE / "kernels.md"
END = "<!-- written by docs/benchmark_figures.py -->"
# Speed at a glance: section, ours, theirs, and what the row is called.
D, A = "MNIST net, batch 32, one thread", "VGG-like net on CIFAR-10, a step at batch 32"
GLANCE = (
    ("peers", "lockstep", "lightning", f"{D}, against Lightning"),
    ("peers", "lockstep", "accelerate", f"{D}, against Accelerate"),
    ("peers", "lockstep", "fabric", f"{D}, against Fabric"),
    ("peers", "lockstep", "tensor_loader", f"{D}, against a DataLoader over tensors"),
    ("peers", "lockstep", "tensor_loader+tuned", f"{D}, against that loop tuned by hand"),
    *(
        (
            "kernels",
            f"CIFAR step, batch 32, {threads}: fused",
            f"CIFAR step, batch 32, {threads}: {who}",
            f"{A}, {threads}, against {name}",
        )
        for threads in ("1 thread", "2 threads")
        for who, name in (("eager", "eager PyTorch"), ("torch.compile", "`torch.compile`"))
    ),
    ("scaling", "ranks=2 threads=1", "ranks=1 threads=1", "MNIST net, batch 256, two ranks, against one rank"),
    (
        "scaling",
        "ranks=2 threads=1",
        "ranks=1 threads=2",
        "MNIST net, batch 256, two ranks, against one rank with two threads",
    ),
    (
        "exchange",
        "all_reduce, shm",
        "all_reduce, gloo as it comes",
        "sum of 17 KB over two ranks, shared memory, against gloo as it comes",
    ),
)
# Sections with more comparisons are counted here, and listed in full in their own file.
MOST_ROWS = 20
# Of sections whose answer is not how long something took: how many notes, from the first on, have what they concluded.
CONCLUSIONS = {
    "attach": 4,
    "attach-held-out": 4,
    "attached-predict": 4,
    "explain": 6,
    "predict": 2,
    "shares": 4,
    "studies": 16,
    "tune": 1,
    "turns": 3,
}
# Results of a section that has another form since then.
EARLIER = {
    "2026-11-16-explain": "An earlier form of this section: five causes of one size each, without the true size of any.",
}
HEAD = """# Benchmark figures

Every comparison is made within a round; the figure is the median over rounds, with its 95 % interval.
*Met* means that the whole interval reaches the target. The date of each section links to its result,
with all contenders, notes and the machine. `docs/benchmark_figures.py` writes this page from
`benchmarks/results/`; [benchmarks](benchmarks.md) explains how the figures are measured. Documents
A to D are [four published course reports](published-recipes.md#the-four-documents).
"""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    for path, tables in quoted().items():
        path.write_text(with_tables(path.read_text(encoding="utf-8"), tables), encoding="utf-8")


def page() -> str:
    return "\n".join([HEAD, "## Speed at a glance\n", *glance(), *(section(path) for path in newest())])


def quoted() -> dict[Path, dict[str, list[str]]]:
    """The pages that have tables of today, by the mark that each begins with."""
    result = next(path for path in newest() if path.stem[11:] == "kernels")
    comparisons = json.loads(result.read_text(encoding="utf-8"))["comparisons"]
    return {
        README: {"<!-- speed at a glance -->": glance()},
        KERNELS: {"<!-- whole nets -->": whole_nets(comparisons), "<!-- layers -->": layers(comparisons)},
    }


def with_tables(text: str, tables: dict[str, list[str]]) -> str:
    for mark, lines in tables.items():
        before, mark, rest = text.partition(f"{mark}\n")
        _, end, after = rest.partition(END)
        text = f"{before}{mark}{''.join(f'{line}{chr(10)}' for line in lines)}{end}{after}"
    return text


def whole_nets(comparisons: list[dict[str, Any]]) -> list[str]:
    lines = ["| whole nets | against | times as fast | n | target |", "|---|---|---:|---:|---|"]
    for one in comparisons:
        what, _, against = one["theirs"].rpartition(": ")
        if "@" not in what:
            between = f"{number(one, one['median'])} ({' to '.join(number(one, value) for value in one['interval'])})"
            target = "" if one["target"] is None else f"{one['target']:g}x: {one['verdict']}"
            lines.append(f"| {what} | {against} | {between} | {len(one['values'])} | {target} |")
    return [*lines, ""]


def layers(comparisons: list[dict[str, Any]]) -> list[str]:
    """Forward and backward of each layer in one cell."""
    columns = [(1, "eager"), (32, "eager"), (128, "eager"), (32, "channels-last"), (128, "channels-last")]
    found: dict[str, dict[tuple[int, str], list[str]]] = {}
    for one in comparisons:
        what, _, against = one["theirs"].rpartition(": ")
        if "@" in what:
            layer, _, rest = what.rpartition(" batch ")
            batch = int(rest.split()[0])  # "32 forward", then "32 backward"
            found.setdefault(layer, {}).setdefault((batch, against), []).append(f"{one['median']:.1f}x")
    heads = [f"batch {batch}{'' if against == 'eager' else f', against {against}'}" for batch, against in columns]
    lines = [f"| layer | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}"]
    lines += [f"| {layer} | {' | '.join(', '.join(cells[key]) for key in columns)} |" for layer, cells in found.items()]
    return [*lines, ""]


def glance() -> list[str]:
    """For each kind of machine, how many times as fast Lockstep was, as it comes."""
    kinds: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        on = document.get("machine", {})
        if document.get("valid") and "instructions" in on and not path.stem.endswith("-trial"):
            kind = f"{on['cores']} cores of an {on['cpu']} ({on['instructions'].upper()})".replace(") (", ", ")
            kinds.setdefault(kind, {})[path.stem[11:]] = document
    return [line for kind, results in kinds.items() for line in _glance_of(kind, results)]


def _glance_of(kind: str, results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"| {kind} | times as fast | goal |", "|---|---|---|"]
    for name, ours, theirs, words in GLANCE:
        pairs = results.get(name, {}).get("comparisons", [])
        # A pair is compared by two clocks where one of them has the target, or neither: then by the wall's.
        found = [one for one in pairs if (one["ours"], one["theirs"]) == (ours, theirs)]
        found.sort(key=lambda one: (one["target"] is None, one["clock"] != "wall"))
        if found:
            one = found[0]
            interval = f" ({' to '.join(number(one, value) for value in one['interval'])})" if one["interval"] else ""
            goal = "–" if one["target"] is None else f"{one['target']:g}: {one['verdict']}"
            lines.append(f"| {words} | {number(one, one['median'])}{interval} | {goal} |")
    return [*lines, ""] if len(lines) > 2 else []


def newest() -> list[Path]:
    """The newest result of every section, by the section's name."""
    found: dict[str, Path] = {}
    for path in sorted(RESULTS.glob("*.json")):  # by date, so the newest stays
        name = path.stem[11:]
        if not name.endswith("-trial"):
            found[name] = path
    return [found[name] for name in sorted(found)]


def section(path: Path) -> str:
    document = json.loads(path.read_text(encoding="utf-8"))
    result = path.with_suffix(".md")
    dated = f"[{path.stem[:10]}](../benchmarks/results/{result.name})"
    lines = [f"## {path.stem[11:]}\n", document["title"], f"({dated}).\n"]
    if path.stem in EARLIER:
        lines.append(f"*{EARLIER[path.stem]}*\n")
    if not document["valid"]:
        lines.append("**These figures are not valid: the result's notes say why.**\n")
    # A pair's CPU time is in the result; here it stands only where it is what was judged.
    comparisons = [one for one in document["comparisons"] if one["clock"] == "wall" or one["target"] is not None]
    if document["section"] in CONCLUSIONS:
        for note in document["notes"][: CONCLUSIONS[document["section"]]]:
            lines += textwrap.wrap(f"- {note}", 100, subsequent_indent="  ", break_on_hyphens=False)
    elif not comparisons:
        lines += contenders(result)
    elif len(comparisons) > MOST_ROWS:
        lines += counted(comparisons)
    else:
        lines += table(comparisons)
    return "\n".join([*lines, ""])


def contenders(result: Path) -> list[str]:
    """Where nothing is compared, the first table of the result."""
    text = result.read_text(encoding="utf-8")
    start = text.index("| ")
    return text[start : text.index("\n\n", start)].splitlines()


def counted(comparisons: list[dict[str, Any]]) -> list[str]:
    """Of many comparisons, those that missed their target, and how many did not."""
    judged = [one for one in comparisons if one["target"] is not None]
    missed = [one for one in judged if one["verdict"] == "missed"]
    by_median = [one for one in judged if one["verdict"] == "met by the median only"]
    lines = [
        f"{len(judged)} comparisons have a target: {len(judged) - len(missed) - len(by_median)} met it,",
        f"{len(by_median)} met it by the median only, {len(missed)} missed it.",
    ]
    return [*lines, "", *table(missed)] if missed else lines


def table(comparisons: list[dict[str, Any]]) -> list[str]:
    rows = [["comparison", "clock", "median and 95 % interval", "n", "target", "verdict"], ["---"] * 6]
    for one in comparisons:
        measure = {"speed": "in speed", "share": "in time", "difference": "difference in time"}[one["how"]]
        interval = (
            f" ({number(one, one['interval'][0])} to {number(one, one['interval'][1])})" if one["interval"] else ""
        )
        sign = "≥" if one["how"] == "speed" else "≤"
        rows.append(
            [
                f"{one['ours']} / {one['theirs']}, {measure}",
                one["clock"],
                f"{number(one, one['median'])}{interval}",
                str(len(one["values"])),
                "–" if one["target"] is None else f"{sign} {number(one, one['target'])}",
                one["verdict"] or "–",
            ]
        )
    return [f"| {' | '.join(row)} |" for row in rows]


def number(comparison: dict[str, Any], value: float) -> str:
    """Three digits of the median; small shares as percentages."""
    if comparison["how"] == "difference":
        return f"{value:.0f} ms"
    median = comparison["median"]
    if comparison["how"] == "share" and median < 0.1:
        return f"{100 * value:.{2 if median >= 0.001 else 3}f} %"
    return f"{value:.{0 if median >= 100 else 1 if median >= 10 else 2}f}"


def intervals() -> set[str]:
    """Every interval that a page may quote, as "1.33 to 1.67": of the newest result of every section on every kind of machine."""
    of_kind = {}
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if not path.stem.endswith("-trial"):
            on = document["machine"]
            of_kind[path.stem[11:], on["cpu"], on["cores"], on.get("instructions")] = document["comparisons"]
    return {
        " to ".join(number(one, value).split(" ")[0] for value in one["interval"])
        for comparisons in of_kind.values()
        for one in comparisons
        if one["interval"]
    }


if __name__ == "__main__":
    main()
