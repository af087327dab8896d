"""`lockstep race`: which of several placements is fastest, settled in turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import (
    SECONDS,
    SHARE,
    complete_key,
    data_root_option,
    json_option,
    runs_option,
)
from lockstep.cli.output import console, next_step, note, place, print_json

if TYPE_CHECKING:
    from lockstep.turns.folder import Record

EPILOG = """\b
Examples:
  lockstep race 'ranks=1 threads=2' ranks=2 'ranks=2 backend=shm'
  lockstep race fused=false fused=true --all 'model=cifar-vgg data=cifar10'
  lockstep race strategy=ddp strategy=flat --all ranks=2 --budget 120s
  lockstep race my.toml 'my.toml precision=bf16' --until 1%
  lockstep race 'train.py ranks=1' 'train.py ranks=2'     your own training loop (docs/own-loop.md)
  lockstep race '$ python a.py' '$ python a.py --amp'     any programs: a step is a line that they print
  lockstep race '$ python old/a.py' '$ python a.py' --fail-if-slower   in CI

Each argument is a contender: key=value words in quotes, a recipe file, a published recipe, a training
loop of your own, a run, or any program: images=6400 $ COMMAND, if it trains 6400 images a line.
All are alive at the same time and take windows of steps in turns; each is started several times.
The first one is what the others are compared with.
"""


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
    from lockstep.errors import LockstepError, RunFailed
    from lockstep.files import write_atomically
    from lockstep.report import race as report
    from lockstep.report.document import of_parts
    from lockstep.report.html import page
    from lockstep.report.progress import RaceLive
    from lockstep.report.terminal import draw
    from lockstep.turns import Budget
    from lockstep.turns.hold import hold

    chosen = Budget(seconds=budget, margin=margin)
    folder, record = hold(
        contenders, common, chosen, runs, name, data_root, lambda begun: RaceLive(begun, in_place=not as_json)
    )
    if as_json:
        print_json(_document(folder.path, record))
    else:
        part = report.race_part(record, folder.windows(), folder.path.name)
        draw(part, console())
        write_atomically(folder.path / "report.html", page(of_parts([part])).encode())
        note(f"page: {folder.path / 'report.html'}")
        if record.ratios:
            next_step(report.next_step(record, folder.windows(), place(runs)))
    if not record.ratios:
        raise RunFailed(f"race: {report.lost(record)}; what was measured is in {folder.path}")
    if fail_if_slower and record.failures:
        raise RunFailed(f"race: {report.lost(record)}")
    slower = [ratio for ratio in record.ratios if ratio.verdict == "slower"] if fail_if_slower else []
    if slower:
        found = "; ".join(f"'{ratio.contender}', {report.speed(ratio)} as fast" for ratio in slower)
        meanwhile = report.busy(folder.windows())
        raise LockstepError(f"race: slower than '{slower[0].baseline}': {found}{f'; {meanwhile}' if meanwhile else ''}")


def _document(path: Path, record: Record) -> dict[str, Any]:
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(record)
    return {"race": str(path), **document}
