"""`lockstep verify`: the proof, on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import data_root_option, json_option, read_words, runs_option, whole, words_argument
from lockstep.cli.output import console, next_step, note, place, print_json, print_table, styled
from lockstep.errors import InputError, RunFailed
from lockstep.placement import Placement
from lockstep.units import counted

if TYPE_CHECKING:
    from lockstep.verify.checks import Check
    from lockstep.verify.foreign.judge import Verdict

EPILOG = """\b
Examples:
  lockstep verify
  lockstep verify my.toml ranks=2 launcher=torchrun
  lockstep verify model=nets.py:Net data=sets.py:load global_batch=48 ranks=3

\b
A script that was not written for Lockstep, unedited:
  lockstep verify -- torchrun --nproc-per-node 2 train.py
  lockstep verify --steps 20 --no-dropout -- \\
    accelerate launch --multi_gpu --num_processes 2 train.py
  lockstep verify --ranks 2 -- python train.py --devices {ranks}
  lockstep verify --batch 64 -- \\
    torchrun --nproc-per-node 2 train.py --batch-size {batch}

It is run with its ranks, and as one process that gets the batches of all of them, for a few steps each. {batch} is
the batch of a rank (--batch divided by the ranks), and that of the one process. Exit codes: 0 proven, 3 not.
"""
COLOURS = {"ok": "green", "DIFFERENT": "red", "not proven": "yellow"}
COLOURS_OF_VERDICTS = {"same": "green", "different": "red", "not proven": "yellow"}
FOREIGN = "lockstep.command"
"""In the context: the words after `--`; None where there is no `--`."""


class WithCommand(click.Command):
    """What follows `--` is a command of the user's, and no word of ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[FOREIGN] = args[at + 1 :] if at < len(args) else None
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@click.command("verify", cls=WithCommand, epilog=EPILOG)
@words_argument
@runs_option
@data_root_option
@click.option("--keep", is_flag=True, help="Keep the short runs, with all that was written down of every step.")
@json_option
@click.option("--steps", type=whole(1, 1000), help="With a command: how many steps are compared (default 8).")
@click.option("--batch", type=whole(1), help="With a command: the global batch that {batch} is made of.")
@click.option("--ranks", type=whole(2, 1024), help="With a command: what {ranks} stands for (default 2).")
@click.option("--no-dropout", is_flag=True, help="With a command: set every dropout to 0 for the proof.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    runs: Path | None,
    data_root: str | None,
    keep: bool,
    as_json: bool,
    **foreign: Any,
) -> None:
    """Prove that 1 process, N ranks, and N ranks with accumulation compute the same. With `-- COMMAND`, for any script.

    Makes short runs of the recipe in real processes. At every step each placement starts from the same state, and must give
    the same gradient and the same weights, up to rounding, with float64 as the judge. Two runs of one placement must agree
    in every bit. What was proven is remembered in the folder of runs, for `lockstep explain`.

    A command after `--` is run as it is, for a few steps: with its ranks, and as one process. What differs first is named.
    """
    argv = ctx.meta[FOREIGN]
    if argv is not None:
        if words or data_root:
            raise InputError("verify: a recipe and a command: give one of them")
        if not argv:
            raise InputError(
                "verify: no command after '--', for example: lockstep verify -- torchrun --nproc-per-node 2 train.py"
            )
        _foreign(ctx, argv, runs, keep, as_json, **foreign)
        return
    given = next((name for name, value in foreign.items() if value), None)
    if given:
        raise InputError(f"--{given.replace('_', '-')}: is for a command: lockstep verify -- COMMAND")
    _recipe(words, runs, data_root, keep, as_json)


@contextmanager
def _folder(runs: Path | None, keep: bool) -> Iterator[Path]:
    from lockstep.verify.begin import short_runs

    with short_runs(runs, keep) as folder:
        try:
            yield folder
        finally:
            if keep:
                note(f"the runs are in {folder}")


def _recipe(words: tuple[str, ...], runs: Path | None, data_root: str | None, keep: bool, as_json: bool) -> None:
    from lockstep.verify.begin import check
    from lockstep.verify.prove import verify
    from lockstep.verify.verified import record

    recipe, placement = read_words(words, base={"ranks": 2})
    if expected := check(recipe, placement):
        note(expected)
    with _folder(runs, keep) as folder:
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
        record(folder.parent, verdict.proven_specs, len(checks), verdict.steps)
        if not as_json:
            console().print(
                styled((f"{counted(len(checks), 'check')} passed:", "green"), " the placements compute the same.")
            )
            next_step(f"{race_of(words, placement.ranks, runs, data_root)} (which of them is faster)")


def race_of(words: tuple[str, ...], ranks: int, runs: Path | None, data_root: str | None) -> str:
    """The same words as a race against one process: what they say of a recipe holds for both, what they say of a placement for the ranks."""
    fields = set(Placement.__struct_fields__)
    placed = [
        word for word in words if "=" in word and word.partition("=")[0].partition(".")[0].replace("-", "_") in fields
    ]
    common = [word for word in words if word not in placed]
    several = [f"ranks={ranks}", *(word for word in placed if not word.startswith("ranks="))]
    argv = ["lockstep", "race", "ranks=1", shlex.join(several)] + (["--all", shlex.join(common)] if common else [])
    return shlex.join(argv) + place(runs, data_root)


def _foreign(
    ctx: click.Context,
    argv: list[str],
    runs: Path | None,
    keep: bool,
    as_json: bool,
    steps: int | None,
    batch: int | None,
    ranks: int | None,
    no_dropout: bool,
) -> None:
    from lockstep.verify.foreign.prove import plan, prove

    planned = plan(argv, batch, ranks)
    with _folder(runs, keep) as folder:
        verdict = prove(planned, folder, steps or 8, no_dropout, tell=note)
    page = _write_page(verdict, argv, runs)
    if as_json:
        print_json({**_foreign_document(verdict), "page": str(page)})
    else:
        console().print(styled((verdict.sentence, COLOURS_OF_VERDICTS[verdict.verdict])))
        for finding in verdict.findings[1:4]:
            console().print(f"  then: step {finding.step}: {finding.text}")
        if verdict.checks:
            _table(verdict.checks, {})
        for line in verdict.lines:
            console().print(line)
        if verdict.verdict == "same":
            next_step(f"lockstep attach -- {shlex.join(argv)} (where the time of its steps goes)")
    note(f"page: {page}")
    if verdict.verdict != "same":
        ctx.exit(RunFailed.exit_code)


def _write_page(verdict: Verdict, argv: list[str], runs: Path | None) -> Path:
    """The page, and what it shows as one JSON document beside it."""
    import json

    from lockstep.attach.command import script_of
    from lockstep.files import write_atomically
    from lockstep.report.document import of_parts
    from lockstep.report.html import page
    from lockstep.report.proof import proof_part
    from lockstep.verify.begin import page_folder

    folder = page_folder(runs, script_of(argv))
    write_atomically(folder / "proof.json", json.dumps(_foreign_document(verdict), indent=1).encode())
    path = folder / "report.html"
    write_atomically(path, page(of_parts([proof_part(verdict, argv, script_of(argv))])).encode())
    return path


def _foreign_document(verdict: Verdict) -> dict[str, object]:
    return {
        "verdict": verdict.verdict,
        "sentence": verdict.sentence,
        "reason": verdict.reason,
        "first_step": verdict.findings[0].step if verdict.findings else None,
        "findings": [{"step": each.step, "reason": each.key, "text": each.text} for each in verdict.findings],
        "ranks": verdict.ranks,
        "steps": verdict.steps,
        "batch": verdict.batch,
        "checks": [_document(check) for check in verdict.checks],
        "notes": verdict.lines,
    }


def _failure(failed: list[Check], total: int, keep: bool) -> str:
    first = failed[0]
    hint = "" if keep else "; --keep keeps what was written down"
    diverged = [check for check in failed if check.diverged]
    if len(diverged) == len(failed):
        return f"verify: nothing is proven: {first.diverged}; try a smaller optimizer.lr{hint}"
    first = next(check for check in failed if not check.diverged)
    where = f", {first.where}" if first.where else ""
    return (
        f"verify: {len(failed)} of {counted(total, 'check')} failed, first '{first.what}' ({first.against}{where}): "
        f"the placements do NOT compute the same{hint}"
    )


def _document(check: Check) -> dict[str, object]:
    finite = {key: None if value != value else value for key, value in check.__dict__.items()}
    return {**finite, "passed": check.passed, "verdict": check.verdict}


def _print(checks: list[Check]) -> None:
    _table(checks, {"placements": lambda check: check.against})
    console().print(
        "Differences of tensors are shares of their length (of weights: of what the step moved them by), where they come closest to what "
        "is allowed, or first go beyond it."
    )


def _table(checks: list[Check], more: dict[str, Callable[[Check], str]]) -> None:
    print_table(
        ["check", *more, "difference", "allowed", "", "at"],
        [
            [
                check.what,
                *(column(check) for column in more.values()),
                _number(check.difference),
                _number(check.allowed),
                styled((check.verdict, COLOURS[check.verdict])),
                check.where,
            ]
            for check in checks
        ],
        right=(1 + len(more), 2 + len(more)),
    )


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:g}" if float(value).is_integer() else f"{value:.1e}"
