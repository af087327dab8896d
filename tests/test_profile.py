"""torch's profiler over a few steps: its table, its trace, and how they are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lockstep import models
from lockstep.run import Run
from support import SHORT, Cli

STEPS = 4


@pytest.fixture(scope="module")
def profiled(module_cli: Cli) -> Run:
    return Run(Path(module_cli.run(*SHORT, "--profile", str(STEPS), "--trace", "3", "--name", "profiled")["run"]))


def operators(run: Run) -> dict[str, dict[str, Any]]:
    content = json.loads((run.rank_folder(0) / "operators.json").read_text())
    assert (content["first_step"], content["steps"]) == (14, STEPS), "after ten steps of warm-up and three of the trace"
    return {row["name"]: row for row in content["operators"]}


def test_operators_are_called_as_often_as_the_model_has_them(profiled: Run) -> None:
    found, model = operators(profiled), models.build(profiled.spec().recipe)
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in model.modules())
    linear = sum(isinstance(layer, nn.Linear) for layer in model.modules())
    assert convolutions
    assert linear
    assert found["aten::convolution_backward"]["calls"] == STEPS * convolutions
    # The first epoch ends among these steps, and its evaluation is one batch.
    assert found["aten::convolution"]["calls"] == (STEPS + 1) * convolutions
    assert found["aten::addmm"]["calls"] == (STEPS + 1) * linear


def test_shares_and_order(profiled: Run) -> None:
    rows = list(operators(profiled).values())
    assert sum(row["self_cpu_share"] for row in rows) == pytest.approx(1)
    own = [row["self_cpu_us"] for row in rows]
    assert own == sorted(own, reverse=True)
    assert all(row["self_cpu_us"] <= row["cpu_total_us"] + 1 for row in rows)


def test_the_trace_beside_it_has_the_same_calls(profiled: Run) -> None:
    content = json.loads((profiled.rank_folder(0) / "profile.json").read_text())
    assert content["distributedInfo"]["rank"] == 0
    for name, row in operators(profiled).items():
        if name.startswith("aten::conv"):
            assert sum(event.get("name") == name for event in content["traceEvents"]) == row["calls"]
    marks = {event["name"] for event in content["traceEvents"] if str(event.get("name")).startswith("ProfilerStep#")}
    assert len(marks) == STEPS


def test_it_is_shown(module_cli: Cli, profiled: Run) -> None:
    shown = module_cli("show", "profiled", "--operators")
    assert shown.returncode == 0, shown.stderr
    top = next(iter(operators(profiled)))
    first = next(line for line in shown.stdout.splitlines() if "%" in line and "self CPU" not in line)
    assert first.split()[0] == top
    assert "steps 14 to 17 and the evaluation between them" in shown.stdout
    document = json.loads(module_cli("show", "profiled", "--operators", "--json").stdout)
    assert document["operators"] == list(operators(profiled).values())
    table = (profiled.rank_folder(0) / "operators.txt").read_text()
    assert "Self CPU %" in table
    assert "CPU Mem" in table
    assert "aten::convolution" in table


def test_a_run_without_it_says_how(module_cli: Cli, profiled: Run) -> None:
    (profiled.rank_folder(0) / "operators.json").rename(profiled.folder / "aside.json")
    try:
        assert "--profile 5" in module_cli.error("show", "profiled", "--operators", code=2)
    finally:
        (profiled.folder / "aside.json").rename(profiled.rank_folder(0) / "operators.json")
    assert "first 15" in module_cli.error("run", *SHORT, "max_steps=15", "--trace", "5", "--profile", "2", code=2)
