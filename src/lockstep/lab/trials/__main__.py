"""One trial, from its request to its verdict."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec

from lockstep.errors import LockstepError, first_line
from lockstep.files import write_atomically
from lockstep.lab.own_code import RACES, REQUEST, VERDICT, Request, Speed, Verdict
from lockstep.lab.trials import Failed
from lockstep.lab.trials.racing import raced
from lockstep.text import printable

MODULES = {"all-reduce": "all_reduce", "strategy": "strategy", "kernel": "kernel", "loop": "loop"}


def main() -> None:
    folder = Path(sys.argv[1])
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request)
    module = importlib.import_module(f"lockstep.lab.trials.{MODULES[request.kind]}")
    wrong, checked, failed = "", "", False
    try:
        wrong, checked = module.judge(request, folder)
    except (LockstepError, Failed) as error:
        wrong, failed = first_line(error), isinstance(error, Failed)
    verdict = Verdict(right=not wrong, failed=failed, why=printable(wrong or checked)[:600])
    # Written before the race, too: what is ended there is right all the same.
    write_atomically(folder / VERDICT, msgspec.json.encode(verdict))
    if verdict.right and request.reference:
        speed = Speed()
        for attempt in range(RACES):
            speed = raced(module.contenders(request, folder / f"race-{attempt + 1}"), request.seconds)
            if not speed.failed:
                break
        verdict = msgspec.structs.replace(verdict, speed=speed)
        write_atomically(folder / VERDICT, msgspec.json.encode(verdict))


if __name__ == "__main__":
    main()
