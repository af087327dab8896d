"""Studies: cells that vary named factors, repeated in turns, and compared fairly (docs/studies.md).

>>> from lockstep.study import make, run_study
>>> mine = make("mine", factors={"ranks": [1, 2]}, repeats=5)
>>> document = run_study(mine, runs="runs")  # doctest: +SKIP

May import launch/ and below. Its door is `make`, `read` and `run_study`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.run import Options
from lockstep.study.definition import Study
from lockstep.study.file import make, read

__all__ = ["Study", "make", "read", "run_study"]


def run_study(
    study: Study, runs: Path | str | None = None, data_root: Path | str | None = None, again: bool = False
) -> dict[str, Any]:
    """Run what is left of a study, and return the comparison as a document."""
    from lockstep.study import compare, execute
    from lockstep.study.folder import StudyFolder
    from lockstep.study.plan import plan

    options = Options(data_root=str(data_root) if data_root else None, save_model=False)
    folder = StudyFolder.of(study.name, Path(runs) if runs else None)
    execute.run(folder, plan(study, options, folder.runs), options, again)
    return compare.study_document(folder)
