"""A fused convolution with bias and ReLU of the student's own: forward and backward against float64, then a race against the reference.

The function takes x, weight and bias, and computes relu(conv2d(x, weight, bias, padding=1)) by a torch.autograd.Function of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.errors import InputError
from lockstep.lab.own_code import Request
from lockstep.lab.trials import Failed
from lockstep.lab.trials.racing import REFERENCE, YOURS
from lockstep.plugins import load_object, one_line
from lockstep.reading import is_file
from lockstep.turns import Contender, ContenderFailed, Taken

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
Answer = dict[str, Any]
PROBLEM = "problem"
# Images, channels, output channels, height, width: single ones, odd ones, one pixel, and one of a real net's size.
SHAPES = ((1, 1, 1, 5, 5), (2, 3, 4, 7, 9), (3, 4, 8, 8, 8), (5, 2, 3, 1, 1), (4, 8, 16, 14, 14))
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
WINDOW_SHAPE = (16, 8, 16, 14, 14)
# Until the process of a contender is ready, and a window, which takes two seconds as a rule.
START_S, ANSWER_S = 90.0, 30.0


def judge(request: Request, folder: Path) -> tuple[str, str]:
    """What is wrong, or what was found right. The function is called in a process of its own: this one writes the verdict."""
    torch.set_num_threads(1)
    file = folder / "computed.pt"
    code = subprocess.run(_command("cases", request.file, request.object, str(file)), check=False).returncode
    if code or not is_file(file):
        raise Failed(f"it ends the process that calls it, with exit code {code}")
    answers: list[Answer] | str = torch.load(file, weights_only=True)
    if isinstance(answers, str):
        raise InputError(answers)
    for case, answer in zip(_cases(), answers, strict=False):
        if wrong := answer.get(PROBLEM) or case.wrong(answer):
            return f"{wrong}, for {case}", ""
    if len(answers) != len(list(_cases())):
        raise Failed(f"it came to {len(answers)} results, which is not as many as there are cases")
    return "", f"forward and backward are right in {len(answers)} cases, against float64"


def _command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "lockstep.lab.trials.kernel", *words]


class Case:
    """One call, and what its result and gradients have to be."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool, upstream: str, wants_x: bool
    ) -> None:
        batch, channels, out, height, width = shape
        self.shape, self.dtype, self.channels_last, self.upstream, self.wants_x = (
            shape,
            dtype,
            channels_last,
            upstream,
            wants_x,
        )
        draw = torch.Generator().manual_seed(sum(shape))
        order = torch.channels_last if channels_last else torch.contiguous_format
        self.x = torch.randn(batch, channels, height, width, generator=draw).to(dtype).contiguous(memory_format=order)
        self.weight = (torch.randn(out, channels, 3, 3, generator=draw) * 0.3).to(dtype).contiguous(memory_format=order)
        self.bias = (torch.randn(out, generator=draw) * 0.1).to(dtype)
        self.x[0] = 0  # an image whose every sum is the bias
        self.grad = torch.randn(batch, out, height, width, generator=draw).to(dtype)

    def __str__(self) -> str:
        batch, channels, out, height, width = self.shape
        order = "channels-last" if self.channels_last else "contiguous"
        kind = str(self.dtype).removeprefix("torch.")
        return f"x of {batch}x{channels}x{height}x{width} and {out} output channels ({kind}, {order})"

    def computed(self, function: Function) -> Answer:
        """What the function comes to: its result as "y", and the gradient of each input by its name; or its PROBLEM."""
        x, weight, bias = self.x.clone(), self.weight.clone(), self.bias.clone()
        inputs = {"weight": weight, "bias": bias, **({"x": x} if self.wants_x else {})}
        for tensor in inputs.values():
            tensor.requires_grad_()
        try:
            y = function(x, weight, bias)
            if problem := self._of_result(y):
                return {PROBLEM: problem}
            gradients = torch.autograd.grad(self._loss(y), list(inputs.values()), allow_unused=True)
        except Exception as error:  # the student's code may raise anything
            return {PROBLEM: f"it raises {one_line(error)}"}
        for name, now, before in (("x", x, self.x), ("weight", weight, self.weight), ("bias", bias, self.bias)):
            if not torch.equal(now.detach(), before):
                return {PROBLEM: f"it changes its input {name}"}
        found = {"y": y, **dict(zip(inputs, gradients, strict=True))}
        return {name: tensor.detach().clone() for name, tensor in found.items() if tensor is not None}

    def wrong(self, answer: Answer) -> str:
        """What is wrong with that; "" where nothing is."""
        true_y, true_gradients = self._truth(["weight", "bias", *(["x"] if self.wants_x else [])])
        if answer["y"].shape != true_y.shape:
            return "its result has another shape than y"
        if apart := self._apart(answer["y"], true_y):
            return f"forward is wrong by {apart:.2g} of the largest number"
        for name, true in true_gradients.items():
            gradient = answer.get(name)
            if gradient is None or gradient.shape != true.shape:
                return f"backward gives no gradient of {name}, or one of another shape"
            if apart := self._apart(gradient, true):
                return f"backward is wrong: the gradient of {name} by {apart:.2g} of its largest number"
        return ""

    def _of_result(self, y: object) -> str:
        batch, _, out, height, width = self.shape
        if not isinstance(y, Tensor) or tuple(y.shape) != (batch, out, height, width) or y.dtype != self.dtype:
            what = f"{tuple(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            return f"it returns {what}, and not {(batch, out, height, width)} of {self.dtype}"
        if y.grad_fn is None:
            return "its result has no gradient"
        if torch.autograd.function.BackwardCFunction not in type(y.grad_fn).__mro__:
            return "it is not a torch.autograd.Function of its own: PyTorch's operators compute its backward"
        return ""

    def _loss(self, y: Tensor) -> Tensor:
        """Upstream gradients as a net gives them, and the expanded one of a sum."""
        return y.sum() if self.upstream == "sum" else (y * self.grad).sum()

    def _truth(self, wanted: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = {name: getattr(self, name).double().requires_grad_() for name in ("x", "weight", "bias")}
        y = functional.relu(functional.conv2d(inputs["x"], inputs["weight"], inputs["bias"], padding=1))
        loss = y.sum() if self.upstream == "sum" else (y * self.grad.double()).sum()
        gradients = torch.autograd.grad(loss, [inputs[name] for name in wanted])
        return y.detach(), dict(zip(wanted, gradients, strict=True))

    def _apart(self, found: Tensor, true: Tensor) -> float:
        """The largest difference as a share of the largest number, where it is more than rounding; NaN is."""
        largest = max(float(true.abs().max()), 1e-3)
        difference = float((found.double() - true).abs().max()) / largest
        return 0.0 if difference <= TOLERANCE[self.dtype] * max(1.0, self.x.numel() / 500) else difference


def _cases() -> Iterator[Case]:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.float64):
            yield Case(shape, dtype, channels_last=False, upstream="random", wants_x=True)
        yield Case(shape, torch.float32, channels_last=True, upstream="random", wants_x=True)
        yield Case(shape, torch.float32, channels_last=False, upstream="sum", wants_x=True)
        yield Case(shape, torch.float32, channels_last=False, upstream="random", wants_x=False)


def contenders(request: Request, folder: Path) -> list[Contender]:
    return [
        Called(name, file, request.object) for name, file in ((REFERENCE, request.reference), (YOURS, request.file))
    ]


class Called:
    """A contender that is a process with one function; it takes a window when it is asked for one."""

    whole_steps = 1

    def __init__(self, name: str, file: str, function: str) -> None:
        self.name, self._argv = name, _command("windows", file, function)
        self._process: subprocess.Popen[str] | None = None

    def start(self, number: int) -> None:
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ready(self) -> None:
        self._answer(START_S)

    def take(self, lead: int, steps: int) -> Taken:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"lead": lead, "steps": steps}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise ContenderFailed("it ended in mid-race") from None
        found = self._answer(ANSWER_S)
        return Taken(samples=float(steps), wall=found["wall"], cpu=found["cpu"], used=found["used"])

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _answer(self, limit_s: float) -> dict[str, float]:
        assert self._process is not None
        line = _line(self._process.stdout, limit_s)
        if not line:
            raise ContenderFailed("it ended in mid-race, or did not answer")
        found: dict[str, float] = json.loads(line)
        return found


def _line(stream: IO[str] | None, limit_s: float) -> str:
    import select

    assert stream is not None
    readable, _, _ = select.select([stream], [], [], limit_s)
    return stream.readline() if readable else ""


def cases(file: str, name: str, target: str) -> None:
    """What the process that calls the function in every case does: up to the first problem that shows here."""
    torch.set_num_threads(1)
    try:
        function: Function = load_object(f"{file}:{name}", option=Path(file).name)
    except InputError as error:
        torch.save(str(error), target)
        return
    answers: list[Answer] = []
    for case in _cases():
        answers.append(case.computed(function))
        if PROBLEM in answers[-1]:
            break
    torch.save(answers, target)


def windows(file: str, name: str) -> None:
    """What the process of a contender does."""
    import os
    from time import perf_counter, process_time

    # What the function prints goes nowhere: answers have a line of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    function: Function = load_object(f"{file}:{name}", option=Path(file).name)
    case = Case(WINDOW_SHAPE, torch.float32, channels_last=False, upstream="random", wants_x=True)
    inputs = [case.x.requires_grad_(), case.weight.requires_grad_(), case.bias.requires_grad_()]

    def call(count: int) -> None:
        for _ in range(count):
            torch.autograd.grad(function(case.x, case.weight, case.bias), inputs, case.grad)

    def say(document: dict[str, float]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    say({})  # before the first call, which has the time of a window
    for line in sys.stdin:
        order, before = json.loads(line), process_time()
        call(order["lead"])
        begin, cpu = perf_counter(), process_time()
        call(order["steps"])
        say({"wall": perf_counter() - begin, "cpu": process_time() - cpu, "used": process_time() - before})


if __name__ == "__main__":
    try:
        if sys.argv[1] == "cases":
            cases(*sys.argv[2:])
        else:
            windows(*sys.argv[2:])
    except InputError as error:
        sys.exit(f"lockstep: {error}")
