"""What a run is, before it starts: recipe, placement and plan, and what it does beside training."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from lockstep import shapes
from lockstep.placement import Placement
from lockstep.plan import Plan
from lockstep.recipe import Recipe

FORMAT = 1
# What of its placement an attached command shows.
SEEN = ("launcher", "hosts", "ranks", "threads", "device", "backend", "strategy")


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Instead of training, measure ways to take a step against each other (training/probe.py)."""

    batches: list[int] = []
    """Further sizes of one rank's batch, beside the recipe's own and its double."""
    seconds: float = 12.0


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Write down every step for `lockstep verify` (training/witness.py)."""

    reference: str | None = None
    """The folder of the run whose states this one starts its steps from; None: this run is that reference."""
    keep: bool = True
    """Keep tensors; false: digests alone, which is enough to see whether two runs are the same bits."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does beside training: neither the mathematics nor the place."""

    data_root: str | None = None
    time_limit_s: float | None = None
    proof: Proof | None = None
    save_model: bool = True
    checkpoint_every: int | None = None
    """Keep a checkpoint every N epochs, and at the end."""
    checkpoint_steps: int | None = None
    """Keep one every N steps, too."""
    keep_checkpoints: int = 2
    resume_from: str | None = None
    """The run folder whose last checkpoint this run goes on from."""
    kernels_of: str | None = None
    """The run folder whose choice of kernels this run takes, so that the two can have the same bits."""
    script: str | None = None
    """The user's own training loop, instead of the recipe's."""
    script_args: list[str] = []
    attached: list[str] | None = None
    """The command of a training that Lockstep only looks at (attach/): what it computes is known to itself."""
    probe: Probe | None = None
    turns: bool = False
    """Instead of training to an end, take windows of steps when asked (training/turns.py)."""
    trace: int | None = None
    """Keep the timeline of N steps after warm-up (docs/timeline.md)."""
    profile: int | None = None
    """Let torch's profiler look at the N steps after those."""
    sleep_to_wait: bool = False
    """Threads that wait for each other sleep at once, since other work had the cores when the run began (launch/waiting.py)."""

    @property
    def own_loop(self) -> bool:
        """Whether the loop is the user's own, which only the user can change."""
        return self.script is not None or self.attached is not None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a run in a study: the cell that it was trained in, and which repeat it is."""

    study: str
    cell: str
    block: int


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a run before it starts: the contents of run.json."""

    format: int = FORMAT
    id: str
    created: shapes.Moment
    lockstep: str
    recipe: Recipe
    placement: Placement
    plan: Plan
    options: Options = Options()
    data_origin: str = ""
    why: dict[str, str] = {}
    """Why each setting that was not stated came to what it is, by its key (resolve/)."""
    why_backend: str | msgspec.UnsetType = msgspec.UNSET
    """Of version 0.1; now an entry of `why`."""
    command: list[list[str]] = []
    """The exact launch command, environment included: one list of words per process that the first host starts."""
    part: Part | None = None
    """Of which study it is a run, where it is one."""

    def __post_init__(self) -> None:
        if self.why_backend is not msgspec.UNSET:
            told = self.why_backend.removeprefix(f"{self.placement.backend}: ")
            msgspec.structs.force_setattr(self, "why", {"backend": told, **self.why} if told else self.why)
            msgspec.structs.force_setattr(self, "why_backend", msgspec.UNSET)
        if self.plan.ranks != self.placement.ranks or self.placement.ranks % self.placement.hosts:
            raise ValueError(
                f"{self.plan.ranks} planned ranks, {self.placement.ranks} on {self.placement.hosts} hosts do not go together"
            )

    @property
    def gives_way(self) -> bool:
        """Whether its job leaves its nodes when they are wanted back, and goes on later; a race or a probe has no checkpoint to go on from."""
        asked = self.placement.launcher == "slurm" and self.placement.slurm.requeue
        return asked and not (self.options.turns or self.options.probe)

    def known(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of recipe and placement. Of an attached command those that were seen or told: the others are not defaults, but unknown."""
        recipe, placement = msgspec.to_builtins(self.recipe), msgspec.to_builtins(self.placement)
        if self.options.attached is None:
            return recipe, placement
        told = ("model", "global_batch") if self.plan.global_batch else ("model",)
        command = shlex.join(self.options.attached)
        return {"command": command, **{key: recipe[key] for key in told}}, {key: placement[key] for key in SEEN}

    def decisions(self) -> list[tuple[str, str, str]]:
        """Setting, value and reason of everything that Lockstep decided; what is not a setting of its own has no value."""
        stated = {**msgspec.to_builtins(self.recipe), **msgspec.to_builtins(self.placement)}
        stated |= {f"ddp.{key}": value for key, value in stated["ddp"].items()}
        return [(key, str(stated.get(key, "")), reason) for key, reason in self.why.items()]
