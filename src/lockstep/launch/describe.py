"""What a run would do, in words: the bytes it exchanges, and the command for each host."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from lockstep.run import Spec


def exchanged_bytes(spec: Spec) -> dict[str, Any]:
    """Gradient bytes per step and rank."""
    if spec.plan.ranks == 1:
        return {"bytes_per_step": 0, "line": "one rank: nothing is exchanged"}
    if spec.options.script:
        return {"bytes_per_step": None, "line": f"what {spec.recipe.model} exchanges is known to itself"}
    from lockstep import models

    parameters, payload = models.trained_size(spec.recipe)
    ranks = spec.plan.ranks
    # A ring all-reduce sends every byte twice, less the part that is already in place.
    sent = 2 * payload * (ranks - 1) // ranks
    local = spec.placement.strategy in ("local-sgd", "diloco")
    what = ": {:,} bytes of weights" if local else " per step: {:,} bytes of gradients"
    often = f"every {spec.placement.local_sgd.every} optimizer steps" if local else "once per optimizer step"
    line = (
        f"exchanged{what.format(payload)} ({parameters:,} parameters), {often}; "
        f"each rank sends about {sent:,} bytes (ring)"
    )
    return {"bytes_per_step": payload, "parameters": parameters, "sent_per_rank": sent, "line": line}


def host_commands(words: tuple[str, ...], folder: Path, spec: Spec) -> list[str]:
    """The command to type on each host; the folder may be shared between them or not."""
    options = spec.options
    more = ["--data-root", options.data_root] if options.data_root else []
    more += ["--time-limit", f"{options.time_limit_s:g}"] if options.time_limit_s else []
    common = ["lockstep", "run", *words, *more, "--runs", str(folder.parent), "--name", folder.name]
    return [shlex.join([*common, "--host-index", str(host)]) for host in range(spec.placement.hosts)]
