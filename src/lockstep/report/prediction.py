"""The band of `lockstep predict` in the scaling curve, where this machine has a fit of the baseline's recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.errors import InputError
from lockstep.report.views import Series, shorts
from lockstep.run import Spec

# How far beyond what was run it looks, as a factor.
FURTHER = 4


def predicted(base: Spec, most_cores: int, weak: Sequence[bool]) -> tuple[list[Series], str]:
    """Speed-up beside one rank, strong or weak, and what to say of it; nothing where there is no fit, or the model does not know the placement."""
    from lockstep.predict import fit as fits
    from lockstep.predict.document import ask, earned
    from lockstep.predict.here import as_asked, here
    from lockstep.predict.scaling import table

    if not weak or base.plan.ranks != 1 or base.options.own_loop:
        return [], ""
    try:
        recipe, placement, _ = here(base.recipe, as_asked(base), weak=any(weak))
        fit = fits.load(recipe, placement)
        if fit is None:
            return [], ""
        threads = placement.threads or 1
        counts = [2**power for power in range(11) if 2**power * threads <= FURTHER * most_cores]
        asked = {kind: ask(fit, recipe, placement, weak=kind) for kind in weak}
        rows = {kind: table(fit, asked[kind][0], counts) for kind in weak}
    except InputError:
        return [], ""
    figures, text = earned(fit)
    assumed = next(iter(asked.values()))[1]
    earned_by = figures["kinds"] if figures else {}
    return [_line(fit, kind, rows[kind], threads, earned_by) for kind in weak], f" Predicted: {text}. {assumed[0]}"


def _line(fit: Any, weak: bool, rows: Sequence[Any], threads: int, earned: dict[str, Any]) -> Series:
    from lockstep.predict.interval import NEARLY_SURE, interval, kind_of

    known = [row for row in rows if row.step]
    speeds = [row.speed_up for row in known]
    # A step that takes longer by some factor gives that much less speed-up. Where nothing of the kind was checked there is no band.
    factors = [interval(1.0, kind_of(fit, row.case), row.ranks, earned, NEARLY_SURE) for row in known]
    low = [speed / found.high if found else None for speed, found in zip(speeds, factors, strict=True)]
    high = [speed / found.low if found else None for speed, found in zip(speeds, factors, strict=True)]
    return Series(
        name=f"predicted, {'weak' if weak else 'strong'}",
        colour="c6" if weak else "c7",
        dash=True,
        x=[row.ranks * threads for row in known],
        y=shorts(speeds),
        low=shorts(low) if earned else [],
        high=shorts(high) if earned else [],
        role="predicted",
    )
