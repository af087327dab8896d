"""`lockstep race`: which of several placements is fastest, settled in turns."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import (
    SECONDS,
    SHARE,
    complete_key,
    data_root_option,
    json_option,
    read_words,
    runs_option,
    split_script,
)
from lockstep.cli.output import console, note, print_json

if TYPE_CHECKING:
    from lockstep.turns import Contender, Race
    from lockstep.turns.folder import Entry, Record

EPILOG = """\b
Examples:
  lockstep race 'ranks=1 threads=2' 'ranks=2 backend=gloo' 'ranks=2 backend=shm'
  lockstep race fused=false fused=true --all 'model=cifar-vgg data=cifar10'
  lockstep race strategy=ddp strategy=flat zero=true --all ranks=2 --budget 120s
  lockstep race my.toml 'my.toml precision=bf16' --until 1%
  lockstep race 'train.py ranks=1' 'train.py ranks=2'     your own training loop (docs/own-loop.md)
  lockstep race '$ python a.py' '$ python a.py --amp'     any programs: a step is a line that they print
  lockstep race '$ python old/a.py' '$ python a.py' --fail-if-slower       in CI

\b
Each argument is a contender: key=value words in quotes, a recipe file, a published recipe, a training
loop of your own, a run, or any program: images=6400 $ COMMAND, if it trains 6400 images a line.
All are alive at the same time and take windows of steps in turns; each is started several times.
The first one is what the others are compared with.
"""

MOST_IMAGES = 1e9


@click.command("race", epilog=EPILOG)
@click.argument("contenders", nargs=-1, metavar="CONTENDER...", shell_complete=complete_key)
@click.option("--all", "common", default="", metavar="WORDS", help="Words that hold for all contenders.")
@click.option("--budget", type=SECONDS, default="60s", help="Stop after this time, settled or not.")
@click.option("--until", "margin", type=SHARE, default="2%", help="Differences below this are called the same.")
@click.option(
    "--fail-if-slower", is_flag=True, help="Exit with 1 if a contender is settled to be slower than the first."
)
@click.option("--name", help="Name of the race's folder (default: made from the time).")
@runs_option
@data_root_option
@json_option
def command(
    contenders: tuple[str, ...],
    common: str,
    budget: float,
    margin: float,
    fail_if_slower: bool,
    name: str | None,
    runs: Path | None,
    data_root: str | None,
    as_json: bool,
) -> None:
    """Find out which of several placements or recipes is fastest."""
    from lockstep.errors import InputError, LockstepError, RunCancelled, RunFailed
    from lockstep.files import write_atomically
    from lockstep.report import race as report
    from lockstep.report.document import of_parts
    from lockstep.report.html import page
    from lockstep.report.terminal import draw
    from lockstep.turns import Budget, Race
    from lockstep.turns.folder import RaceFolder, opening, state_of

    if len(contenders) < 2:
        raise InputError("race: name two or more contenders, each in quotes: lockstep race 'ranks=1 threads=2' ranks=2")
    entries = _entries(contenders, common, runs)
    _check_units(entries)
    _check_memory(entries)
    folder = RaceFolder.create(runs, name)
    record = opening(entries, common, Budget(seconds=budget, margin=margin))
    folder.write(record)
    racing = [_contender(entry, folder.starts / str(number), data_root) for number, entry in enumerate(entries, 1)]
    live = Live(record, not as_json)
    race = Race(racing, record.budget, folder.keep, live)
    over = False
    try:
        with live:
            race.run()
        over = True
    except KeyboardInterrupt:
        raise RunCancelled(f"stopped; what was measured is in {folder.path}") from None
    finally:
        folder.write(record := state_of(race, record, over))
    if as_json:
        print_json(_document(folder.path, record))
    else:
        part = report.race_part(record, race.windows, folder.path.name)
        draw(part, console())
        write_atomically(folder.path / "report.html", page(of_parts([part])).encode())
        note(f"page: {folder.path / 'report.html'}")
    if not record.ratios:
        raise RunFailed(f"race: {_lost(record)}; what was measured is in {folder.path}")
    slower = [ratio for ratio in record.ratios if ratio.verdict == "slower"] if fail_if_slower else []
    if slower:
        found = "; ".join(f"'{ratio.contender}', {report.speed(ratio)} as fast" for ratio in slower)
        raise LockstepError(f"race: slower than '{slower[0].baseline}': {found}")


def _entries(contenders: Sequence[str], common: str, runs: Path | None) -> list[Entry]:
    import msgspec

    found: list[Entry] = []
    for text in contenders:
        taken = sum(entry.name == text or entry.name.startswith(f"{text} (") for entry in found)
        entry = _read(text, common, runs)
        found.append(msgspec.structs.replace(entry, name=f"{text} ({taken + 1})") if taken else entry)
    return found


def _read(text: str, common: str, runs: Path | None) -> Entry:
    """One contender. What is wrong is said with the contender that it is wrong in."""
    from lockstep.errors import InputError
    from lockstep.recipes import path_of
    from lockstep.run import Run, runs_root
    from lockstep.turns.folder import Entry

    before, dollar, command = text.partition("$ ")
    if dollar and all(word.startswith("images=") for word in before.split()):
        return _foreign(text, before, command)
    try:
        given = shlex.split(text)
        if "--" in given:  # before the words for a script; of a whole command line, click takes it away
            given.remove("--")
        words, script, script_args = split_script(tuple(given))
        if not words and not script:
            raise InputError("it is empty")
        if len(words) == 1 and "=" not in words[0] and not words[0].endswith(".toml") and not path_of(words[0]):
            spec = Run.find(words[0], runs_root(runs)).spec()
            recipe, placement = spec.recipe, spec.placement
        else:
            recipe, placement = read_words((*shlex.split(common), *words))
        if placement.launcher == "slurm" and not os.environ.get("SLURM_JOB_ID"):
            raise InputError(
                "contenders share their cores, and jobs do not: race within one allocation, salloc … lockstep race …"
            )
    except (InputError, ValueError) as error:
        raise InputError(f"race: '{text}': {error}") from None
    return Entry(name=text, recipe=recipe, placement=placement, script=script, script_args=script_args)


def _foreign(text: str, before: str, command: str) -> Entry:
    """`$ COMMAND` or `images=N $ COMMAND`. It is started as it is, by no shell."""
    from lockstep.errors import InputError
    from lockstep.placement import Placement
    from lockstep.recipe import Recipe
    from lockstep.turns.folder import Entry

    try:
        argv = shlex.split(command)
        images = [float(word.removeprefix("images=")) for word in before.split()]
    except ValueError as error:
        raise InputError(f"race: '{text}': {error}") from None
    if not argv:
        raise InputError(f"race: '{text}': there is no command after '$'")
    if len(images) > 1 or not all(0 < count <= MOST_IMAGES for count in images):
        raise InputError(f"race: '{text}': write it as images=6400 $ COMMAND, a number above 0")
    return Entry(name=text, recipe=Recipe(), placement=Placement(), command=argv, images=images[0] if images else 0.0)


def _contender(entry: Entry, folder: Path, data_root: str | None) -> Contender:
    from lockstep.run import Options
    from lockstep.turns import Command, Ranks

    if entry.command:
        return Command(entry.name, entry.command, entry.images or 1.0)
    options = Options(data_root=data_root, script=entry.script, script_args=entry.script_args)
    return Ranks(entry.name, entry.recipe, entry.placement, folder, options)


def _check_units(entries: Sequence[Entry]) -> None:
    """Lines are compared with lines, and images with images."""
    from lockstep.errors import InputError

    lines = [entry.name for entry in entries if entry.command and not entry.images]
    if lines and len(lines) < len(entries):
        raise InputError(
            f"race: '{lines[0]}': how many images it trains from one line that it prints to the next is not known: write images=N $ COMMAND"
        )


def _check_memory(entries: Sequence[Entry]) -> None:
    from lockstep.errors import InputError
    from lockstep.turns.ranks import memory_problem

    if problem := memory_problem(entry.placement for entry in entries):
        raise InputError(f"race: {problem}")


def _lost(record: Record) -> str:
    name, reason = next(iter(record.failures.items()), ("", "nothing was measured"))
    return f"{name}: {reason}" if name else reason


def _document(path: Path, record: Record) -> dict[str, Any]:
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(record)
    return {"race": str(path), **document}


class Live:
    """The race as it goes: a table in place on a terminal, a line for each start elsewhere."""

    def __init__(self, record: Record, shown: bool) -> None:
        self._record, self._live, self._starts, self._next = record, None, 0, 0.0
        if shown and console().is_terminal:
            from rich.live import Live as RichLive

            self._live = RichLive(console=console(), auto_refresh=False, transient=True)

    def __enter__(self) -> Live:
        if self._live:
            self._live.__enter__()
        else:
            note(f"{len(self._record.entries)} contenders, up to {self._record.budget.seconds:g} s: starting …")
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live:
            self._live.__exit__(*error)

    def __call__(self, race: Race) -> None:
        """Drawing takes a processor from the contenders, so it is done between rounds, and not after each."""
        now = time.monotonic()
        if now < self._next:
            return
        from lockstep.report.race import speed, table
        from lockstep.report.terminal import table_text
        from lockstep.turns.folder import state_of

        self._next = now + 1.0
        if self._live:
            record = state_of(race, self._record, over=False)
            text = table_text(table(record, race.windows), console())
            text.append(f"\n{race.starts} starts, {race.elapsed:.0f} of {self._record.budget.seconds:g} s", style="dim")
            self._live.update(text, refresh=True)
        elif race.starts > self._starts:
            self._starts = race.starts
            found = "; ".join(f"{ratio.contender}: {speed(ratio)}" for ratio in race.ratios())
            note(f"{race.elapsed:.0f} s, {race.starts} starts: {found}")
