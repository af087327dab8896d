"""Which of our libraries works here, found by trying it in a child process: a machine may advertise instructions and trap on them.

`python -m lockstep.kernels.trial TARGET` is the child. It tries as the machine's own child does (machine/child.py), with the same
whole numbers, and so a right result is within 1/4 of float64's. What it found is kept beside the library.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

from lockstep.files import find_once
from lockstep.kernels import build
from lockstep.machine import child, facts
from lockstep.machine.native_code import CannotBuild, folder, has_compiler
from lockstep.machine.trial import Answers, NotKnown, answers, failed
from lockstep.run import read_json, write_atomic

FORMAT = 1
CHILD = (sys.executable, "-m", "lockstep.kernels.trial")


def best_target() -> str:
    """The best target that may run and was seen to, or what LOCKSTEP_KERNELS_ISA names."""
    able = build.able()
    asked = os.environ.get("LOCKSTEP_KERNELS_ISA")
    if asked and asked not in able:
        raise CannotBuild(f"LOCKSTEP_KERNELS_ISA={asked} cannot run here: choose one of {', '.join(able)}")
    wrong: list[str] = []
    for name in [asked] if asked else able:
        problem = _problem(name)
        if problem is None:
            if wrong:
                warnings.warn(f"FusedConvReLU uses its {name} kernels: {wrong[0]}", stacklevel=4)
            return name
        wrong.append(problem)
    raise CannotBuild(wrong[0])


def is_known() -> bool:
    """Whether all is compiled and tried that `best_target` would ask for; where nothing can be compiled, there is nothing to wait for."""
    if not has_compiler():
        return True
    for name in build.able():
        found = _read(path(name)) if build.sources_for(name).path().is_file() else None
        if found is None:
            return False
        if not failed(found):
            break
    return True


def _problem(name: str) -> str | None:
    """What is wrong with a target's library, in one line."""
    try:
        found = ask(name)
    except NotKnown as error:
        raise CannotBuild(f"whether the {name} kernels work could not be tried: {error}") from None
    return next((f"with {name}, {case} {found[case]} on this machine" for case in failed(found)), None)


def ask(name: str) -> Answers:
    """What is kept, or found out now."""
    build.library(name)  # compiled before it is tried: the child's time limit is for trying
    where = path(name)
    return find_once(
        where,
        f"trying the {name} kernels",
        lambda: _read(where),
        lambda: answers({**os.environ, "OMP_NUM_THREADS": "1"}, (*CHILD, name)),
        lambda found: write_atomic(where, found),
    )


def path(name: str) -> Path:
    seen = f"{FORMAT} {sorted(facts.depends_on().items())} {build.fingerprint(name)}"
    return folder() / f"tried-{name}-{hashlib.sha256(seen.encode()).hexdigest()[:16]}.json"


def _read(where: Path) -> Answers | None:
    """A damaged file is as good as none."""
    found = read_json(where)
    if not found or not all(isinstance(problem, str) for problem in found.values()):
        return None
    return found


def cases(name: str) -> dict[str, child.Case]:
    """Every way and number format. The names complete the sentence "NAME end with SIGILL on this machine"."""
    convolutions = {
        f"{kind} {'Winograd' if winograd else 'direct'} kernels": partial(_case, name, kind, winograd)
        for kind in ("fp32", "bf16")
        for winograd in (False, True)
    }
    return {**convolutions, "linear kernels": partial(_linear, name)}


def _case(name: str, kind: str, winograd: bool) -> None:
    """Forward and backward in both memory orders, with each tail, against float64."""
    import torch

    from lockstep.kernels import op
    from lockstep.kernels.native import Native
    from lockstep.kernels.way import Tail

    kernels = Native(name)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
    # The bias has halves, so that no result is zero: there rounding would decide what the ReLU lets through.
    exact = [child.numbers(2, 16, 16, 16), child.numbers(16, 16, 3, 3), child.numbers(16) + 0.5]
    # Gradients that no ReLU has thinned out add up to more than bf16 has digits for.
    for tail in Tail if kind == "fp32" else (Tail.RELU, Tail.RELU_POOL):
        for order in (torch.contiguous_format, torch.channels_last):
            wanted = [each.clone().requires_grad_() for each in exact]
            result = op.plain(wanted[0], wanted[1], wanted[2], 1, 1, 1, 1, tail)
            grad = child.numbers(*result.shape)
            x, weight, bias = (each.to(dtype) for each in exact)
            x = x.contiguous(memory_format=order)
            forward = kernels.forward(x, weight, bias, 1, tail, winograd, keep=True)
            if forward is None:
                raise child.WrongNumbers  # it took these small numbers for too large ones
            y, code = forward
            kept = None if tail == Tail.NOTHING else y if code is None else code
            backward = kernels.backward(grad.to(dtype), x, weight, kept, 1, tail, winograd, wants_x=True)
            if backward is None:
                raise child.WrongNumbers
            pairs = list(zip((y, *backward), (result, *torch.autograd.grad(result, wanted, grad)), strict=True))
            # Of equal numbers below a pool rounding decides which one is the largest. The bias has its gradient either way.
            for found, right in [pairs[0], pairs[-1]] if tail == Tail.RELU_POOL else pairs:
                assert found is not None
                child.compare(found, right)


def _linear(name: str) -> None:
    """With sizes that are no multiple of a vector's."""
    import ctypes

    import torch

    from lockstep.kernels.native import Native

    rows, inputs, outputs = 7, 45, 11
    kernels, sizes = Native(name), (ctypes.c_int64 * 3)(rows, inputs, outputs)
    x, weight, grad = child.numbers(rows, inputs), child.numbers(outputs, inputs), child.numbers(rows, outputs)
    bias, found = child.numbers(outputs), torch.empty(rows, outputs)
    back = [torch.empty(rows, inputs), torch.empty(outputs, inputs), torch.empty(outputs)]
    x32, weight32, bias32, grad32 = (each.float() for each in (x, weight, bias, grad))
    kernels.linear_into(sizes, x32, weight32, bias32, found)
    kernels.linear_back_into(sizes, grad32, x32, weight32, *back)
    for mine, right in zip((found, *back), (x @ weight.T + bias, grad @ weight, grad.T @ x, grad.sum(0)), strict=True):
        child.compare(mine, right)


def main(name: str) -> None:
    import torch

    torch.set_num_threads(1)
    json.dump(child.try_all(cases(name)), sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
