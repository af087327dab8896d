"""One trial, from its request to its verdict."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec

from lockstep.errors import LockstepError, first_line
from lockstep.files import write_atomically
from lockstep.lab.own_code import REQUEST, VERDICT, Request, Verdict
from lockstep.lab.trials import Failed
from lockstep.lab.trials.racing import raced
from lockstep.text import printable

MODULES = {"all-reduce": "all_reduce", "strategy": "strategy", "kernel": "kernel", "loop": "loop"}


def main() -> None:
    folder = Path(sys.argv[1])
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request)
    (folder / REQUEST).unlink()  # with its token: what the student's code runs in cannot read it any more
    module = importlib.import_module(f"lockstep.lab.trials.{MODULES[request.kind]}")
    if request.reference:
        speed = raced(module.contenders(request, folder / "race"), request.seconds)
        verdict = Verdict(right=True, why="it was raced", speed=speed, token=request.token)
    else:
        wrong, checked, failed = "", "", False
        try:
            wrong, checked = module.judge(request, folder)
        except (LockstepError, Failed) as error:
            wrong, failed = first_line(error), isinstance(error, Failed)
        why = printable(wrong or checked)[:600]
        verdict = Verdict(right=not wrong, failed=failed, why=why, token=request.token)
    write_atomically(folder / VERDICT, msgspec.json.encode(verdict))


if __name__ == "__main__":
    main()
