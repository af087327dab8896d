"""What the ranks of an attached command have told, put into the run folder: its placement while it goes on, its totals at the end."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np

from lockstep.inside.layout import ASIDES, ASIDES_FILE
from lockstep.inside.recorder import SEEN
from lockstep.machine import starving
from lockstep.measure.phases import common
from lockstep.measure.records import read_steps
from lockstep.placement import LAUNCHERS, Placement
from lockstep.run import Run, Spec, write_atomic
from lockstep.shapes import Spent

VERSIONS = ("python", "torch", "numpy")
COST = "hook_seconds"
"""Of what a rank tells of itself: what our hooks have cost (inside/recorder.py)."""
PLACED = ("launcher", "threads", "device", "backend", "strategy", "host", *VERSIONS)


def announce(run: Run, told: object) -> object:
    """While it goes on: state the placement as soon as it is known, and again when more ranks have told. Returns what was told."""
    facts = _facts(run)
    now = {rank: {key: each.get(key) for key in PLACED} for rank, each in facts.items()}
    if not now or now == told:
        return told
    if run.recorded_status()["state"] == "starting":
        recorded = run.recorded_status()
        run.write_status("running", **{key: recorded[key] for key in ("supervisor_pid", "host") if key in recorded})
    _state_placement(run, facts)
    return now


def conclude(run: Run, machine: Spent) -> None:
    """At the end: the placement, the number of steps, and the totals. `machine`: what other work had meanwhile."""
    facts = _facts(run)
    if not facts:
        return
    spec = _state_placement(run, facts)
    ranks = common([read_steps(run.rank_folder(rank) / "steps.bin") for rank in range(spec.plan.ranks)])
    steps = len(ranks[0])
    if not steps:
        return
    run.write_spec(msgspec.structs.replace(spec, plan=msgspec.structs.replace(spec.plan, total_steps=steps)))
    seconds = float(np.max([rows["total_ns"] for rows in ranks], axis=0).sum()) / 1e9
    asides = np.max([_asides(run.rank_folder(rank)) for rank in range(spec.plan.ranks)], axis=0) / 1e9
    batch = spec.plan.global_batch
    summary = {
        "steps": steps,
        "train_seconds": seconds,
        "eval_seconds": float(asides[0]),
        "checkpoint_seconds": float(asides[1]),
        "images_per_second": batch * steps / seconds if batch else None,
        "train_images": batch * steps if batch else None,
        "cores_had": _had(facts, machine),
        "hook_seconds": max(float(each.get(COST) or 0.0) for each in facts.values()),
    }
    write_atomic(run.folder / "summary.json", summary)


def _had(facts: dict[int, dict[str, Any]], machine: Spent) -> float | None:
    """By what the training threads of its ranks ran, and could have run."""
    used, waited = (
        sum(float(each.get(key) or 0.0) for each in facts.values()) for key in ("ran_seconds", "delayed_seconds")
    )
    return starving.had(Spent(used=used, waited=waited, others=machine["others"], stolen=machine["stolen"]))


def _facts(run: Run) -> dict[int, dict[str, Any]]:
    """By rank, what each has told of itself; those that have taken a step."""
    found = {int(beat["rank"]): {**beat.get(SEEN, {}), "host": beat.get("host")} for beat in run.rank_statuses()}
    return dict(sorted(found.items()))


def _state_placement(run: Run, facts: dict[int, dict[str, Any]]) -> Spec:
    first = facts[min(facts)]
    # Ranks of another host write into a folder of their own, unless both see this one.
    ranks = max(facts) + 1
    hosts = len({each["host"] for each in facts.values()})
    device = first.get("device")
    placement = Placement(
        launcher=_allowed("launcher", first.get("launcher"), "single"),
        hosts=hosts if ranks % hosts == 0 else 1,
        ranks=ranks,
        threads=first.get("threads"),
        pin=False,
        device=_allowed("device", device, "cpu"),
        backend=_allowed("backend", first.get("backend"), "auto"),
        strategy=first.get("strategy") or ("single" if ranks == 1 else "own"),
    )
    before = run.spec()
    spec = msgspec.structs.replace(before, placement=placement, plan=msgspec.structs.replace(before.plan, ranks=ranks))
    if spec != before:
        run.write_spec(spec)
    environment: dict[str, Any] = run.environment()
    environment |= {key: first[key] for key in VERSIONS if key in first}
    write_atomic(run.folder / "environment.json", environment)
    return spec


def _allowed(key: str, value: Any, otherwise: Any) -> Any:
    """A value that a placement can have."""
    known = LAUNCHERS if key == "launcher" else get_args(get_type_hints(Placement)[key])
    return value if value in known else otherwise


def _asides(folder: Path) -> tuple[int, int]:
    """Nanoseconds of evaluation and of checkpoints."""
    try:
        evaluation, checkpoint = ASIDES.unpack((folder / ASIDES_FILE).read_bytes()[: ASIDES.size])
    except (OSError, struct.error):  # the rank was killed before it had any
        return 0, 0
    return max(0, evaluation), max(0, checkpoint)
