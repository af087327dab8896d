"""`python -m lockstep.dashboard.maker`: one report as JSON on stdout, asked for as JSON on stdin.

In a process of its own: a run of a million steps takes hundreds of megabytes to look through, which are given back when it ends.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import msgspec

from lockstep import index
from lockstep.dashboard.live import LIVE_PLOTS
from lockstep.errors import LockstepError
from lockstep.process import die_with_parent
from lockstep.report.document import report
from lockstep.report.html import document
from lockstep.report.subject import ReadOnce, Subject, of_runs, of_study
from lockstep.report.views import Part, Report
from lockstep.run import Run
from lockstep.study.folder import StudyFolder

# Training goes first.
NICENESS = 10
# A run is explained beside others of its task: with ten thousand of them, those of about its time.
PEERS_EACH_WAY = 25


class Asked(msgspec.Struct):
    """Folders of runs, or that of a study; what is live is drawn by the page itself."""

    runs: list[str] = []
    study: str = ""
    live: bool = False


@dataclass(frozen=True)
class OneRun(Subject):
    """A single run, which does not read all others of its folder."""

    @cached_property
    def peers(self) -> list[Run]:
        own = [each.run for group in self.done for each in group.done]
        if not own:
            return []
        run, recipe = own[0], own[0].spec().recipe
        task = (recipe.model, recipe.data)
        same = [row for row in index.rows(run.folder.parent) if (row.get("model"), row.get("data")) == task]
        names = [row["id"] for row in same if row["state"] == "done"]
        place = names.index(run.id)
        near = names[max(0, place - PEERS_EACH_WAY) : place] + names[place + 1 : place + 1 + PEERS_EACH_WAY]
        return [run, *(ReadOnce(run.folder.parent / name) for name in near)]


def make(asked: Asked) -> Report:
    found = report([_subject(asked)])
    return msgspec.structs.replace(found, parts=[_without_live(part) for part in found.parts]) if asked.live else found


def _subject(asked: Asked) -> Subject:
    if asked.study:
        return of_study(StudyFolder(Path(asked.study)))
    found = of_runs([Run(Path(name)) for name in asked.runs])
    if found.kind != "run":
        return found
    return OneRun(**{field.name: getattr(found, field.name) for field in fields(found)})


def _without_live(part: Part) -> Part:
    return msgspec.structs.replace(part, charts=[chart for chart in part.charts if chart.id not in LIVE_PLOTS])


def main() -> None:
    die_with_parent()
    os.nice(NICENESS)
    try:
        found = make(msgspec.json.decode(sys.stdin.buffer.read(), type=Asked))
    except LockstepError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(document(found)))


if __name__ == "__main__":
    main()
