"""What the analyzers look at: one run with its records, what was measured beside it, and the runs it can be compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from lockstep.measure.records import read_steps
from lockstep.run import Run, Spec
from lockstep.ways import BESIDE, Way, read

Rows = np.ndarray[Any, Any]


class Evidence:
    """One finished run, read once. `peers` are other finished runs: of the study, or of the same folder of runs."""

    def __init__(
        self,
        run: Run,
        peers: Sequence[Run] = (),
        target: float | None = None,
        cells: Mapping[str, str] | None = None,
    ) -> None:
        """`target`: the accuracy that a recommendation is for; unstated, the one that all runs reached. `cells`: the names of
        the study's cells, by run id."""
        self.run, self.target, self.cells = run, target, cells or {}
        self.peers = [peer for peer in peers if peer.id != run.id]

    @cached_property
    def spec(self) -> Spec:
        return self.run.spec()

    @cached_property
    def summary(self) -> dict[str, Any]:
        return self.run.summary() or {}

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        return self.run.epochs()

    @cached_property
    def ranks(self) -> list[Rows]:
        """Every rank's steps after warm-up (all of them where there are no others), cut to the steps that all ranks have."""
        found = [read_steps(self.run.rank_folder(rank) / "steps.bin") for rank in range(self.spec.plan.ranks)]
        settled = [rows[rows["warmup"] == 0] if (rows["warmup"] == 0).any() else rows for rows in found]
        length = min(len(rows) for rows in settled)
        return [rows[:length] for rows in settled]

    @cached_property
    def ways(self) -> dict[str, Way]:
        """What `lockstep explain --measure` has measured for this run, by name; empty where it has not."""
        return read(self.run.folder / BESIDE)
