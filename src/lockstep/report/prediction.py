"""The band of `lockstep predict` in the scaling curve, where this machine has a fit of the baseline's recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import InputError
from lockstep.report.views import Series, short, shorts
from lockstep.run import Spec

# How far beyond what was run it looks, as a factor.
FURTHER = 4


@dataclass(frozen=True)
class Predicted:
    series: list[Series]
    says: str = ""


def predicted(base: Spec, most_cores: int, weak: Sequence[bool]) -> Predicted:
    """Speed-up beside one rank, strong or weak; nothing where there is no fit, or the model does not know the placement."""
    from lockstep.predict import fit as fits
    from lockstep.predict.document import ask, earned
    from lockstep.predict.here import here
    from lockstep.predict.scaling import table

    if not weak or base.plan.ranks != 1 or base.options.script:
        return Predicted([])
    try:
        recipe, placement, _ = here(base.recipe, base.placement)
        fit = fits.load(recipe, placement)
        if fit is None:
            return Predicted([])
        threads = placement.threads or 1
        counts = [2**power for power in range(11) if 2**power * threads <= FURTHER * most_cores]
        options: dict[str, Any] = {"link": None, "per_host": None, "batch": None, "algorithm": "auto", "every": None}
        asked = {kind: ask(fit, recipe, placement, weak=kind, **options) for kind in weak}
        rows = {kind: table(fit, asked[kind][0], counts) for kind in weak}
    except InputError:
        return Predicted([])
    figures, text = earned()
    return Predicted(
        [_line(kind, rows[kind], threads, figures) for kind in weak],
        f" Predicted: {text}. {next(iter(asked.values()))[1][0]}",
    )


def _line(weak: bool, rows: Sequence[Any], threads: int, figures: dict[str, Any] | None) -> Series:
    known = [row for row in rows if row.step]
    speeds = [row.speed_up for row in known]
    # A step that takes longer than predicted by `highest` gives that much less speed-up.
    low = [speed / (1 + max(0.0, figures["highest"])) for speed in speeds] if figures else []
    high = [speed / (1 + min(0.0, figures["lowest"])) for speed in speeds] if figures else []
    return Series(
        name=f"predicted, {'weak' if weak else 'strong'}",
        colour="c6" if weak else "c7",
        dash=True,
        x=[row.ranks * threads for row in known],
        y=shorts(speeds),
        low=[short(speed) for speed in low],
        high=[short(speed) for speed in high],
        role="predicted",
    )
