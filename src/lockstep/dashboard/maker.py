"""`python -m lockstep.dashboard.maker`: one report as JSON on stdout, requested as JSON on stdin.

It is a separate process because reading a run of a million steps takes hundreds of megabytes, which are freed when it ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from lockstep.dashboard.live import LIVE_PLOTS
from lockstep.errors import LockstepError
from lockstep.process import die_with_parent
from lockstep.report.curves import LOGGED
from lockstep.report.document import report
from lockstep.report.html import document
from lockstep.report.subject import Subject, of_runs, of_study
from lockstep.report.views import Part, Report
from lockstep.run import Run
from lockstep.study.folder import StudyFolder

# Training goes first.
NICENESS = 10


class Asked(msgspec.Struct):
    """Folders of runs, or that of a study; the page itself draws the live parts."""

    runs: list[str] = []
    study: str = ""
    live: bool = False


def make(asked: Asked) -> Report:
    found = report([_subject(asked)])
    return msgspec.structs.replace(found, parts=[_without_live(part) for part in found.parts]) if asked.live else found


def _subject(asked: Asked) -> Subject:
    return (
        of_study(StudyFolder(Path(asked.study))) if asked.study else of_runs([Run(Path(name)) for name in asked.runs])
    )


def _without_live(part: Part) -> Part:
    charts = [chart for chart in part.charts if chart.id not in LIVE_PLOTS and not chart.id.startswith(LOGGED)]
    return msgspec.structs.replace(part, charts=charts)


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
