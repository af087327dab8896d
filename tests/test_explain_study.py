"""What `explain` recommends within a study, whose cells share trainings and were timed in turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from lockstep.explain import recommend
from lockstep.explain.evidence import Evidence, study_of
from lockstep.explain.finding import Finding
from lockstep.report.findings import findings
from lockstep.report.subject import of_study as subject_of
from lockstep.run import Part, Run, write_atomic
from lockstep.study.gather import of_study
from support import Cli
from test_study_turns import Made


def made(root: Path, **costs: float) -> Made:
    """One rank was trained, and two ranks, which compute the same, were not: their times are from the race."""
    study = Made(root, factors={"ranks": [1, 2]}, repeats=3)
    if costs:
        study.race({"ranks=1": costs["one"], "ranks=2": costs["two"]})
    study.train({"ranks=1": [0.9, 0.91, 0.92]})
    return study


def trained(study: Made) -> Run:
    return next(each.run for each in of_study(study.folder, study.planned)[0].done)


def recommended(study: Made) -> Finding:
    (found,) = recommend.answer(Evidence(trained(study), cells=of_study(study.folder, study.planned)))
    return found


def test_a_cell_that_shares_its_trainings_is_recommended_by_its_time_in_the_race(tmp_path: Path) -> None:
    found = recommended(made(tmp_path, one=100.0, two=60.0))
    assert "choose ranks=2" in found.verdict
    assert "(faster, n = 6 starts)" in found.verdict
    assert abs(found.cost - 0.4) < 0.02
    assert "ranks=2" in found.next.split()
    assert "seed" not in found.next


def test_what_is_the_same_is_not_recommended(tmp_path: Path) -> None:
    found = recommended(made(tmp_path, one=100.0, two=99.9))
    assert found.verdict.startswith("nothing that was run here reaches")
    assert found.cost == 0


def test_cells_that_were_not_timed_are_not_called_settings_that_were_not_run(tmp_path: Path) -> None:
    found = recommended(made(tmp_path))
    assert "no other cell of this study was timed" in found.verdict
    assert "only this setting was run" not in found.verdict


def test_what_is_not_settled_needs_more_of_what_it_was_timed_by(tmp_path: Path) -> None:
    """In a study, more time for its race, or more seeds of its trainings; beside other runs, those of both."""
    study = Made(tmp_path / "raced", factors={"ranks": [1, 2]}, repeats=3)
    study.race({"ranks=1": 100.0, "ranks=2": 80.0}, noise=0.3)
    study.train({"ranks=1": [0.9, 0.91, 0.92]})
    assert recommended(study).next == "more race_minutes in the study's file, and its own command again"
    study = Made(tmp_path / "trained", factors={"global_batch": [24, 48]}, repeats=3)
    study.train({"global_batch=24": [0.9, 0.91, 0.92]}, seconds=10.0)
    study.train({"global_batch=48": [0.9, 0.91, 0.92]}, seconds=6.0)
    assert recommended(study).next == "the study's own command again, with --repeats 6"
    cells = of_study(study.folder, study.planned)
    peers = [each.run for cell in cells for each in cell.done]
    (found,) = recommend.answer(Evidence(trained(study), peers, cells=cells[:1]))
    seed = max(run.spec().recipe.seed for run in peers)
    assert found.next == f"repeat both with another seed: seed={seed + 1}", "the study has no other cell"


def test_one_run_of_a_study_is_explained_beside_its_cells(tmp_path: Path, cli: Cli) -> None:
    study = made(cli.runs, one=100.0, two=60.0)
    run = trained(study)
    assert not study_of(run), "it does not say that it is of a study"
    spec = msgspec.structs.replace(run.spec(), part=Part(study="mine", cell="ranks=1", block=0))
    write_atomic(run.folder / "run.json", msgspec.to_builtins(spec))
    assert [group.name for group in study_of(Run(run.folder))] == ["ranks=1", "ranks=2"]
    for name in (run.id, "mine"):
        document: dict[str, Any] = json.loads(cli("explain", name, "-q", "recommendation", "--json").stdout)
        assert "choose ranks=2" in document["findings"][0]["verdict"], name
    said = [said for about in findings(subject_of(study.folder)) for said in about.findings]
    assert [each for each in said if "choose ranks=2" in each.verdict]
    assert not [each for each in said if "only this setting" in each.verdict]
    (study.folder.path / "study.json").write_text("{")
    assert study_of(Run(run.folder)) == [], "a damaged study hides no run"
