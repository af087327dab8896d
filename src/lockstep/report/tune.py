"""What `lockstep tune` found as a part of the document: what to type, and what it would have cost to choose otherwise."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lockstep import units
from lockstep.report.views import Cell, Part, Said, Table
from lockstep.tune import Found, Otherwise

COLUMNS = ["instead", "takes", "interval", "changed in"]
# A choice that costs less than this is as good.
SAME = 0.02


def tune_part(found: Found, command: str, cost: str) -> Part:
    return Part(
        name="tune",
        kind="tune",
        headlines=[said(found, command, cost)],
        table=table(found.otherwise, cost),
        notes=[f"not tried: {one.words}: {one.reason}" for one in found.otherwise if one.ratio is None],
    )


def said(found: Found, command: str, cost: str) -> Said:
    """The answer in one sentence."""
    speed = f"{units.duration(found.step_seconds)} a step, {found.images_per_second:,.0f} samples/s"
    if found.default_ratio is None:
        verdict = f"{' '.join(found.words)}; what runs without tuning, {found.default}, does not run here"
    elif found.default_ratio < 1 + SAME:
        verdict = f"what runs without tuning, {found.default}: nothing that was tried is better"
    else:
        less = "fast" if cost == "seconds" else "cheap"
        interval = f"({found.default_low:.2f} to {found.default_high:.2f})"
        times = f"{found.default_ratio:.2f} times {interval} as {less} as without tuning"
        verdict = f"{' '.join(found.words)}: {times}"
    others = len([one for one in found.otherwise if one.ratio])
    tried = f"{units.counted(others, 'other choice')} {'was' if others == 1 else 'were'} raced, in {units.counted(len(found.races), 'stage')} and {found.seconds:.0f} s"
    return Said("Which way is best here?", verdict, f"{speed}; {tried}", command)


def table(otherwise: Sequence[Otherwise], cost: str) -> Table:
    rows = [
        [
            Cell(one.words),
            Cell(f"{one.ratio:.2f} times", one.ratio, faint=abs(one.ratio - 1) < SAME),
            Cell(f"{one.low or one.ratio:.2f} to {one.high or one.ratio:.2f}"),
            Cell("an earlier way" if one.around else "the best", faint=bool(one.around)),
        ]
        for one in otherwise
        if one.ratio is not None
    ]
    what = "time" if cost == "seconds" else "core-seconds"
    says = f"takes: {what} for a sample as a multiple of what the way takes that it was changed in, from ratios within rounds; the interval is two standard errors."
    return Table("tune", "Chosen otherwise", says, COLUMNS, rows, right=[1, 2], spare=[3])


def command_line(words: Sequence[str], found: Found) -> str:
    """What to type: the user's own words, and over them what was chosen."""
    chosen = list(found.words)
    if found.one_host:
        chosen += ["hosts=1", "link=none"]
    keys = {word.partition("=")[0] for word in chosen}
    if found.one_host:
        keys.add("rendezvous")
    kept = [word for word in words if word.partition("=")[0].replace("-", "_") not in keys]
    return f"lockstep run {shlex.join([*kept, *chosen])}"
