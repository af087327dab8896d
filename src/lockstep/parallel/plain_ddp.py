"""DistributedDataParallel without the compiler.

Its constructor and its forward import torch._dynamo, only to ask and to tell it something: two seconds of every rank's start, as much as
torch itself. Where nothing else has imported the compiler, nothing is compiled, and both have an answer without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

_COMPILER = "torch._dynamo"


class PlainDdp(nn.parallel.DistributedDataParallel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _compiler_left_out():
            super().__init__(*args, **kwargs)

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
