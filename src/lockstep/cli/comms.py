"""`lockstep comms`: what an exchange costs on this machine, and which backend can do what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lockstep.cli.options import json_option, real, whole
from lockstep.cli.output import console, next_step, note, print_json, print_table, styled
from lockstep.errors import InputError, RunFailed
from lockstep.report.progress import StatusLine
from lockstep.run import write_atomic
from lockstep.units import counted

if TYPE_CHECKING:
    from lockstep.backends.costs.cells import Cell, Fitted
    from lockstep.comms.measure import Settings

EPILOG = """\b
Examples:
  lockstep comms --quick
  lockstep comms --ranks 2 --ranks 4 --plot comms.svg
  lockstep comms --backend gloo --collective all_reduce --max-bytes 1048576
  lockstep comms --own rings.py:all_reduce
  lockstep comms --capabilities

\b
Exit codes: 0 measured, 2 wrong input, 3 a result was WRONG or nothing could be measured.
"""


@click.command("comms", epilog=EPILOG)
@click.option("--ranks", type=whole(2, 1024), multiple=True, default=(2,), help="Number of ranks; may be repeated.")
@click.option(
    "--backend", "backends", multiple=True, help="Only this backend; may be repeated. Unstated: all there are."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--collective", "collectives", multiple=True, help="Only this collective; may be repeated.")
@click.option("--max-bytes", type=whole(1), help="Largest message. Unstated: 64 MiB.")
@click.option("--quick", is_flag=True, help="Four sizes up to 1 MiB and short rounds: seconds instead of minutes.")
@click.option("--rounds", type=whole(1, 100_000), help="Rounds over all cells and backends. Unstated: 3, quick 2.")
@click.option(
    "--cell-limit",
    type=real(0.1),
    default=20.0,
    help="Seconds until a cell counts as hanging.",
)
@click.option(
    "--own",
    metavar="FILE.py:FUNCTION",
    help="Also measure your own all-reduce: sums a tensor over all ranks, in place.",
)
@click.option("--capabilities", is_flag=True, help="Try which collective works on which backend and device.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep results and logs in this new folder.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write the chart of every collective as FILE.svg.")
@json_option
def command(
    ranks: tuple[int, ...],
    backends: tuple[str, ...],
    device: str,
    collectives: tuple[str, ...],
    max_bytes: int | None,
    quick: bool,
    rounds: int | None,
    cell_limit: float,
    own: str | None,
    capabilities: bool,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure every collective on every backend, from 4 B to 64 MiB.

    Latency with its spread, algorithm and bus bandwidth as nccl-tests defines them, and a fitted line; every result is
    checked. The measurements are kept for this machine, and backend=auto chooses by them.
    """
    from lockstep.backends.costs.plan import BACKENDS, COLLECTIVES, LARGEST, sizes
    from lockstep.comms import asked
    from lockstep.comms.workplace import workplace
    from lockstep.machine.cuda import cuda_present

    asked.known("--backend", backends, BACKENDS)
    asked.known("--collective", collectives, COLLECTIVES)
    asked.check_plot(plot, capabilities)
    wanted = sizes(LARGEST if max_bytes is None else max_bytes, quick)
    device = ("cuda" if cuda_present() else "cpu") if device == "auto" else device
    if capabilities:
        with workplace(out, note) as folder:
            _capabilities(ranks[0], list(backends), cell_limit, folder, as_json)
        return
    there, left_out = asked.there(backends, device, max(ranks))
    for name, reason in left_out.items():
        note(f"{name} is left out: {reason}")
    for text in asked.warnings(max(ranks)):
        note(f"warning: {text}")
    from lockstep.comms.measure import Settings

    settings = Settings(
        backends=there,
        device=device,
        ranks=list(dict.fromkeys(ranks)),
        collectives=asked.chosen(collectives, own),
        sizes=wanted,
        rounds=rounds or (2 if quick else 3),
        cell_s=0.03 if quick else 0.1,
        limit_s=cell_limit,
        own=own and asked.own_function(own),
    )
    with workplace(out, note) as folder:
        _measure(settings, left_out, folder, plot, as_json)


def _measure(settings: Settings, left_out: dict[str, str], folder: Path, plot: Path | None, as_json: bool) -> None:

    from lockstep.backends.costs import choose, store
    from lockstep.backends.costs.cells import lines
    from lockstep.backends.costs.plan import MNIST_GRADIENTS, OWN
    from lockstep.comms.measure import measure

    with StatusLine() as line:
        cells = measure(settings, folder, line.show)
    fitted = lines(cells)
    document: dict[str, Any] = {
        "machine": store.machine(),
        "time": time.time(),
        "settings": msgspec.to_builtins(settings),
        "left_out": left_out,
        "cells": msgspec.to_builtins(cells),
        "lines": msgspec.to_builtins(fitted),
        "kept_in": _keep([cell for cell in cells if cell.collective != OWN]),
        "choices": [],
    }
    for ranks in settings.ranks:
        backend, why = choose.best(MNIST_GRADIENTS, ranks, device=settings.device)
        document["choices"].append({"bytes": MNIST_GRADIENTS, "ranks": ranks, "backend": backend, "why": why})
    write_atomic(folder / "comms.json", document)
    if plot:
        _write_plot(cells, settings, plot)
    if as_json:
        print_json(document)
    else:
        _print(cells, fitted, document)
    wrong = [cell for cell in cells if cell.state == "WRONG"]
    if wrong:
        first = wrong[0]
        raise RunFailed(
            f"comms: {len(wrong)} of {counted(len(cells), 'cell')} gave WRONG results, first {first.collective} of {first.bytes:,} B on "
            f"{first.backend} with {counted(first.ranks, 'rank')}: {first.reason}"
        )


def _print(cells: list[Cell], fitted: list[Fitted], document: dict[str, Any]) -> None:
    from lockstep.comms import report
    from lockstep.report.characters import curves
    from lockstep.report.exchange import latency

    out = console()
    for collective, ranks in dict.fromkeys((cell.collective, cell.ranks) for cell in cells):
        chosen = [cell for cell in cells if (cell.collective, cell.ranks) == (collective, ranks)]
        out.print(styled((collective, "bold"), f", {counted(ranks, 'rank')}, {chosen[0].device}"))
        print_table(report.CELL_HEADERS, [report.cell_row(cell) for cell in chosen], right=report.CELL_RIGHT)
    if fitted:
        out.print("Lines: time = alpha + bytes / beta, fitted on the relative error (residual: its root mean square)")
        print_table(report.LINE_HEADERS, [report.line_row(line) for line in fitted], right=report.LINE_RIGHT)
    for ranks in dict.fromkeys(cell.ranks for cell in cells):
        name = next((cell.collective for cell in cells if cell.state == "ok" and cell.message_bytes), None)
        here = [cell for cell in cells if cell.ranks == ranks]
        for chart in latency(here, name, f"{name}, {counted(ranks, 'rank')}, median") if name else []:
            if drawn := curves(chart):
                out.print(drawn, soft_wrap=True)
    for choice in document["choices"]:
        out.print(f"backend=auto → {choice['why']}", soft_wrap=True)
    measured = list(dict.fromkeys(cell.backend for cell in cells if cell.state == "ok"))
    if len(measured) > 1:
        words = " ".join(f"'ranks={cells[0].ranks} backend={backend}'" for backend in measured)
        next_step(f"lockstep race {words} (what it comes to in a training)")


def _capabilities(ranks: int, backends: list[str], limit_s: float, folder: Path, as_json: bool) -> None:

    from lockstep.backends.costs import store
    from lockstep.comms import capabilities, report

    with StatusLine() as line:
        answers = capabilities.try_all(ranks, folder, limit_s, line.show, backends)
    document = {"machine": store.machine(), "ranks": ranks, "answers": msgspec.to_builtins(answers)}
    write_atomic(folder / "capabilities.json", document)
    if as_json:
        print_json(document)
    else:
        headers, rows, notes = report.capability_table(answers)
        print_table(headers, rows)
        out = console()
        out.print(
            f"Tried with {counted(ranks, 'rank')}, torch {store.machine()['torch']}. 'was': the published table of an old PyTorch. –: not here."
        )
        for text in notes:
            out.print(text, soft_wrap=True)
    wrong = [a for a in answers if a.answer == "WRONG"]
    if wrong:
        raise RunFailed(f"comms: {wrong[0].collective} on {wrong[0].backend} gave a WRONG result: {wrong[0].reason}")


def _keep(cells: list[Cell]) -> str | None:
    """Where the cells went for backend=auto; a cache that cannot be written is a remark, not a failure."""
    from lockstep.backends.costs import store

    if not cells:
        return None
    try:
        return str(store.save(cells))
    except OSError as error:
        note(f"warning: not kept for backend=auto: cannot write {store.path()}: {error.strerror}")
        return None


def _write_plot(cells: list[Cell], settings: Settings, plot: Path) -> None:
    from lockstep.backends.costs import store
    from lockstep.report.exchange import latency
    from lockstep.report.vega.files import panels

    titles = [(name, ranks) for ranks in settings.ranks for name in settings.collectives if name != "barrier"]
    drawn = [
        chart
        for name, ranks in titles
        for chart in latency([cell for cell in cells if cell.ranks == ranks], name, f"{name}, {counted(ranks, 'rank')}")
    ]
    seen = store.machine()
    caption = f"median time of a call over message size; {seen['cpu']}, {seen['cores']} cores, torch {seen['torch']}"
    if not drawn:
        note(f"{plot} is not written: there is no time to draw")
        return
    try:
        plot.write_text(panels(drawn, caption), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--plot {plot}: {error.strerror}") from None
