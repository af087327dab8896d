"""The timeline: what a traced run leaves, read with nothing but json; overlap against counting microseconds one by one."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import models
from lockstep.errors import InputError
from lockstep.explain import overlap
from lockstep.explain.evidence import Evidence
from lockstep.export import perfetto
from lockstep.measure import trace
from lockstep.measure.clock import BACKWARD, DATA, EXCHANGE, FORWARD, OPTIMIZER
from lockstep.measure.records import PHASES, StepLog, read_steps
from lockstep.measure.trace import Mark, Trace, TraceClock
from lockstep.measure.traced import common, length, traced_steps, union, without
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.recipe import Recipe
from lockstep.run import Options, Run, Spec
from support import SHORT, Cli

# Three ranks, whose mean is a multiplication by a number that is not a power of two; buckets of about 4 kB, so that there are several.
MANY = (*SHORT, "ranks=3", "strategy=ddp", "ddp.bucket_mb=0.004")
TRACED = 8
FIRST, LAST = 11, 10 + TRACED


@pytest.fixture(scope="module")
def traced(module_cli: Cli) -> Run:
    """Eight steps after warm-up; the first epoch, and so an evaluation, ends within them."""
    return Run(Path(module_cli.run(*MANY, "--trace", str(TRACED), "--name", "traced")["run"]))


def events_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def rank_events(run: Run, rank: int) -> list[dict[str, Any]]:
    return events_of(run.rank_folder(rank) / "trace.json")


def test_tracing_changes_no_bit(module_cli: Cli, traced: Run) -> None:
    plain = module_cli.run(*MANY, "--name", "plain")
    summary = traced.summary()
    assert summary
    assert plain["weights_sha256"] == summary["weights_sha256"]
    assert not list(Path(plain["run"]).glob("ranks/*/trace.json"))


@pytest.mark.parametrize("rank", range(3))
def test_spans_are_within_each_other_or_apart(traced: Run, rank: int) -> None:
    """On every track, with a stack: a span ends before the one that it began within, and begins where the one before has ended."""
    tracks = defaultdict(list)
    for event in rank_events(traced, rank):
        tracks[event["tid"]].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
    assert len(tracks) > 2
    for spans in tracks.values():
        assert spans == sorted(spans, key=lambda span: (span[0], -span[1])), "in order"
        open_ends: list[int] = []
        for begin, end in spans:
            assert end >= begin
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


@pytest.mark.parametrize("rank", range(3))
def test_phases_add_up_to_the_rows_of_the_step_log(traced: Run, rank: int) -> None:
    rows = {int(row["step"]): row for row in read_steps(traced.rank_folder(rank) / "steps.bin")}
    sums: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in rank_events(traced, rank):
        if event["cat"] in ("step", "phase"):
            name = "total" if event["cat"] == "step" else event["name"]
            sums[event["args"]["step"]][name] += event["dur"] * 1000
    assert sorted(sums) == list(range(FIRST, LAST + 1))
    for step, found in sums.items():
        total = int(rows[step]["total_ns"])
        for phase in PHASES:
            assert found[phase] == pytest.approx(int(rows[step][f"{phase}_ns"]), abs=1)
        assert found["total"] == pytest.approx(total, rel=0.02)
        phases = sum(found[phase] for phase in (*PHASES, "other"))
        assert phases == pytest.approx(total, rel=0.02, abs=20_000), (
            "what is neither a phase nor other is next to nothing"
        )


def test_buckets_carry_all_gradients(traced: Run) -> None:
    model = models.build(traced.spec().recipe)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    steps = defaultdict(list)
    for event in rank_events(traced, 0):
        if event["cat"] == "exchange":
            steps[event["args"]["step"]].append(event)
    assert len(steps) == TRACED
    for found in steps.values():
        assert sum(event["args"]["bytes"] for event in found) == whole
        assert [event["args"]["bucket"] for event in sorted(found, key=lambda event: event["ts"])] == list(
            range(len(found))
        )
        assert len(found) > 1


def test_an_only_bucket_is_the_exchange_that_the_clock_counts(module_cli: Cli) -> None:
    """Without a hook: DDP itself says that there is one bucket, and how large."""
    run = Run(Path(module_cli.run(*SHORT, "ranks=2", "strategy=ddp", "--trace", "3", "--name", "only")["run"]))
    for rank in range(2):
        sizes = json.loads((run.rank_folder(rank) / "summary.json").read_text())["strategy"]["bucket_sizes"]
        rows = {int(row["step"]): int(row["exchange_ns"]) for row in read_steps(run.rank_folder(rank) / "steps.bin")}
        found = [event for event in rank_events(run, rank) if event["cat"] == "exchange"]
        assert [event["args"]["bytes"] for event in found] == 3 * sizes
        for event in found:
            assert event["dur"] * 1000 == pytest.approx(rows[event["args"]["step"]], abs=1)


def test_the_evaluation_in_between_is_there(traced: Run) -> None:
    (found,) = [event for event in rank_events(traced, 0) if event["name"] == "evaluation"]
    assert found["args"]["step"] == 15, "the last step of the first epoch"
    assert found["dur"] / 1e6 == pytest.approx(traced.epochs(rank=0)[0]["eval_seconds"], rel=0.05, abs=1e-3)


def test_ddp_counts_what_the_clock_counts(traced: Run) -> None:
    """DDP's last sample is of a step that has a row. It counts forward without the loss, and backward from the end of the model's
    forward on: the sum of all is at most ours, and most of it."""
    for rank in range(3):
        summary = json.loads((traced.rank_folder(rank) / "summary.json").read_text())["strategy"]
        buckets = {
            event["args"]["bucket"]: event["args"]["bytes"]
            for event in rank_events(traced, rank)
            if event["cat"] == "exchange"
        }
        assert summary["rebuilt_bucket_sizes"] == [buckets[index] for index in sorted(buckets)]
        assert sum(summary["bucket_sizes"]) == summary["total_parameter_size_bytes"] == sum(buckets.values())
        assert summary["iteration"] == 10, "the first ten steps, and then every hundredth"
        row = read_steps(traced.rank_folder(rank) / "steps.bin")[9]
        assert summary["forward_compute_time"] <= row["forward_ns"]
        ours = int(row["forward_ns"] + row["backward_ns"] + row["exchange_ns"])
        # Backward, and the exchange beyond it.
        rest = summary["backward_comm_time"] - summary["backward_compute_comm_overlap_time"]
        theirs = summary["forward_compute_time"] + summary["backward_compute_time"] + rest
        assert 0.5 * ours < theirs < 1.02 * ours


def test_all_ranks_in_one_file(module_cli: Cli, traced: Run) -> None:
    result = module_cli("export", "traced", "--format", "perfetto", "-o", "timeline.json")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [
        "8 steps of 3 ranks in timeline.json",
        "next: open it in https://ui.perfetto.dev or chrome://tracing",
    ]
    content = json.loads((module_cli.folder / "timeline.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    assert content["lockstep"]["aligned_by"] == "one clock for all ranks"
    found = events_of(module_cli.folder / "timeline.json")
    first = min(e["ts"] for rank in range(3) for e in rank_events(traced, rank))
    assert min(e["ts"] for e in found) == 0
    for rank in range(3):
        mine = [(e["name"], e["ts"], e["dur"]) for e in found if e["pid"] == rank]
        theirs = [(e["name"], pytest.approx(e["ts"] - first, abs=0.002), e["dur"]) for e in rank_events(traced, rank)]
        assert mine == theirs


def test_kernels_for_hta(module_cli: Cli, traced: Run) -> None:
    """Computing and exchange as HTA knows them, with HTA's own definition of their overlap, counted here in tenths of a µs."""
    result = module_cli("export", "traced", "--format", "hta", "-o", "for hta; mine")
    assert result.returncode == 0, result.stderr
    done, next_ = result.stderr.splitlines()
    assert done == "3 ranks in for hta; mine"
    code = 'from hta.trace_analysis import TraceAnalysis; analysis = TraceAnalysis(trace_dir="for hta; mine")'
    assert shlex.split(next_) == ["next:", "python", "-i", "-c", code]
    files = sorted((module_cli.folder / "for hta; mine").iterdir())
    assert [json.loads(path.read_text())["distributedInfo"]["rank"] for path in files] == [0, 1, 2]
    busy, both = 0, 0
    for path in files:
        events = events_of(path)
        start = min(event["ts"] for event in events)
        size = round((max(e["ts"] + e["dur"] for e in events) - start) * 10) + 1
        computes, sends = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        for event in events:
            assert event["cat"] == "kernel"
            begin, end = (round((at - start) * 10) for at in (event["ts"], event["ts"] + event["dur"]))
            (sends if event["name"].startswith("nccl") else computes)[begin:end] = True
        busy, both = busy + int(sends.sum()), both + int((sends & computes).sum())
    (finding,) = overlap.answer(Evidence(traced))
    assert finding.figures["source"] == "trace"
    assert finding.figures["overlap"] == pytest.approx(both / busy, abs=0.01)


def test_what_cannot_be_exported(module_cli: Cli, traced: Run) -> None:
    plain = module_cli.runs / "untraced"
    Run.create(module_cli.runs, msgspec.structs.replace(traced.spec(), id="untraced"))
    assert "has no trace" in module_cli.error("export", "untraced", "--format", "perfetto", "-o", "t.json", code=2)
    # What a kill in the middle of writing leaves, and a file that something else has cut.
    whole = (traced.rank_folder(0) / "trace.json").read_bytes()
    (plain / "ranks" / "0000" / ".tmp-1-trace.json").write_bytes(whole[:1000])
    (plain / "ranks" / "0001" / "trace.json").write_bytes(whole[:1000])
    assert "has no trace" in module_cli.error("export", "untraced", "--format", "perfetto", "-o", "t.json", code=2)
    assert "one run" in module_cli.error("export", "traced", "traced", "--format", "hta", "-o", "two", code=2)
    assert "first 10" in module_cli.error("run", *SHORT, "max_steps=10", "--trace", "5", code=2)


# From here on without processes.


def spec(ranks: int = 2, strategy: str = "ddp", steps: int = 4) -> Spec:
    recipe, placement = Recipe(), Placement(ranks=ranks, strategy=strategy)
    worked = plan(recipe, placement, 1000, 10)
    return Spec(
        id="made",
        created=1.0,
        lockstep="0",
        recipe=recipe,
        placement=placement,
        plan=worked,
        options=Options(trace=steps),
    )


def test_the_clock_notes_laps_and_counts_them_as_before(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.bin", 100, torch.device("cpu"))
    kept = Trace(tmp_path, spec(), 0, 0, 500)
    clock = TraceClock(log, kept)
    for step in range(20):
        clock.start()
        for phase in (DATA, FORWARD):
            clock.lap(phase)
        if step % 2:
            clock.gradients_ready()
        clock.lap_backward(exchanged=True)
        clock.skip()
        clock.lap(OPTIMIZER)
        clock.finish(1, 32)
        kept.after_step(log.count)
    found = traced_steps(json.loads((tmp_path / "trace.json").read_text()))
    assert list(found) == [511, 512, 513, 514], "after ten steps of warm-up; counted on from an earlier run"
    rows = read_steps(tmp_path / "steps.bin")
    for number, step in found.items():
        row = rows[number - 501]
        names = [name for name, *_ in step.phases]
        exchange = ["exchange"] if row["exchange_ns"] else []
        assert names == ["data", "forward", "backward", *exchange, "other", "optimizer"]
        for phase in (DATA, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER):
            lasted = length(step.of(PHASES[phase])) * 1000
            assert lasted == pytest.approx(int(row[f"{PHASES[phase]}_ns"]), abs=1)


def test_a_run_that_ends_early_keeps_what_there_is(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.bin", 100, torch.device("cpu"))
    kept = Trace(tmp_path, spec(steps=50), 0, 0, 0)
    clock = TraceClock(log, kept)
    for _ in range(12):
        clock.start()
        clock.finish(1, 32)
        kept.after_step(log.count)
    assert not (tmp_path / "trace.json").exists()
    kept.close()
    assert list(traced_steps(json.loads((tmp_path / "trace.json").read_text()))) == [11, 12]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=6)


@settings(max_examples=100, deadline=None)
@given(spans, spans)
def test_intervals_against_counting(one: list[list[int]], other: list[list[int]]) -> None:
    """A set of whole units on each side; what is of no length counts for nothing."""
    a, b = (union([(float(x), float(y)) for x, y in given]) for given in (one, other))
    units_a, units_b = ({unit for x, y in given for unit in range(x, y)} for given in (one, other))
    assert length(a) == len(units_a)
    assert length(common(a, b)) == len(units_a & units_b)
    assert length(without(a, b)) == len(units_a - units_b)


def made_run(
    folder: Path, marks: dict[int, list[Mark]], strategy: str = "ddp", clocks: dict[int, str] | None = None
) -> Run:
    """A run folder with these traces, and step rows that agree with them."""
    run = Run.create(folder, msgspec.structs.replace(spec(len(marks), strategy), id="made"))
    for rank, mine in marks.items():
        content = trace.document(mine, run.spec(), rank)
        content["lockstep"]["clock"] = (clocks or {}).get(rank, "one")
        (run.rank_folder(rank) / "trace.json").write_text(json.dumps(content))
        steps = [mark for mark in mine if mark.name == "step"]
        log = StepLog(run.rank_folder(rank) / "steps.bin", 20, torch.device("cpu"))
        log.count = 10  # as if ten steps had warmed up
        for step in steps:
            lasted = [sum(m.end - m.begin for m in mine if m.name == name and m.step == step.step) for name in PHASES]
            log.write(1, 32, step.begin, lasted, step.end - step.begin)
    return run


def a_step(number: int, at: int, buckets: list[tuple[int, int, int]], exposed: int) -> list[Mark]:
    """Forward 200, backward 400, then what is exposed, then optimizer 100 µs; buckets as (bytes, begin, end) from the step's begin."""
    us = 1000
    phases = (("forward", 200), ("backward", 400), ("exchange", exposed), ("optimizer", 100))
    marks, now = [], at
    for name, lasts in phases:
        marks.append(Mark(name, number, now * us, (now + lasts) * us))
        now += lasts
    for index, (size, begin, end) in enumerate(buckets):
        marks.append(Mark("bucket", number, (at + begin) * us, (at + end) * us, {"bucket": index, "bytes": size}))
        marks.append(Mark("launch", number, (at + begin) * us, (at + begin + 10) * us, {"bucket": index}))
    return [*marks, Mark("step", number, at * us, now * us, {"epoch": 1, "samples": 32})]


def steps(*arguments: Any) -> list[Mark]:
    return [mark for number in (11, 12, 13) for mark in a_step(number, 2000 * number, *arguments)]


def the_finding(run: Run) -> Any:
    (found,) = overlap.answer(Evidence(run))
    return found


MB = 1 << 20


def test_one_bucket_hides_nothing(tmp_path: Path) -> None:
    found = the_finding(made_run(tmp_path, dict.fromkeys((0, 1), steps([(17_000, 600, 900)], 300))))
    assert found.figures["overlap"] == 0
    assert found.verdict.startswith(
        "0.0% of the exchange is hidden behind computing; 30% of a step is exchange that is not"
    )
    assert "one bucket of 17.0 kB" in found.why
    assert "bucket_mb" not in found.next


def test_a_large_bucket_could_be_divided(tmp_path: Path) -> None:
    found = the_finding(made_run(tmp_path, dict.fromkeys((0, 1), steps([(16 * MB, 600, 900)], 300))))
    assert "ddp.bucket_mb=4" in found.next
    assert found.cost == 0, "what smaller buckets would hide has not been measured"


def test_several_buckets(tmp_path: Path) -> None:
    """The first begins 190 µs before the end of backward, of which 10 µs are its start; the second is not hidden at all."""
    found = the_finding(made_run(tmp_path, dict.fromkeys((0, 1), steps([(MB, 410, 500), (15 * MB, 600, 900)], 300))))
    first, second = found.figures["buckets"]
    assert (first["overlap"], second["overlap"]) == (pytest.approx(80 / 90), 0)
    assert found.figures["overlap"] == pytest.approx(80 / 390)
    assert found.figures["window_s"] == pytest.approx(190e-6)
    assert "only 190 µs of backward are left when the first of 2 buckets is full" in found.why
    assert "ddp.bucket_mb=4" in found.next


def test_waiting_is_not_exchange(tmp_path: Path) -> None:
    """Rank 0 is there 400 µs earlier: of its 500 µs only 100 are the exchange."""
    early, late = steps([(17_000, 600, 1100)], 500), steps([(17_000, 600, 700)], 100)
    found = the_finding(made_run(tmp_path, {0: early, 1: late}))
    assert found.figures["exposed_s"] == pytest.approx(100e-6)
    assert found.figures["waiting_s"] == pytest.approx(200e-6)


def test_an_exchange_after_backward(tmp_path: Path) -> None:
    found = the_finding(made_run(tmp_path, dict.fromkeys((0, 1), steps([], 20)), strategy="flat"))
    assert found.figures["overlap"] == 0
    assert "strategy=flat exchanges when backward is over" in found.why
    assert found.next.startswith("nothing to gain")


def test_without_a_trace_ddp_says_it(tmp_path: Path) -> None:
    run = made_run(tmp_path, dict.fromkeys((0, 1), steps([(17_000, 600, 900)], 300)))
    figures = {
        "rebuilt_bucket_sizes": [1000, 16_000],
        "avg_backward_comm_time": 400_000,
        "avg_backward_compute_comm_overlap_time": 100_000,
    }
    for rank in (0, 1):
        (run.rank_folder(rank) / "trace.json").unlink()
        (run.rank_folder(rank) / "summary.json").write_text(json.dumps({"strategy": figures}))
    found = the_finding(run)
    assert found.figures["source"] == "ddp"
    assert found.verdict.startswith("at most 25% of the exchange is hidden")


def test_nothing_is_said_where_nothing_is_known(tmp_path: Path) -> None:
    run = made_run(tmp_path, dict.fromkeys((0, 1), steps([(17_000, 600, 900)], 300)))
    for rank in (0, 1):
        (run.rank_folder(rank) / "trace.json").unlink()
    assert not list(overlap.answer(Evidence(run)))


def test_clocks_of_other_hosts_are_aligned(tmp_path: Path) -> None:
    """Ranks 2 and 3 have a clock that is 5 s ahead, and see the end of the exchange up to 30 µs earlier or later."""
    jitter = {11: -30, 12: 0, 13: 30}
    marks: dict[int, list[Mark]] = {rank: [] for rank in range(4)}
    for rank, mine in marks.items():
        for number, late in jitter.items():
            away = 5_000_000 + late if rank >= 2 else 0
            mine += a_step(number, 2000 * number + away, [(17_000, 600, 900)], 300)
    run = made_run(tmp_path, marks, clocks={0: "a", 1: "a", 2: "b", 3: "b"})
    path = tmp_path / "all.json"
    perfetto.write(run, path)
    content = json.loads(path.read_text())
    assert content["lockstep"]["aligned_by"].startswith("the end of each step's exchange")
    assert content["lockstep"]["moved_us"] == {"2": -5_000_000.0, "3": -5_000_000.0}
    begins = {(e["pid"], e["args"]["step"]): e["ts"] for e in events_of(path) if e["cat"] == "step"}
    for number, late in jitter.items():
        assert begins[2, number] - begins[0, number] == pytest.approx(late, abs=0.01)


def test_clocks_that_cannot_be_aligned(tmp_path: Path) -> None:
    quiet = [mark for mark in steps([], 0) if mark.name != "exchange"]
    run = made_run(tmp_path, dict.fromkeys((0, 1), quiet), clocks={0: "a", 1: "b"})
    with pytest.raises(InputError, match="cannot be aligned"):
        perfetto.write(run, tmp_path / "all.json")
