"""One call of `study run`: what it has found and made so far, and what is to be made next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import RunCancelled
from lockstep.launch.supervise import Progress
from lockstep.run import Options, Run
from lockstep.study import estimate
from lockstep.study.estimate import Estimate
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import LOOKS, Item, Planned
from lockstep.study.seeds import undecided
from lockstep.turns import Race

# A cell that failed this often and never succeeded is not tried again: it would fail again.
GIVE_UP_AFTER = 2


@dataclass
class Step:
    """The progress of the study, for display."""

    item: Item
    place: str
    """The cell in which it is trained."""
    number: int
    total: int
    left_seconds: float


class Watcher:
    """Receives events; this one ignores them."""

    def raced(self, race: Race) -> None:
        return None

    def begins(self, step: Step) -> Progress | None:
        return None

    def ended(self, step: Step, record: dict[str, Any]) -> None:
        return None

    def says(self, text: str) -> None:
        return None


@dataclass
class Session:
    """One call of `run`: its arguments and its state."""

    folder: StudyFolder
    planned: Planned
    options: Options
    runs: Path
    watcher: Watcher
    states: dict[str, str] = field(default_factory=dict)
    """By digest: done, failed, to do."""
    jobs: dict[str, Run] = field(default_factory=dict)
    """By digest: Slurm jobs that an earlier call left under way."""
    cut: dict[str, Run] = field(default_factory=dict)
    """By digest: trainings that an earlier call did not bring to their end, and that have a checkpoint."""
    costs: dict[str, float] = field(default_factory=dict)
    """By cell: seconds for an image, where it has raced."""
    failed_in: set[tuple[str, str]] = field(default_factory=set)
    """Recipes (by their first cell), and cells in which their training failed."""
    spent: float = 0.0
    clock: Callable[[], float] = time.time

    def needed(self) -> list[Item]:
        """The trainings that are to be made next: up to the first look at which not all are, of those that are not told apart by then."""
        undecided_yet = {item.cell for item in self.planned.items}
        for look in LOOKS:
            items = [
                item
                for item in self.planned.items
                if item.repeat < look * self.planned.study.repeats and item.cell in undecided_yet
            ]
            to_do = [item for item in items if self.states[item.digest] == "to do" and not self.given_up(item.cell)]
            if to_do:
                return to_do
            undecided_yet = undecided(self.folder, self.planned, look * self.planned.study.repeats)
        return []

    def place(self, item: Item) -> str:
        """The cell in which this is trained: the fastest of those that compute it."""
        alike = [cell.name for cell in self.planned.alike(item.cell) if cell.left_out is None]
        if (cut := self.cut.get(item.digest)) and (part := cut.spec().part) and part.cell in alike:
            return part.cell  # on the same placement it has the same bits as if it had never stopped
        able = [name for name in alike if (item.cell, name) not in self.failed_in] or alike
        return min(able, key=lambda name: self.costs.get(name, math.inf))

    def step(self, item: Item, left_seconds: float = 0.0) -> Step:
        done = sum(state != "to do" for state in self.states.values())
        return Step(item, self.place(item), done + 1, done + len(self.needed()), left_seconds)

    def seconds(self) -> dict[str, Estimate]:
        """How long a training in each cell takes, as far as that is known."""
        return estimate.of_cells(self.planned, self.folder.records(), self.runs, self.costs)

    def stopped(self) -> RunCancelled:
        return RunCancelled(f"stopped; run the same command again to go on with study '{self.folder.name}'")

    def given_up(self, cell: str) -> bool:
        alike = [other for other in self.planned.alike(cell) if other.left_out is None]
        if any((cell, other.name) not in self.failed_in for other in alike) and len(alike) > 1:
            return False
        states = [self.states[item.digest] for item in self.planned.items if item.cell == cell]
        return "done" not in states and states.count("failed") >= GIVE_UP_AFTER
