"""`lockstep comms`: what an exchange costs on this machine or between hosts, and which backend can do what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lockstep.cli.options import complete_key, json_option, real, whole
from lockstep.cli.output import console, next_step, note, print_json, print_table, styled
from lockstep.errors import InputError, RunFailed
from lockstep.report.progress import StatusLine
from lockstep.run import write_atomic
from lockstep.units import counted

if TYPE_CHECKING:
    from lockstep.backends.costs.cells import Cell, Fitted
    from lockstep.comms.measure import Settings
    from lockstep.placement import Placement

EPILOG = """\b
Examples:
  lockstep comms --quick
  lockstep comms --ranks 2 --ranks 4 --plot comms.svg
  lockstep comms --backend gloo --collective all_reduce --max-bytes 1048576
  lockstep comms --own rings.py:all_reduce
  lockstep comms --capabilities
  lockstep comms hosts=emulated:2 link=1gbit,0.5ms --collective all_reduce
  lockstep comms launcher=slurm hosts=2 ranks=2 slurm.partition=debug      between nodes of a cluster
  salloc -N2 lockstep comms hosts=2 --quick                                the same, in an allocation

Exit codes: 0 measured, 2 wrong input, 3 a result was WRONG or nothing could be measured.
"""


@click.command("comms", epilog=EPILOG)
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_key)
@click.option(
    "--ranks",
    type=whole(2, 1024),
    multiple=True,
    help="Number of ranks; may be repeated. Unstated: 2, or one per host.",
)
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
    words: tuple[str, ...],
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

    KEY=VALUE says where the ranks are, as for run: launcher, hosts, link, threads, and the keys of slurm. What is measured there is kept
    apart, and predict --link measured uses it.
    """
    from lockstep.backends.costs.plan import BACKENDS, COLLECTIVES, LARGEST, sizes
    from lockstep.comms import asked
    from lockstep.launch.workplace import workplace
    from lockstep.machine.cuda import cuda_present

    where, ranks = _where(words, ranks)
    if where:
        backends = backends or ((where.backend,) if where.backend != "auto" else ())
        device = where.device if device == "auto" else device
    asked.known("--backend", backends, BACKENDS)
    asked.known("--collective", collectives, COLLECTIVES)
    asked.check_plot(plot, capabilities)
    wanted = sizes(LARGEST if max_bytes is None else max_bytes, quick)
    cuda = cuda_present() and not (where and where.launcher == "slurm")
    device = ("cuda" if cuda else "cpu") if device == "auto" else device
    if capabilities:
        if where:
            raise InputError(f"--capabilities tries the backends of this machine: leave {' '.join(words)} out")
        with workplace(out, note) as folder:
            _capabilities(ranks[0], list(backends), cell_limit, folder, as_json)
        return
    there, left_out = asked.there(backends, device, max(ranks), where)
    for name, reason in left_out.items():
        note(f"{name} is left out: {reason}")
    for text in asked.warnings(max(ranks), where):
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
        where=where,
    )
    from lockstep.run import runs_root

    shared = runs_root(None).absolute() if where and where.launcher == "slurm" else None
    with workplace(out, note, within=shared) as folder:
        _measure(settings, left_out, folder, plot, as_json)


def _where(words: tuple[str, ...], ranks: tuple[int, ...]) -> tuple[Placement | None, tuple[int, ...]]:
    """The placement that the words name, None where they name this machine alone; and the numbers of ranks."""
    if not words:
        return None, ranks or (2,)
    from lockstep.launch.where import where

    stated = next((word for word in words if word.startswith("ranks=")), None)
    if stated and ranks:
        raise InputError(f"{stated} and --ranks say the same twice: leave one out")
    found = where(words, "comms", 1)
    counts = ranks or ((found.ranks if found.ranks > 1 else 2),)
    for count in counts:
        if count % found.hosts:
            raise InputError(f"--ranks {count} do not divide over hosts={found.hosts}")
    if found.hosts > 1 or found.launcher != "auto":
        return found, counts
    if others := [word for word in words if word is not stated and "=" in word]:
        raise InputError(
            f"{others[0]}: on this machine alone there is nothing to place: use --backend and --device, or name hosts or a launcher"
        )
    return None, counts


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
        "on": _on(settings.where),
        "left_out": left_out,
        "cells": msgspec.to_builtins(cells),
        "lines": msgspec.to_builtins(fitted),
        "kept_in": _keep([cell for cell in cells if cell.collective != OWN], settings),
        "choices": [],
    }
    for ranks in settings.ranks if settings.where is None else []:
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


def _on(where: Placement | None) -> str:
    from lockstep.backends.costs.between import kind_of

    return f" on {counted(where.hosts, 'host')} ({kind_of(where)})" if where else ""


def _print(cells: list[Cell], fitted: list[Fitted], document: dict[str, Any]) -> None:
    from lockstep.comms import report
    from lockstep.report.characters import curves
    from lockstep.report.exchange import latency

    out = console()
    for collective, ranks in dict.fromkeys((cell.collective, cell.ranks) for cell in cells):
        chosen = [cell for cell in cells if (cell.collective, cell.ranks) == (collective, ranks)]
        out.print(styled((collective, "bold"), f", {counted(ranks, 'rank')}{document['on']}, {chosen[0].device}"))
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
    where = document["settings"]["where"]
    if where and where["hosts"] > 1:
        next_step("lockstep predict last --link measured (what these hosts would give)")
    elif len(measured) > 1:
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
        next_step(f"lockstep comms --ranks {ranks} --quick (what each of them costs)")
    wrong = [a for a in answers if a.answer == "WRONG"]
    if wrong:
        raise RunFailed(f"comms: {wrong[0].collective} on {wrong[0].backend} gave a WRONG result: {wrong[0].reason}")


def _keep(cells: list[Cell], settings: Settings) -> str | None:
    """Where the cells went, for backend=auto or for predict; a cache that cannot be written is a remark, not a failure."""
    from lockstep.backends.costs import between, store
    from lockstep.backends.costs.plan import placement_for

    if not cells:
        return None
    where = None
    try:
        if settings.where is None:
            return str(store.save(cells))
        for ranks in settings.ranks:
            placement = placement_for(settings.backends[0], settings.device, ranks, settings.limit_s, settings.where)
            where = between.save(placement, [cell for cell in cells if cell.ranks == ranks])
        return str(where)
    except OSError as error:
        path, whom = (between.path(), "predict") if settings.where else (store.path(), "backend=auto")
        note(f"warning: not kept for {whom}: cannot write {path}: {error.strerror}")
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
