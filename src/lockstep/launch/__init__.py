"""From a recipe and a placement to a finished run: check, plan, make the folder, start the ranks, watch them.

May import training/ and below; it never imports worker.py, but starts it. Its door is `prepare` and `execute`, and
`train` for both, with what is said about it.
"""

from __future__ import annotations

from lockstep.launch.api import train
from lockstep.launch.execution import execute
from lockstep.launch.launchers import starts_of
from lockstep.launch.preparation import prepare
from lockstep.launch.specification import specify

__all__ = ["execute", "prepare", "specify", "starts_of", "train"]
