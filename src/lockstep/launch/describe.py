"""What a run would do, in words: the bytes it exchanges, and the command for each host."""

from __future__ import annotations

import shlex
from typing import Any

from lockstep.run import Spec


def exchanged_bytes(spec: Spec) -> dict[str, Any]:
    """Gradient bytes per step and rank."""
    if spec.plan.ranks == 1:
        return {"bytes_per_step": 0, "line": "one rank: nothing is exchanged"}
    if spec.options.script:
        return {"bytes_per_step": None, "line": f"what {spec.recipe.model} exchanges is known to itself"}
    from lockstep import models

    size = models.trained_size(spec.recipe)
    if size is None:
        return {
            "bytes_per_step": None,
            "line": "what is exchanged is known once the model's lazy layers have seen data",
        }
    parameters, payload = size
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


def host_commands(words: tuple[str, ...], options: list[str], hosts: int) -> list[str]:
    """The command to type on each host; the run's folder may be shared between them or not."""
    # Of the user's script: only `--` keeps them from being ours.
    own_options = any(word.startswith("-") for word in words)
    commands = []
    for host in range(hosts):
        ours = [*options, "--host-index", str(host)]
        commands.append(["lockstep", "run", *([*ours, "--", *words] if own_options else [*words, *ours])])
    return [shlex.join(command) for command in commands]
