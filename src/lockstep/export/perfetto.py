"""A run's timeline for other tools: all ranks in one file for Perfetto, or one file per rank for HolisticTraceAnalysis (docs/timeline.md).

Ranks of one host have one clock. Those of another host are shifted so that their exchanges end when the first host's do: an all-reduce
ends on all ranks at about the same moment.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.export.writers import Store, whole_file
from lockstep.measure.traced import Interval, TracedStep, read, spans, traced_steps
from lockstep.run import Run
from lockstep.units import counted

Traces = dict[int, dict[str, Any]]
HOW = "the end of each step's exchange (median over steps)"


def write(run: Run, path: Path) -> Store:
    """One file with all ranks."""
    traces, missing, without = _traces(run)
    content = merged(traces)
    content["lockstep"]["missing_ranks"] = missing
    with whole_file(path) as file:
        json.dump(content, file)
    steps = len(traced_steps(traces[min(traces)]))
    done = f"{counted(steps, 'step')} of {counted(len(traces), 'rank')} in {path}{without}"
    return Store(done, "open it in https://ui.perfetto.dev or chrome://tracing")


def write_for_hta(run: Run, folder: Path) -> Store:
    """One file per rank."""
    traces, _, without = _traces(run)
    folder.mkdir(exist_ok=True)
    for rank, content in traces.items():
        with whole_file(folder / f"rank{rank:04d}.json") as file:
            json.dump(as_kernels(content), file)
    opened = f"analysis = TraceAnalysis(trace_dir={json.dumps(str(folder))})"
    code = shlex.quote(f"from hta.trace_analysis import TraceAnalysis; {opened}")
    return Store(f"{counted(len(traces), 'rank')} in {folder}{without}", f"python -i -c {code}")


def _traces(run: Run) -> tuple[Traces, list[int], str]:
    """Of all ranks that have one; the others, and what the user is told of them."""
    ranks = range(run.spec().plan.ranks)
    found = {rank: content for rank in ranks if (content := read(run, rank))}
    if not found:
        raise InputError(f"run {run.id} has no trace: run it again with --trace 20")
    missing = [rank for rank in ranks if rank not in found]
    return found, missing, f"; ranks without a trace: {', '.join(map(str, missing))}" if missing else ""


def merged(traces: Traces) -> dict[str, Any]:
    """All ranks on one time axis that starts at zero."""
    moved = shifts(traces)
    first = min(
        (event["ts"] + moved[rank] for rank, content in traces.items() for event in spans(content)), default=0.0
    )
    events = []
    for rank, content in traces.items():
        for event in content["traceEvents"]:
            at = {"ts": round(event["ts"] + moved[rank] - first, 3)} if "ts" in event else {}
            events.append(event | at)
    about = traces[min(traces)]["lockstep"]
    aligned = {str(rank): shift for rank, shift in moved.items() if shift}
    return {
        "displayTimeUnit": "ms",
        "lockstep": {
            **{key: about[key] for key in ("format", "run", "strategy")},
            "hosts": {str(rank): content["lockstep"]["host"] for rank, content in traces.items()},
            "aligned_by": HOW if aligned else "one clock for all ranks",
            "moved_us": aligned,
        },
        "traceEvents": events,
    }


def shifts(traces: Traces) -> dict[int, float]:
    """Microseconds to add to each rank's times, so that all are on the first rank's clock."""
    clocks = {rank: content["lockstep"]["clock"] for rank, content in traces.items()}
    ends = {rank: _exchange_ends(traced_steps(content)) for rank, content in traces.items()}
    home = clocks[min(traces)]
    here = [ends[rank] for rank in traces if clocks[rank] == home]
    found: dict[int, float] = {}
    for clock in dict.fromkeys(clocks.values()):
        there = [ends[rank] for rank in traces if clocks[rank] == clock]
        shift = 0.0 if clock == home else _between(here, there)
        found |= {rank: shift for rank in traces if clocks[rank] == clock}
    return found


def _between(here: list[dict[int, float]], there: list[dict[int, float]]) -> float:
    differences = [
        statistics.fmean(ends[step] for ends in here) - statistics.fmean(ends[step] for ends in there)
        for step in here[0]
        if all(step in ends for ends in (*here, *there))
    ]
    if not differences:
        raise InputError(
            "the trace holds no step in which ranks of different hosts exchanged: their clocks cannot be aligned"
        )
    return statistics.median(differences)


def _exchange_ends(steps: Mapping[int, TracedStep]) -> dict[int, float]:
    return {number: step.communicating[-1][1] for number, step in steps.items() if step.communicating}


def as_kernels(content: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's spans as kernels of a device, since HTA analyses nothing else.

    Computing is one stream, the exchange another. A backward that was interrupted to start an exchange is several kernels. HTA
    recognises an exchange by NCCL's name for it.
    """
    info = content.get("distributedInfo", {})
    rank, backend = info.get("rank", 0), info.get("backend", "")
    events: list[dict[str, Any]] = []

    def add(name: str, stream: int, intervals: list[Interval]) -> None:
        for begin, end in intervals:
            args = {"stream": stream, "device": rank, "correlation": -1}
            at = {"ts": begin, "dur": end - begin, "pid": rank, "tid": stream}
            events.append({"ph": "X", "cat": "kernel", "name": name, **at, "args": args})

    for step in traced_steps(content).values():
        for name, computed in step.computing_by_phase().items():
            add(name, 1, computed)
        if step.buckets:
            for bucket in step.buckets:
                add(
                    f"ncclKernel {backend} all_reduce bucket {bucket.index}",
                    2 + bucket.index,
                    [(bucket.begin, bucket.end)],
                )
        else:
            add(f"ncclKernel {backend} exchange", 2, step.communicating)
    about = {**content["lockstep"], "note": "a CPU's phases, shown as kernels of a device"}
    head = {key: content[key] for key in ("schemaVersion", "displayTimeUnit", "distributedInfo") if key in content}
    return {**head, "lockstep": about, "traceEvents": sorted(events, key=lambda event: float(event["ts"]))}
