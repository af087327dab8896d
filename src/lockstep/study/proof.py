"""Whether a cell computes what its recipe says: a short `verify`, before its accuracy is taken from trainings that were made elsewhere.

What was proven is remembered in the folder of runs, so it is proven once for each recipe, kind of placement and version.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from lockstep.errors import InputError, RunFailed
from lockstep.measure.environment import version_of
from lockstep.run import Spec
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Cell, Planned
from lockstep.verify.prove import verify
from lockstep.verify.verified import find, record

FOLDER = ".verify"
"""Within the study's folder, while a cell is being proven."""


def unproven(planned: Planned) -> list[Cell]:
    """Cells that compute what others compute too, in another way than one process does; that one has nothing to prove."""
    return [cell for cell in planned.cells if _shared(planned, cell) and _other_way(cell)]


def _other_way(cell: Cell) -> bool:
    accumulates = cell.plan is not None and cell.plan.accumulation > 1
    return cell.placement.ranks > 1 or accumulates or cell.placement.strategy == "dp"


def _shared(planned: Planned, cell: Cell) -> bool:
    return cell.takes_turns and len(planned.alike(cell.name)) > 1


def known(root: Path, cell: Cell) -> bool:
    versions = {name: version_of(name) for name in ("torch", "lockstep")}
    return find([root], _spec(cell), versions) is not None


def prove(study: StudyFolder, cell: Cell, data_root: str | None) -> str | None:
    """None where it computes the same as one process, else what does not agree."""
    folder = study.path / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
    try:
        verdict = verify(cell.recipe, cell.placement, folder, data_root, short=True)
    except (RunFailed, InputError) as error:
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not verdict.proven_specs:
        return "; ".join(verdict.lines[1:]) or "nothing of it could be compared"
    failed = [check for check in verdict.checks if not check.passed]
    if failed:
        first = failed[0]
        return f"{first.what} ({first.against}) differs by {first.difference:.1e}, allowed are {first.allowed:.1e}"
    record(study.runs, [*verdict.proven_specs, _spec(cell)], len(verdict.checks), verdict.steps)
    return None


def _spec(cell: Cell) -> Spec:
    assert cell.plan is not None
    return Spec(id=cell.name, created=0.0, lockstep="", recipe=cell.recipe, placement=cell.placement, plan=cell.plan)
