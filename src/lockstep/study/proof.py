"""Whether a cell computes what its recipe says: a short `verify`, before its accuracy is taken from trainings that were made elsewhere.

What was proven is remembered in the folder of runs, so it is proven once for each recipe, kind of placement and version.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from lockstep.errors import RunFailed
from lockstep.measure.environment import version_of
from lockstep.run import Spec
from lockstep.study.plan import Cell, Planned
from lockstep.verify.prove import verify
from lockstep.verify.verified import find, record


def unproven(planned: Planned) -> list[Cell]:
    """Cells with several ranks that compute what others compute too. One process has nothing to prove: it is what the others are compared with."""
    return [cell for cell in planned.cells if _shared(planned, cell) and cell.placement.ranks > 1]


def _shared(planned: Planned, cell: Cell) -> bool:
    return cell.takes_turns and len(planned.alike(cell.name)) > 1


def known(root: Path, cell: Cell) -> bool:
    versions = {name: version_of(name) for name in ("torch", "lockstep")}
    return find([root], _spec(cell), versions) is not None


def prove(root: Path, cell: Cell, data_root: str | None) -> str | None:
    """None where it computes the same as one process, else what does not agree."""
    folder = Path(tempfile.mkdtemp(prefix=".verify-", dir=root))
    try:
        verdict = verify(cell.recipe, cell.placement, folder, data_root, short=True)
    except RunFailed as error:
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    failed = [check for check in verdict.checks if not check.passed]
    if failed:
        first = failed[0]
        return f"{first.what} ({first.against}) differs by {first.difference:.1e}, allowed are {first.allowed:.1e}"
    record(root, [*verdict.proven_specs, _spec(cell)], len(verdict.checks), verdict.steps)
    return None


def _spec(cell: Cell) -> Spec:
    assert cell.plan is not None
    return Spec(id=cell.name, created=0.0, lockstep="", recipe=cell.recipe, placement=cell.placement, plan=cell.plan)
