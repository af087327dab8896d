"""What the ranks of a foreign script have written down (inside/ledger.py), read back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lockstep.reading import decode, read_file

Array = np.ndarray[Any, np.dtype[np.float64]]
Truths = np.ndarray[Any, np.dtype[np.bool_]]
QUANTITIES = 6


class Pass(msgspec.Struct):
    """One call of the model."""

    inputs: list[str]
    """A digest of each sample."""
    labels: list[str]
    dropout: int
    batch_norm: int
    random: str
    """The state of the random numbers before it."""
    draws: bool
    """It draws random numbers."""


class Clip(msgspec.Struct):
    kind: str
    limit: float | None
    norm: float | None


class Tensor(msgspec.Struct):
    """One parameter."""

    name: str
    length: int
    type: str
    origin: str
    before: str
    after: str
    divided: bool
    """This rank has a part of it."""
    seen: bool
    """Its own gradient was seen."""
    own_format: str
    format: str
    """The 16-bit format that holds the gradient without loss, if one does."""


class Order(msgspec.Struct):
    """What a sampler of batches has handed out."""

    size: int
    length: int
    """Over how many samples it goes."""
    batches: list[list[list[int]]]
    """Of each pass over the data."""


class Line(msgspec.Struct):
    """A line of steps.jsonl."""

    step: int
    optimizer: int
    settings: list[dict[str, float | None]]
    passes: list[Pass]
    losses: list[float | None]
    scale: float
    autocast: bool
    clips: list[Clip]
    layout: list[Tensor]
    buffers: dict[str, str]
    batch_sizes: list[int]
    unknown: bool
    """Ranks hold parts of the parameters, and which ones cannot be told."""
    epochs: list[list[int]]
    orders: list[Order]


@dataclass
class Step:
    """One step of one rank. Arrays hold the sketches of all parameters, one after the other."""

    line: Line
    own: Array
    size: Array
    exchanged: Array
    final: Array
    update: Array
    weights: Array
    """Before the update."""

    @property
    def slices(self) -> list[slice]:
        ends = np.cumsum([tensor.length for tensor in self.line.layout]).tolist()
        return [slice(end - tensor.length, end) for end, tensor in zip(ends, self.line.layout, strict=True)]

    @property
    def inputs(self) -> list[str]:
        return [sample for each in self.line.passes for sample in each.inputs]

    @property
    def labels(self) -> list[str]:
        return [sample for each in self.line.passes for sample in each.labels]

    @property
    def rows(self) -> int:
        return len(self.inputs)

    @property
    def loss(self) -> float | None:
        """The sum over the passes; None where backward did not begin with one number."""
        losses = [loss for loss in self.line.losses if loss is not None]
        return sum(losses) / self.line.scale if losses and len(losses) == len(self.line.losses) else None

    @property
    def draws(self) -> bool:
        return any(each.draws for each in self.line.passes)

    @property
    def dropout(self) -> bool:
        return any(each.dropout for each in self.line.passes)

    @property
    def batch_norm(self) -> bool:
        return any(each.batch_norm for each in self.line.passes)


Rank = list[Step]


def read(folder: Path) -> list[Rank]:
    """The steps of every rank that has taken one."""
    return [_rank(each) for each in sorted(folder.glob("ranks/[0-9]*"))]


def _rank(folder: Path) -> Rank:
    lines = (read_file(folder / "steps.jsonl") or b"").splitlines(keepends=True)
    # A line without an end was being written when the process ended.
    return [_step(folder, decode(line, Line, "steps.jsonl")) for line in lines if line.endswith(b"\n")]


def _step(folder: Path, line: Line) -> Step:
    values = np.frombuffer(read_file(folder / f"{line.step}.f64") or b"", dtype=np.float64)
    return Step(line, *values.reshape(QUANTITIES, -1))


def done(folder: Path) -> tuple[int, int, int]:
    """How many ranks have all their steps, how many there are to be (0: not known), and how many steps there are in all."""
    ranks = list(folder.glob("ranks/[0-9]*"))
    worlds = [int(text) for rank in ranks if (text := (read_file(rank / "world") or b"").decode()).isdigit()]
    written = sum((read_file(rank / "steps.jsonl") or b"").count(b"\n") for rank in ranks)
    return sum((rank / "done").exists() for rank in ranks), max(worlds, default=0), written


def problem(folder: Path) -> str | None:
    """Why a process of the command could not be watched any more."""
    for path in sorted(folder.glob("problems/*")):
        return (read_file(path) or b"").decode(errors="replace").partition("\n")[0]
    return None


def rows_of_pass(ranks: list[Rank]) -> tuple[int, int]:
    """How many samples a pass of one rank usually has, and how many those of all ranks together."""
    each = Counter(len(one.inputs) for rank in ranks for step in rank for one in step.line.passes)
    together = Counter(
        sum(len(one.inputs) for one in passes)
        for steps in zip(*ranks, strict=False)
        for passes in zip(*(step.line.passes for step in steps), strict=False)
    )
    return (each.most_common(1)[0][0], together.most_common(1)[0][0]) if each and together else (0, 0)


def is_coarse(ranks: list[Rank]) -> bool:
    """Whether the script computes in 16 bits: autocast, or most gradients are numbers of 16 bits."""
    lines = [step.line for rank in ranks for step in rank]
    return any(line.autocast or 2 * sum(bool(t.own_format) for t in line.layout) > len(line.layout) for line in lines)
