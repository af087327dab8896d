"""Where a rank is: the line of the user's code that it runs, and the collective that it is in.

Read from Python's own frames: by the thread that gives signs of life, while the training thread stands still, and from the traceback of an error.
What a waiting rank says of itself is compared with what the others say (launch/hang.py).
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from lockstep.machine import inductor

PACKAGE = str(Path(__file__).parents[1]) + os.sep
WORKER = PACKAGE + "worker.py"
STANDARD = str(Path(os.__file__).parent) + os.sep
LONGEST = 80
_DUMPED = re.compile(r'File "(.+)", line (\d+) in (\S+)')

# The functions of torch.distributed in which a rank waits for the others. send and recv are calls of two ranks, and differ by nature.
COLLECTIVES = frozenset(
    (
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "monitored_barrier",
        "new_group",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
    )
)
# What a group in Python is asked for by C++, by DDP above all: names of torch's, without the underscores.
METHODS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
}
# Collectives whose tensor has the same shape on all ranks, by its names in torch.distributed. Those that send parts of other sizes to each
# rank (all_to_all_single with split sizes, objects) differ in it by nature, and only their type is compared.
SAME_SHAPE = frozenset(("all_reduce", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter_tensor"))
TENSORS = ("tensor", "input_tensor", "output", "input")
# Calls of C++, which have no frame of their own.
WAITS = (".wait(", "wait_tensor(")

# Work that takes one rank as long as it takes: nobody is to blame for it. Matched by a part of the file's path, and by the function's name where
# one is given.
ALONE = (
    ("torch/_dynamo/", "", "compiling"),
    ("torch/_inductor/", "", "compiling"),
    ("torch/serialization.py", "", "writing or reading a file"),
    ("lockstep/backends/group.py", "first_alone", "writing for all, or waiting for it"),
    ("lockstep/training/loop.py", "_evaluate", "evaluating"),
)


class Frame(NamedTuple):
    """One call of a stack; `line` is where it is now, which in a traceback is not where its frame went on to."""

    file: str
    line: int
    name: str
    frame: FrameType | None = None
    """None where only a text is left of it."""

    @classmethod
    def of(cls, frame: FrameType, line: int | None) -> Frame:
        return cls(frame.f_code.co_filename, line or 0, frame.f_code.co_name, frame)

    @property
    def values(self) -> Mapping[str, Any]:
        return self.frame.f_locals if self.frame is not None else {}


def of_thread(ident: int) -> list[Frame]:
    """The calls that a thread is in, the innermost first."""
    frames, frame = [], sys._current_frames().get(ident)
    while frame is not None:
        frames.append(Frame.of(frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def of_error(trace: TracebackType | None) -> list[Frame]:
    """The calls in which an error came up, the innermost first."""
    frames = []
    while trace is not None:
        frames.append(Frame.of(trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1]


def of_dump(text: str) -> list[Frame]:
    """The calls of the training thread in what faulthandler writes when a signal ends a process, the innermost first."""
    for thread in text.rpartition("Fatal Python error:")[2].split("hread 0x"):
        frames = [Frame(file, int(line), name) for file, line, name in _DUMPED.findall(thread)]
        if any(frame.file == WORKER for frame in frames):
            return frames
    return []


def call_site(frames: list[Frame]) -> dict[str, Any]:
    """What there is to say of a stack, as a run folder keeps it (shapes.CallSite)."""
    site: dict[str, Any] = {}
    own = next((each for each in frames if _is_users(each)), None) or next(
        (each for each in frames if _is_ours(each)), None
    )
    if own is not None:
        site |= {"file": _shown(own.file), "line": own.line, "code": _text(own)}
    if collective := _collective(frames):
        site |= collective
    if alone := _alone(frames):
        site["alone"] = alone
    return site


def _is_users(each: Frame) -> bool:
    file = each.file
    if file.startswith(("<", PACKAGE)) or f"{os.sep}torch{os.sep}" in file or _is_generated(file):
        return False
    return not file.startswith(STANDARD) or "site-packages" in file


def _is_generated(file: str) -> bool:
    """Written by torch's compiler, for itself."""
    folder = os.environ.get(inductor.FOLDER, "")
    return folder != "" and file.startswith(folder + os.sep)


def _is_ours(each: Frame) -> bool:
    """The loop of a recipe, not what it calls to exchange or to record."""
    file = each.file
    return file.startswith(PACKAGE) and not file.startswith((PACKAGE + "backends", PACKAGE + "measure"))


def _shown(file: str) -> str:
    """A path as people say it: from the current folder on, and for a file of ours from the package on."""
    if file.startswith(PACKAGE):
        return f"lockstep/{file.removeprefix(PACKAGE)}"
    return file.removeprefix(str(Path.cwd()) + os.sep)


def _text(each: Frame) -> str:
    line = linecache.getline(each.file, each.line).split("  #")[0].strip()
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _collective(frames: list[Frame]) -> dict[str, Any]:
    """The call of torch.distributed that the user's code, or ours, has made: the outermost one, for some are made of others."""
    for each in reversed(frames):
        if each.file.endswith("torch/distributed/distributed_c10d.py") and each.name in COLLECTIVES:
            return {"collective": each.name} | _arguments(each)
    for each in frames:
        if "/lockstep/backends/" in each.file and each.name in METHODS:
            return {"collective": METHODS[each.name]}
        if each.file.endswith("lockstep/backends/work.py") and each.name == "wait":
            return {"collective": "wait"}
    # Python's own waits (a lock's, an event's, a process's) have frames of their own.
    if frames and any(call in _text(frames[0]) for call in WAITS):
        return {"collective": "wait"}
    return {}


def _arguments(call: Frame) -> dict[str, Any]:
    values = call.values
    group, found = values.get("group"), {}
    world = getattr(getattr(sys.modules.get("torch.distributed"), "group", None), "WORLD", None)
    if group is not None and group is not world:
        found["group"] = str(getattr(group, "group_desc", "") or "another group")
    tensor = next((values[name] for name in TENSORS if hasattr(values.get(name), "dtype")), None)
    if tensor is not None:
        kind = str(tensor.dtype).removeprefix("torch.")
        found["of"] = f"{kind}[{', '.join(map(str, tensor.shape))}]" if call.name in SAME_SHAPE else kind
    return found


def _alone(frames: list[Frame]) -> str:
    for part, name, what in ALONE:
        if any(part in each.file and name in ("", each.name) for each in frames):
            return what
    return ""
