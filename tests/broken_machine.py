"""A machine that is broken in a stated way: the real child's way of trying (fork, wait, judge), with cases that need no torch.

`python broken_machine.py KIND [ISA]`: bf16 cases die, hang, fail or give wrong numbers unless ONEDNN_MAX_CPU_ISA is at or below ISA.
A signal's name as KIND: it ends the case, from outside.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from lockstep.machine.child import WrongNumbers, try_all
from lockstep.machine.cpu import ISAS

ORDER = list(ISAS)


def good() -> None:
    pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGILL)


def ended() -> None:
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])  # as somebody else would
    time.sleep(600)


def hang() -> None:
    time.sleep(600)


def refuse() -> None:
    raise RuntimeError("could not create a primitive")


def wrong() -> None:
    raise WrongNumbers


def main(kind: str, cure: str | None = None) -> None:
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA")
    cured = bool(cure and cap and ORDER.index(cap) <= ORDER.index(cure))
    if kind == "import" and not cured:
        die()  # as importing torch would
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "silent":
        hang()
    bad = (
        ended
        if kind.startswith("SIG")
        else {"die": die, "hang": hang, "refuse": refuse, "wrong": wrong, "import": good}[kind]
    )
    cases = {
        "fp32 small matrix products": good,
        "fp32 large matrix products": good,
        "bf16 small matrix products": good,
        "bf16 large matrix products": good if cured else bad,
        "bf16 large convolutions": good,
        "fp16 small matrix products": good,
        "int8 small linear layers": good if cured else refuse,
    }
    json.dump(try_all(cases, seconds=0.5 if kind == "hang" else 60.0), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
