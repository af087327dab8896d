"""One rank of one run: what everything in this room needs to know of its place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.backends.ranks import Rank
from lockstep.placement import Placement
from lockstep.plan import Plan
from lockstep.recipe import Recipe
from lockstep.run import Options, Run, Spec


@dataclass(frozen=True)
class Context:
    run: Run
    spec: Spec
    rank: Rank
    device: torch.device

    @property
    def recipe(self) -> Recipe:
        return self.spec.recipe

    @property
    def placement(self) -> Placement:
        return self.spec.placement

    @property
    def plan(self) -> Plan:
        return self.spec.plan

    @property
    def options(self) -> Options:
        return self.spec.options
