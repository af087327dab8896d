"""`lockstep kernels bench`: every way is timed and checked, and what is kept decides."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lockstep.cli.kernels import command, parse_shape
from lockstep.errors import InputError, RunFailed
from lockstep.kernels import bench, candidates, native, table
from lockstep.kernels.candidates import Shape

sys.path.insert(0, str(Path(__file__).parent.parent))  # `benchmarks` is not installed
from benchmarks import kernel_turns
from benchmarks.record import Measurement, Section
from benchmarks.sections.kernels import append, compare_all, target_of

QUICK = [
    "bench",
    "--shape",
    "2-3-8-pool",
    "--shape",
    "16-16-8-last-first",
    "--batch",
    "2",
    "--threads",
    "1",
    "--rounds",
    "1",
]


def test_every_way_is_timed_and_right_and_the_times_are_kept_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.load() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "data"))
    done = CliRunner().invoke(command, [*QUICK, "--quick", "--keep", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    small, wide = document["cells"]
    assert [timing["way"] for timing in small["timings"]][:3] == ["torch", "channels_last", "onednn off"]
    assert small["timings"][-1]["way"] == "direct"
    assert {"contiguous", "onednn fused", "direct", "winograd"} <= {timing["way"] for timing in wide["timings"]}
    for cell in (small, wide):
        for timing in cell["timings"]:
            assert timing["forward_ms"] > 0
            assert timing["error"] < 1e-4 or timing["way"] == "bf16"
    assert small["flop"] == 2 * 2 * 2 * 3 * 8 * 8 * 9
    assert small["bytes"] == 4 * (2 * (2 * 64 + 3 * 16) + 2 * 3 * 9)
    rows = table._read(Path(document["kept_in"])).values()
    assert [(row.layer.channels, row.layer.out_channels, row.layer.height) for row in rows] == [(2, 3, 8), (16, 16, 8)]
    assert [(row.layer.pool, row.layer.channels_last, row.layer.grad_x) for row in rows] == [
        (True, False, True),
        (False, True, False),
    ]
    table._rows.cache_clear()


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.load() is None:
        pytest.skip("there is no C++ compiler")
    right = candidates.exact
    monkeypatch.setattr(bench, "exact", lambda shape, batch: [tensor * 1.1 for tensor in right(shape, batch)])
    done = CliRunner().invoke(command, [*QUICK, "--quick", "--json"])
    assert isinstance(done.exception, RunFailed)
    assert "gave a WRONG result" in str(done.exception)


def test_shapes_are_read_from_words() -> None:
    assert parse_shape("3-32-32") == Shape(3, 32, 32, False, True)
    assert parse_shape("1-4-28-pool-first") == Shape(1, 4, 28, True, False)
    assert parse_shape("4-8-14-last").name == "4→8@14, last"
    assert parse_shape("1-6-28-5x5-pool") == Shape(1, 6, 28, True, True, kernel=5)
    for wrong in ("3-32", "3-32-32-pol", "0-4-28", "a-b-c", ""):
        with pytest.raises(InputError, match="--shape"):
            parse_shape(wrong)


def test_where_it_cannot_be_measured_one_line_says_why() -> None:
    def error(*words: str) -> str:
        return str(CliRunner().invoke(command, [*QUICK, *words]).exception)

    if not torch.cuda.is_available():
        assert error("--device", "cuda") == "--device cuda: PyTorch finds no GPU here: leave it out"


def test_without_onednn_means_in_both_directions() -> None:
    (way,) = [way for way in candidates.candidates(Shape(2, 3, 8, False, True), 2, False) if way.name == "onednn off"]
    with torch.profiler.profile() as seen, way.around():
        way.run().backward(way.grad)
    called = {event.key for event in seen.key_averages()}
    assert "aten::_slow_conv2d_backward" in called
    assert not any("mkldnn" in name for name in called)


def test_make_bench_trains_the_same_net_in_every_way_and_knows_its_targets() -> None:
    if native.load() is None:
        pytest.skip("there is no C++ compiler")
    times, errors = kernel_turns.step(1)
    assert set(errors) == {"D step, batch 32", "D step, batch 256"}
    assert max(errors.values()) < 1e-4
    section = Section("kernels", "", "call", "milliseconds", [])
    spans = [Measurement(0, 1, name, *spent) for name, spent in times[0].items()]
    append(section, spans)
    compare_all(section)
    assert len(section.comparisons) == 6  # three others at two batches
    assert {one.target for one in section.comparisons} == {3.5, 5.0, None}
    assert target_of("3→32@32, first batch 32 backward", "eager") == 1.2
    assert target_of("3→32@32, first batch 32 forward", "eager") == 2.0
    assert target_of("1→4@28, first batch 1 forward", "eager") == 0.97
    assert target_of("D inference, batch 128", "ONNX Runtime") == 1.0
