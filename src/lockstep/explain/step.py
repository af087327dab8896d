"""Where does a step go? Each phase's mean per rank (`measure.phases`); waiting is told apart from exchange."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.machine import starving
from lockstep.measure.phases import NAMES, waited_for
from lockstep.statistics import MARGIN_RATIO
from lockstep.units import counted, duration, percent


def answer(evidence: Evidence) -> Iterator[Finding]:
    parts, mean = evidence.run.split(), evidence.step
    if not parts:
        return
    steps = len(evidence.ranks[0])
    most = {name: max(part[name] for part in parts) for name in mean}
    largest = max(NAMES, key=lambda name: mean[name])
    share = ", ".join(
        f"{name} {percent(mean[name] / mean['total'])}" for name in NAMES if mean[name] > 0.0005 * mean["total"]
    )
    owner = f"; {waited_for(evidence.ranks)}" if mean["waiting"] > MARGIN_RATIO * mean["total"] else ""
    most_of = f"most of a step is {largest}: {duration(mean[largest])} of {duration(mean['total'])}"
    # Waiting for a core makes longer whichever phase it falls into.
    spoilt = f"other work had the cores: where the {duration(mean['total'])} of a step go is not known"
    yield Finding(
        verdict=spoilt if starving.starved(evidence.run.cores_had) else most_of,
        why=f"mean over {counted(len(parts), 'rank')} and {counted(steps, 'step')}: {share}{owner}",
        figures={"mean_s": mean, "max_s": most, "ranks": parts, "steps": steps},
    )
