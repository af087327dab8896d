"""Keeping torch.compile out of the backends.

Inside a compiled model around DDP, torch calls the methods of a process group while its compiler looks at every Python
function that is entered. It cannot compile an exchange through memory that other processes write, and fails trying.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Kind = TypeVar("Kind", bound=type)


def untraced(kind: Kind) -> Kind:
    """Mark every method of a class, and all that it calls, as none of the compiler's business. It costs nothing per call,
    while `torch.compiler.disable` would cost a microsecond and the import of the compiler."""
    strategy: Any = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, strategy)
    return kind
