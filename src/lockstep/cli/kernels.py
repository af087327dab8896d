"""`lockstep kernels`: the fused convolution, made, and measured against every other way to compute it on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lockstep.cli.importing import import_torch
from lockstep.cli.options import Group, json_option, whole
from lockstep.cli.output import console, next_step, note, print_json, print_records
from lockstep.errors import InputError, RunFailed
from lockstep.units import counted

if TYPE_CHECKING:
    from lockstep.kernels.bench import Cell, How, Roof
    from lockstep.kernels.candidates import Shape

EPILOG = """\b
Examples:
  lockstep kernels build                         now, and not in the first run
  lockstep kernels bench --quick
  lockstep kernels bench --batch 32 --threads 1
  lockstep kernels bench --shape 3-32-32 --shape 32-64-32-pool --compile
  lockstep kernels bench --brief --keep          only PyTorch's operators and ours; let FusedConvReLU choose by it
  lockstep kernels bench --device cuda           with cuDNN, without it, and our CUDA and Triton kernels

Exit codes: 0 measured, 2 wrong input, 3 a result was WRONG or there is nothing to measure.
"""
# Beyond this difference from double precision a result is wrong and not only rounded.
WRONG = {"bf16": 0.2}
WRONG_USUALLY = 1e-2
WORTH = "lockstep race fused=false fused=true (what they are worth in a training)"


@click.group("kernels", cls=Group, epilog=EPILOG)
def command() -> None:
    """Compile and measure the fused convolution + ReLU (+ max-pool)."""


@command.command("build")
def build() -> None:
    """Compile the kernels for this machine and try them; otherwise its first run does, and waits for it."""
    from lockstep.kernels import trial
    from lockstep.machine.native_code import CannotBuild

    try:
        target = trial.best_target()
    except CannotBuild as error:
        raise RunFailed(f"kernels build: {error}; until then PyTorch's own operators compute") from None
    console().print(f"The {target} kernels are there, and compute right on this machine.")
    next_step(WORTH)


@command.command("bench", epilog=EPILOG)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="IN-OUT-SIZE[-1x1|-5x5][-pool][-first][-last]",
    help="Only this layer; may be repeated.",
)
@click.option("--batch", "batches", type=whole(1, 1 << 20), multiple=True, help="Unstated: 1, 32, 128 and 256.")
@click.option("--threads", type=whole(1, 10_000), multiple=True, help="Unstated: 1 and all cores.")
@click.option("--rounds", type=whole(1, 100_000), help="Rounds over all ways. Unstated: 7, quick 3.")
@click.option("--quick", is_flag=True, help="Batch 32, one thread, short rounds.")
@click.option("--compile", "compiled", is_flag=True, help="torch.compile too, which takes a minute for each layer.")
@click.option("--brief", is_flag=True, help="Only PyTorch's operators as they are, and ours.")
@click.option(
    "--keep",
    is_flag=True,
    help="Time these layers longer, and keep that for this machine: FusedConvReLU then chooses by it.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@json_option
def bench(
    shapes: tuple[str, ...],
    batches: tuple[int, ...],
    threads: tuple[int, ...],
    rounds: int | None,
    quick: bool,
    compiled: bool,
    brief: bool,
    keep: bool,
    device: str,
    as_json: bool,
) -> None:
    """Time forward and backward of every published layer in every way, in turns, each result checked.

    Ways: PyTorch's own operators as they are, channels-last, with oneDNN off, in bf16, oneDNN's fused operator (forward only),
    and ours. With one thread times are CPU times.
    """
    import_torch()
    from lockstep.kernels.bench import How, keep_memory, measure, roof
    from lockstep.kernels.candidates import LAYERS
    from lockstep.machine.cores import cores

    wanted = [parse_shape(text) for text in shapes] or list(LAYERS)
    batches = batches or ((32,) if quick else (1, 32, 128, 256))
    threads = threads or ((1,) if quick or device == "cuda" else tuple(dict.fromkeys((1, cores()))))
    _check_device(device, keep)
    how = How(rounds or (3 if quick else 7), 0.02 if quick else 0.05, compiled, brief, device)
    if os.getloadavg()[0] > 0.5 * cores():
        note(f"warning: the machine is busy (load {os.getloadavg()[0]:.1f}): take the times as indications")
    keep_memory()
    roofs = {count: roof(count, device) for count in threads}
    cells = []
    for shape in wanted:
        for batch in batches:
            for count in threads:
                note(f"{shape.name}, batch {batch}, {counted(count, 'thread')}")
                cells.append(measure(shape, batch, count, how))
    _report(cells, roofs, _keep(cells, how) if keep else None, as_json)
    wrong = [
        (cell, timing)
        for cell in cells
        for timing in cell.timings
        if timing.error > WRONG.get(timing.way, WRONG_USUALLY)
    ]
    if wrong:
        cell, timing = wrong[0]
        raise RunFailed(
            f"kernels bench: {timing.way} on {cell.shape.name} gave a WRONG result (error {timing.error:.1e})"
        )


def _check_device(device: str, kept: bool) -> None:
    import torch

    from lockstep.kernels import native

    if device == "cuda":
        if not torch.cuda.is_available():
            raise InputError("--device cuda: PyTorch finds no GPU here: leave it out")
        if kept:
            raise InputError("--keep is for the CPU, where there is a choice of ways: leave out --device cuda")
    elif native.load() is None:
        raise RunFailed("kernels bench: there are no kernels to measure: install g++, or set CXX")


def parse_shape(text: str) -> Shape:
    """`1-4-28-pool-first`: 1 to 4 channels, images of 28x28, a pool behind it, the first layer of its net; -last: channels-last.

    Kernels are 3x3 unless -1x1 or -5x5 is there.
    """
    from lockstep.kernels.candidates import Shape

    parts = text.split("-")
    numbers, words = [part for part in parts if part.isdigit()], [part for part in parts if not part.isdigit()]
    kernels = {"1x1": 1, "5x5": 5}
    if len(numbers) != 3 or set(words) - {"pool", "first", "last", *kernels} or "0" in numbers:
        raise InputError(
            f"--shape {text}: write channels, output channels and size, as 3-32-32, then -5x5, -pool, -first, -last"
        )
    kernel = next((size for word, size in kernels.items() if word in words), 3)
    channels, width, size = map(int, numbers)
    return Shape(channels, width, size, "pool" in words, "first" not in words, "last" in words, kernel)


def _keep(cells: list[Cell], how: How) -> Path:
    """Time these layers as FusedConvReLU does when it meets them, but for longer, and keep that for this machine."""
    import torch

    from lockstep.kernels import native, table, timing
    from lockstep.kernels.bench import layer_of

    kernels = native.load()
    assert kernels is not None
    rows, before = [], torch.get_num_threads()
    for cell in cells:
        torch.set_num_threads(cell.threads)
        rows.append(timing.measure(layer_of(cell.shape, cell.batch, cell.threads), how.rounds, 10 * how.seconds))
    torch.set_num_threads(before)
    return table.keep(rows, kernels.isa)


def _report(cells: list[Cell], roofs: dict[int, Roof], kept: Path | None, as_json: bool) -> None:

    from lockstep.backends.costs import store
    from lockstep.kernels import native

    kernels = native.load()
    document: dict[str, Any] = {
        "machine": {**store.machine(), "isa": kernels.isa if kernels else "none"},
        "time": time.time(),
        "roofs": msgspec.to_builtins(list(roofs.values())),
        "cells": msgspec.to_builtins(cells),
        "kept_in": str(kept) if kept else None,
    }
    if as_json:
        print_json(document)
        return
    for cell in cells:
        print_records([_line(cell, i, roofs[cell.threads]) for i in range(len(cell.timings))], right=range(4, 12))
    out = console()
    out.print(
        "forward, backward, both: how many times as fast as PyTorch's own operators (torch). Chosen ways are marked *."
    )
    out.print(
        "GFLOP/s: the definition's operations, so Winograd may pass 100 %; in brackets the part of what this machine reaches."
    )
    if kept:
        out.print(f"Kept in {document['kept_in']}", soft_wrap=True)
    next_step(WORTH)


def _line(cell: Cell, index: int, roof: Roof) -> dict[str, str]:
    timing, base = cell.timings[index], cell.timings[0]
    seconds = timing.forward_ms / 1e3
    chosen = "*" if timing.way in cell.chosen else ""
    back, back_base = timing.backward_ms, base.backward_ms or 0.0
    return {
        "layer": cell.shape.name if index == 0 else "",
        "batch": str(cell.batch) if index == 0 else "",
        "threads": str(cell.threads) if index == 0 else "",
        "way": timing.way + chosen,
        "forward ms": f"{timing.forward_ms:.3f}",
        "backward ms": "–" if back is None else f"{back:.3f}",
        "forward": f"{base.forward_ms / timing.forward_ms:.2f}x",
        "backward": "–" if back is None else f"{back_base / back:.2f}x",
        "both": "–" if back is None else f"{(base.forward_ms + back_base) / (timing.forward_ms + back):.2f}x",
        "error": f"{timing.error:.0e}",
        "GFLOP/s": f"{cell.flop / seconds / 1e9:.1f} ({cell.flop / seconds / roof.flop_per_s:.0%})",
        "GB/s": f"{cell.bytes / seconds / 1e9:.2f} ({cell.bytes / seconds / roof.bytes_per_s:.0%})",
    }
