"""`lockstep verify`: the proof, on this machine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from lockstep.cli.output import console, json_option, note, print_json, print_table, styled
from lockstep.cli.run import data_root_option, read_words, words_argument

EPILOG = """\b
Examples:
  lockstep verify
  lockstep verify my.toml ranks=2 launcher=torchrun
  lockstep verify model=nets.py:Net data=sets.py:load global_batch=48 ranks=3
"""


@click.command("verify", epilog=EPILOG)
@words_argument
@data_root_option
@click.option("--keep", is_flag=True, help="Keep the short runs (they are kept anyway when a check fails).")
@json_option
def command(words: tuple[str, ...], data_root: Path | None, keep: bool, as_json: bool) -> None:
    """Prove that 1 process, N ranks, and N ranks with accumulation compute the same.

    Makes short runs of the recipe in real processes and compares gradients, losses and weights. Two runs of one
    placement must agree in every bit.
    """
    from lockstep.errors import InputError, RunFailed
    from lockstep.placement import changes_mathematics
    from lockstep.verify import GRADIENT_TOLERANCE, LOSS_TOLERANCE, verify

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
    folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-"))
    done = False
    try:
        checks = verify(recipe, placement, folder, str(data_root.absolute()) if data_root else None, tell=note)
        failed = [check for check in checks if not check.passed]
        if as_json:
            print_json([{**check.__dict__, "passed": check.passed} for check in checks])
        else:
            print_table(
                ["check", "placements", "difference", "allowed", ""],
                [
                    [
                        c.what,
                        c.against,
                        _number(c.difference),
                        _number(c.tolerance),
                        styled(("ok", "green") if c.passed else ("DIFFERENT", "red")),
                    ]
                    for c in checks
                ],
                right=(2, 3),
            )
            console().print(
                f"Allowed: {GRADIENT_TOLERANCE:g} of a gradient's largest entry (rounding of float32 sums in another order gives about 1e-6; "
                f"a wrong average is off by 1/{recipe.global_batch} or more), {LOSS_TOLERANCE:g} of a loss (rounding grows along the curve)."
            )
        done = not failed
        if failed:
            worst = failed[0]
            raise RunFailed(
                f"verify: {len(failed)} of {len(checks)} checks failed, first '{worst.what}' ({worst.against}): the placements do NOT "
                f"compute the same; the runs are in {folder}"
            )
        if not as_json:
            console().print(styled((f"{len(checks)} checks passed:", "green"), " the placements compute the same."))
    finally:
        if done and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        elif done:
            note(f"the runs are in {folder}")


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
