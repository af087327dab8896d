"""The one table of metrics, and the one view of a run that they are computed from."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import numpy as np

from lockstep import units
from lockstep.measure.records import ROW
from lockstep.measure.view import RunView, view
from lockstep.metrics import METRICS, RECORDED, Figure
from lockstep.placement import Placement
from lockstep.report.html import script_text
from lockstep.run import Run
from test_study_compare import finished, recipe

SRC = Path(units.__file__).parent


def long_ago(folder: Path) -> None:
    """Files that have just changed are not trusted to change their time when they change again."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 100, time.time() - 100))


def test_a_view_reads_each_file_once_and_notices_a_change(tmp_path: Path) -> None:
    run = finished(tmp_path, recipe(), Placement(ranks=2, threads=1), 10.0)
    long_ago(run.folder)
    first = view(run)
    assert view(Run(run.folder)) is first
    assert first.summary() is first.summary()
    content = json.loads((run.folder / "summary.json").read_text()) | {"train_seconds": 11.0}
    (run.folder / "summary.json").write_text(json.dumps(content))
    os.utime(run.folder / "summary.json", (time.time() - 50, time.time() - 50))
    again = view(run)
    assert again is not first
    assert [METRICS["seconds"].of(each, None) for each in (first, again)] == [10.0, 11.0], "a view is a snapshot"


def test_a_run_under_way_is_looked_at_anew(tmp_path: Path) -> None:
    run = finished(tmp_path, recipe(), Placement(), 10.0)
    run.write_status("running")
    long_ago(run.folder)
    rows = np.zeros(3, dtype=ROW)
    rows["step"], rows["total_ns"] = [1, 2, 0], 5
    path = run.rank_folder(0) / "steps.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.tofile(path)
    assert len(view(run).steps(0)) == 2
    stamp = path.stat()
    rows["step"] = [1, 2, 3]
    with path.open("r+b") as file:
        file.write(rows.tobytes())
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert len(view(run).steps(0)) == 3, "written in place: neither the size nor the time says so"


def test_the_steps_of_one_run_at_a_time_are_held(tmp_path: Path) -> None:
    one, other = (RunView(finished(tmp_path, recipe(seed=seed), Placement(), 1.0).folder) for seed in (1, 2))
    held = one.steps(0)
    assert one.steps(0) is held
    other.steps(0)
    assert one.steps(0) is not held


def test_every_figure_has_a_unit_and_a_direction() -> None:
    figures: list[Figure] = [*METRICS.values(), *RECORDED.values()]
    assert {figure.unit for figure in figures} <= units.UNITS.keys()
    assert {METRICS[name].better for name in ("seconds", "memory")} == {"less"}
    assert {METRICS[name].better for name in ("accuracy", "images_per_second")} == {"more"}
    assert METRICS["accuracy"].effect(0.0031, -0.0012, 0.0074) == "+0.31 points (−0.12 to +0.74)"
    assert METRICS["seconds"].effect(0.625, 0.601, 0.648) == "0.625× (0.601–0.648)"
    assert METRICS["seconds"].text(10.2, 9.98, 10.4) == "10.2 s (9.98–10.4)"
    assert METRICS["seconds_to_target"].title(0.9) == "time to 90.0%"


def test_two_or_three_values_that_leave_everything_open_have_no_interval() -> None:
    """Student's t with one or two degrees of freedom reaches from nothing to anything."""
    seconds, accuracy = METRICS["seconds"], METRICS["accuracy"]
    assert seconds.effect(2.09, 0.0000054, 816341.0, 2) == "2.09× (n=2: no interval)"
    assert seconds.effect(1.21, 0.5, 2.9, 3) == "1.21× (n=3: no interval)"
    assert seconds.effect(1.21, 0.5, 2.9, 4) == "1.21× (0.50–2.90)", "four know their spread"
    assert seconds.effect(1.21, 1.18, 1.24, 3) == "1.210× (1.180–1.240)", "three that agree say much"
    assert seconds.effect(3.5, 1.3, 9.4, 3) == "3.50× (1.30–9.40)", "what a verdict follows from is shown"
    assert seconds.effect(1.21, None, None, 2) == "1.21× (n=2: no interval)"
    assert seconds.effect(1.21, None, None, 9) == seconds.effect(1.21, None, None) == "1.21×"
    assert accuracy.effect(0.01, -0.2, 0.22, 2) == "+1.00 points (n=2: no interval)"
    assert accuracy.effect(0.01, -0.02, 0.04, 2) == "+1.00 points (−2.00 to +4.00)"
    assert seconds.text(458.0, 130.0, 1607.0, 2) == "458 s (n=2: no interval)"
    assert seconds.text(458.0, -130.0, 1607.0, 3) == "458 s (n=3: no interval)"
    assert seconds.text(458.0, 440.0, 470.0, 2) == "458 s (440–470)"
    assert METRICS["tensor_memory"].text(0.0, 0.0, 0.0, 2) == METRICS["tensor_memory"].text(0.0, 0.0, 0.0)


def test_the_page_has_the_table_of_units_and_no_other() -> None:
    put = re.search(r"const UNITS = (.*);", script_text("format.js"))
    assert put is not None
    assert json.loads(put.group(1)).keys() == units.UNITS.keys()
    scripts = "".join(path.read_text() for path in SRC.rglob("page/*.js"))
    assert not re.search('"(ms|GB|MiB|samples/s)"', scripts)
