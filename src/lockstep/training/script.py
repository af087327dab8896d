"""A script with the user's own loop, before it starts: what can be checked, and what stands for it in the run folder.

Without torch. The loop itself is in session.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.plugins import one_line
from lockstep.recipe import Recipe
from lockstep.run import Options

# What the script decides for itself: set in a placement, it would be passed over in silence.
_OF_RECIPES = ("micro_batch", "accumulation", "eval_batch", "memory_format", "zero", "max_restarts")
_FOR_SCRIPTS = ("save_model", "script", "script_args", "turns")


def script_recipe(recipe: Recipe, placement: Placement, options: Options) -> Recipe:
    """Check what the user asked for; returns the recipe that stands for the script. What it computes is known to itself."""
    assert options.script is not None
    script = Path(options.script)
    _check_file(script)
    for key, value in _changed(recipe, ()):
        raise InputError(f"{key}={value} has no effect on {script.name}, which has its own loop: pass it on after '--'")
    for key, value in _changed(placement, tuple(k for k in placement.__struct_fields__ if k not in _OF_RECIPES)):
        raise InputError(f"{key}={value} has no effect on {script.name}, which has its own loop: leave it out")
    if placement.strategy == "fsdp":
        # Its gradients go to an optimizer of ours; one that the script makes would see none, and nothing would be learnt.
        raise InputError(
            f"strategy=fsdp does not go with {script.name}, which has its own optimizer: choose strategy=ddp"
        )
    for key, _ in _changed(options, _FOR_SCRIPTS):
        word = "--" + key.removesuffix("_s").replace("_", "-")
        raise InputError(f"{word} has no effect on {script.name}, which has its own loop: leave it out")
    stands_for = sum(placement.shares) if isinstance(placement.shares, list) else placement.ranks
    return Recipe(model=script.name, data="own data", global_batch=stands_for)


def _changed(chosen: msgspec.Struct, passed_over: tuple[str, ...]) -> list[tuple[str, Any]]:
    default = type(chosen)()
    return [
        (key, value)
        for key in chosen.__struct_fields__
        if key not in passed_over and (value := getattr(chosen, key)) != getattr(default, key)
    ]


def _check_file(script: Path) -> None:
    """A script that is not there or not Python is one line before anything starts."""
    try:
        compile(script.read_bytes(), str(script), "exec")
    except OSError as error:
        raise InputError(f"script {script}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise InputError(f"script {script} is not Python: {one_line(error)}") from None
