"""`lockstep verify`: the proof, on this machine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.options import data_root_option, json_option, read_words, runs_option, words_argument
from lockstep.cli.output import console, note, print_json, print_table, styled
from lockstep.errors import InputError, RunFailed
from lockstep.run import folder_error, runs_root

if TYPE_CHECKING:
    from lockstep.verify.checks import Check

EPILOG = """\b
Examples:
  lockstep verify
  lockstep verify my.toml ranks=2 launcher=torchrun
  lockstep verify model=nets.py:Net data=sets.py:load global_batch=48 ranks=3
"""
COLOURS = {"ok": "green", "DIFFERENT": "red", "not proven": "yellow"}


@click.command("verify", epilog=EPILOG)
@words_argument
@runs_option
@data_root_option
@click.option("--keep", is_flag=True, help="Keep the short runs, with all that was written down of every step.")
@json_option
def command(words: tuple[str, ...], runs: Path | None, data_root: str | None, keep: bool, as_json: bool) -> None:
    """Prove that 1 process, N ranks, and N ranks with accumulation compute the same.

    Makes short runs of the recipe in real processes. At every step each placement starts from the same state, and must give
    the same gradient and the same weights, up to rounding, with float64 as the judge. Two runs of one placement must agree
    in every bit. What was proven is remembered in the folder of runs, for `lockstep explain`.
    """
    from lockstep.placement import changes_mathematics
    from lockstep.verify.prove import verify
    from lockstep.verify.verified import record

    recipe, placement = read_words(words, base={"ranks": 2})
    if placement.ranks < 2:
        raise InputError(f"ranks={placement.ranks}: there is nothing to compare; choose ranks=2 or more")
    if placement.hosts > 1 and not placement.emulated and placement.launcher != "slurm":
        raise InputError(
            f"hosts={placement.hosts}: verify starts everything by itself; choose hosts=1, hosts=emulated:{placement.hosts} or launcher=slurm"
        )
    changed = changes_mathematics(placement, recipe)
    if changed:
        note(f"this placement changes the mathematics, so differences are expected: {changed}")
    root = runs_root(runs).absolute()
    try:
        # With the runs, not in the system's temporary folder: the ranks of other hosts have to see it.
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".verify-", dir=root))
    except OSError as error:
        raise folder_error(root / ".verify", error) from None
    try:
        verdict = verify(recipe, placement, folder, data_root, tell=note)
        checks = verdict.checks
        failed = [check for check in checks if not check.passed]
        if as_json:
            print_json([_document(check) for check in checks])
        else:
            _print(checks)
            for line in verdict.lines:
                console().print(line)
        if failed:
            raise RunFailed(_failure(failed, len(checks), keep))
        record(root, verdict.proven_specs, len(checks), verdict.steps)
        if not as_json:
            console().print(styled((f"{len(checks)} checks passed:", "green"), " the placements compute the same."))
    finally:
        if keep:
            note(f"the runs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _failure(failed: list[Check], total: int, keep: bool) -> str:
    first = failed[0]
    hint = "" if keep else "; --keep keeps what was written down"
    diverged = [check for check in failed if check.diverged]
    if len(diverged) == len(failed):
        return f"verify: nothing is proven: {first.diverged}; try a smaller optimizer.lr{hint}"
    first = next(check for check in failed if not check.diverged)
    where = f", {first.where}" if first.where else ""
    return (
        f"verify: {len(failed)} of {total} checks failed, first '{first.what}' ({first.against}{where}): "
        f"the placements do NOT compute the same{hint}"
    )


def _document(check: Check) -> dict[str, object]:
    finite = {key: None if value != value else value for key, value in check.__dict__.items()}
    return {**finite, "passed": check.passed, "verdict": check.verdict}


def _print(checks: list[Check]) -> None:
    print_table(
        ["check", "placements", "difference", "allowed", "", "at"],
        [
            [
                check.what,
                check.against,
                _number(check.difference),
                _number(check.allowed),
                styled((check.verdict, COLOURS[check.verdict])),
                check.where,
            ]
            for check in checks
        ],
        right=(2, 3),
    )
    console().print(
        "Differences of tensors are shares of their length (of weights: of what the step moved them by), where they come closest to what "
        "is allowed, or first go beyond it."
    )


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:g}" if float(value).is_integer() else f"{value:.1e}"
