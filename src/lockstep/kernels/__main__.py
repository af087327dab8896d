"""Compiles the kernels and tries them: what the first run on a machine starts beside its own preparations."""

from __future__ import annotations

import sys

from lockstep.kernels import trial
from lockstep.machine.native_code import CannotBuild

if __name__ == "__main__":
    try:
        trial.best_target()
    except CannotBuild as error:
        sys.exit(f"lockstep: {error}")
