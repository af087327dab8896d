"""`lockstep.train`: a run from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.launch.execution import execute
from lockstep.launch.preparation import prepare
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.run import Options, Run


def train(
    recipe: Recipe | None = None,
    placement: Placement | None = None,
    *,
    runs: Path | str | None = None,
    name: str | None = None,
    data_root: Path | str | None = None,
    **options: Any,
) -> Run:
    """Train a recipe on a placement, in processes of its own, and return the finished run.

    >>> import lockstep
    >>> run = lockstep.train(lockstep.Recipe(global_batch=256, epochs=1), lockstep.Placement(ranks=2))  # doctest: +SKIP
    >>> run.summary()["test_accuracy"]  # doctest: +SKIP
    """
    unknown = [name for name in options if name not in Options.__struct_fields__]
    if unknown:
        raise InputError(
            f"lockstep.train has no option '{unknown[0]}': it has {', '.join(Options.__struct_fields__)}; "
            "what is computed belongs into Recipe, where into Placement"
        )
    chosen = Options(data_root=str(data_root) if data_root else None, **options)
    run, spec = prepare(recipe or Recipe(), placement or Placement(), chosen, Path(runs) if runs else None, name)
    return execute(run, spec)
