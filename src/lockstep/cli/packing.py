"""`lockstep study pack` and `unpack`: a study as one file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from lockstep.cli.options import json_option, runs_option
from lockstep.cli.output import next_step, note, place, print_json
from lockstep.errors import InputError
from lockstep.run import runs_root
from lockstep.units import counted


@click.command(
    "pack",
    epilog="\b\nExamples:\n  lockstep study pack batch-size\n  lockstep study pack batch-size -o monday.study.zip --no-steps\n\n"
    "\b\nA pack has the records, curves and environment of all runs: no weights, no checkpoints, no data.",
)
@click.argument("name")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The file to write (default: NAME.study.zip in this folder).",
)
@click.option("--no-steps", is_flag=True, help="Leave out the records of single steps: most of a large pack.")
@runs_option
@json_option
def pack(name: str, output: Path | None, no_steps: bool, runs: Path | None, as_json: bool) -> None:
    """Write a study as one file, to keep it or to read it elsewhere."""
    from dataclasses import asdict

    from lockstep.cli.output import check_output, writing
    from lockstep.study.folder import StudyFolder
    from lockstep.study.pack import ENDING
    from lockstep.study.pack import pack as write_pack
    from lockstep.text import some

    found = StudyFolder.find(name, runs)
    if found is None:
        raise InputError(f"no study '{name}' in {runs_root(runs)}: 'lockstep study list' lists them")
    file = output or Path(found.path.absolute().name + ENDING)
    check_output(file, folder=False)
    with writing(file):
        packed = write_pack(found, file, progress=_count_files("packing"), steps=not no_steps)
    if packed.under_way:
        note(f"{counted(packed.under_way, 'run')} had not ended: the pack has what they had recorded")
    if packed.left_out:
        first, why = next(iter(packed.left_out.items()))
        note(f"not in the pack: {some(list(packed.left_out))} ({first}: {why})")
    if as_json:
        print_json(asdict(packed))
    else:
        click.echo(f"{file}: {counted(packed.runs, 'run')}, {packed.bytes / 1e3:,.0f} kB")
        next_step(f"lockstep study unpack {shlex.quote(file.name)} (on another machine)")


@click.command(
    "unpack",
    epilog="\b\nExamples:\n  lockstep study unpack batch-size.study.zip\n"
    "  lockstep study unpack laptop.study.zip --name batch-size-laptop\n"
    "  lockstep study unpack ana.study.zip --runs class/ana\n\n"
    "\b\nA study or a run that is there already is never overwritten.",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", help="Call the study so here, for example to have the same study of two machines.")
@runs_option
@json_option
def unpack(file: Path, name: str | None, runs: Path | None, as_json: bool) -> None:
    """Read a packed study: afterwards it is as if it had been run here."""
    from dataclasses import asdict

    from lockstep.study.unpack import unpack as read_pack

    found = read_pack(file, runs, name, progress=_count_files("unpacking"))
    if not found.is_new:
        note(f"study '{found.study}' was there already, with the same content")
    if found.new_runs < found.runs:
        note(f"{found.runs - found.new_runs} of {counted(found.runs, 'run')} were there already, with the same content")
    if as_json:
        print_json(asdict(found))
    else:
        click.echo(f"study '{found.study}', {counted(found.runs, 'run')}")
        next_step(f"lockstep study show {found.study}{place(runs)}")


def _count_files(doing: str) -> Any:
    """Says how far it is: nothing for two seconds, then one line that stays, then a line in place."""
    import time

    from lockstep.report.progress import StatusLine

    line, began = StatusLine(), time.monotonic()
    said = False

    def progress(done: int, total: int) -> None:
        nonlocal said
        if done == total:
            line.clear()
        elif time.monotonic() - began >= 2:
            (line.show if said else line.say)(f"{doing}: {done:,} of {total:,} files")
            said = True

    return progress
