"""`--resume RUN`: the same recipe, from where it had come to, in a run folder of its own.

Nothing of the earlier run is written over. Its recipe is taken as it was; how long it goes on and where may be changed.
"""

from __future__ import annotations

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.recipe import MAY_CHANGE, Recipe, global_terms
from lockstep.run import Run
from lockstep.settings import dotted, load


def resumed(run: Run, words: tuple[str, ...]) -> tuple[Recipe, Placement]:
    """The recipe and the placement to go on with."""
    if not run.has_checkpoint:
        raise InputError(
            f"--resume {run.id}: it has no checkpoint (it was run without --checkpoint-every): start it anew"
        )
    spec = run.spec()
    was = global_terms(spec.recipe)
    stated = {key: value for key, value in dotted(was).items() if value is not None}
    recipe, placement = load([], words, base=stated)
    for key in Recipe.__struct_fields__:
        before, now = getattr(was, key), getattr(recipe, key)
        if now != before and key not in MAY_CHANGE:
            raise InputError(
                f"--resume {run.id}: {key} was {before}; only {', '.join(MAY_CHANGE)} and the placement may change"
            )
    # Without a word about the place it goes on where it was, to the last thread; with one, "auto" is worked out afresh.
    if placement == Placement():
        placement = spec.placement
    return recipe, placement
