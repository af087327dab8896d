"""DistributedDataParallel without the compiler.

Its constructor and its forward import torch._dynamo, only to ask and to tell it something: two seconds of every rank's start, as much as
torch itself. Where nothing else has imported the compiler, nothing is compiled, and both have an answer without it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.torch_private import ddp_check_finished

_COMPILER = "torch._dynamo"
UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""How PyTorch's text begins when parameters had no part in the step before."""


class PlainDdp(nn.parallel.DistributedDataParallel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _compiler_left_out():
            super().__init__(*args, **kwargs)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        try:
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self._in_one_line(error)
            raise

    def check_finished(self) -> None:
        """Refuse to go on where the last step has left gradients without an exchange."""
        try:
            ddp_check_finished(self)
        except RuntimeError as error:
            self._in_one_line(error)
            raise

    def _in_one_line(self, error: RuntimeError) -> None:
        if UNFINISHED in str(error):
            raise InputError(self._advice(str(error))) from None

    def _advice(self, text: str) -> str:
        """One line instead of twenty: PyTorch lists the parameters that got no gradient by their numbers."""
        trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
        unused = [trained[int(number)] for number in listed[1].split()] if listed else []
        which = unused[0] if unused else "some parameter"
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        if self.find_unused_parameters:
            return (
                f"strategy=ddp: {which}{more} made an output of the model that the loss does not use, and DDP waits for the gradient: "
                "choose strategy=flat, or let the model return only what the loss takes"
            )
        return (
            f"strategy=ddp: the last step did not use {which}{more}, and DDP waits for the gradients of all parameters: "
            "add ddp.find_unused_parameters=true, or choose strategy=flat"
        )

    def _inside_ddp_forward(self) -> Any:
        """It tells the compiler which module is at work."""
        return super()._inside_ddp_forward() if _COMPILER in sys.modules else nullcontext()


@contextmanager
def _compiler_left_out() -> Iterator[None]:
    """The constructor asks for the compiler's mode; this is its answer where it is not there."""
    if _COMPILER in sys.modules or "_dynamo" in vars(torch):
        yield
        return
    answer = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    vars(torch)["_dynamo"] = answer
    try:
        yield
    finally:
        del vars(torch)["_dynamo"]
