"""`lockstep predict`: what more ranks would give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lockstep.cli.options import data_root_option, json_option, read_words, real, runs_option, whole
from lockstep.cli.output import console, next_step, note, print_json, print_records, styled
from lockstep.errors import InputError
from lockstep.run import Run, runs_root

if TYPE_CHECKING:
    from lockstep.placement import Placement
    from lockstep.predict.fit import Fit
    from lockstep.recipe import Recipe

# From steps of an attached command nothing is known of a thousand ranks.
USUAL_OF_ATTACHED = 64
EPILOG = """\b
Examples:
  lockstep predict last --measure                      fit the last run's recipe here, then predict
  lockstep predict last --ranks 2,4,8,…,1024 --link 25gbit,10us
  lockstep predict last --link 1gbit --link 10gbit --link measured         several, in one table
  lockstep predict last --weak --ranks 2,4,…,64        keep the batch per rank, not the global batch
  lockstep predict last --every 8                      local SGD: weights are averaged every 8 steps
  lockstep predict global_batch=256 backend=gloo       a recipe instead of a run
  lockstep predict last --replay --ranks 1000,10000    event by event, and what one slow rank costs
  lockstep predict RUN --ranks 2,4,8 --link 10gbit     a run of 'lockstep attach': from what was seen
  lockstep predict --check                             what predictions are worth on this machine

A fit takes about a minute and is kept for the next time. docs/predict.md says what the model knows.
Exit codes: 0 done, 2 wrong input, 3 a measurement failed.
"""


@click.command("predict", epilog=EPILOG)
@click.argument("words", nargs=-1, metavar="[RUN | RECIPE.toml] [KEY=VALUE]...")
@click.option("--ranks", help="Rank counts, for example 2,4,8,…,1024. Unstated: powers of two.")
@click.option(
    "--link",
    "links",
    multiple=True,
    help="Between hosts: rate and one-way delay, for example 25gbit,10us, or measured, by lockstep comms; may be repeated.",
)
@click.option("--batch", type=whole(1), help="Another global batch; with --weak, that of one rank.")
@click.option("--weak", is_flag=True, help="Keep the batch per rank, not the global batch.")
@click.option("--every", type=whole(1), metavar="H", help="Local SGD: average weights every H steps.")
@click.option(
    "--algorithm",
    type=click.Choice(["auto", "ring", "tree", "hierarchical"]),
    default="auto",
    help="How the ranks exchange; auto: as the backend does.",
)
@click.option("--per-host", type=whole(1), help="Ranks on one host. Unstated: as many as the run had.")
@click.option("--measure", is_flag=True, help="Fit on this machine now, also where there is a fit.")
@click.option("--replay", is_flag=True, help="Also replay the step event by event.")
@click.option("--straggler", type=real(1, 1e6), default=1.5, help="--replay: how slow one rank is.")
@click.option("--check", is_flag=True, help="Compare predictions with held-out runs on this machine (minutes).")
@click.option("--quick", is_flag=True, help="--check: three runs of one net.")
@runs_option
@data_root_option
@json_option
def command(
    words: tuple[str, ...],
    ranks: str | None,
    links: tuple[str, ...],
    measure: bool,
    replay: bool,
    straggler: float,
    check: bool,
    quick: bool,
    runs: Path | None,
    data_root: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict a step's time on more ranks, from a cost model fitted on this machine.

    RUN is an id, its beginning or end, a folder, 'last' or 'last~1'; KEY=VALUE changes its recipe or placement. Predictions beyond
    this host assume more hosts like it, with as many ranks on each, joined by --link.
    """
    if check:
        if words or measure:
            raise InputError("--check has recipes of its own: leave the recipe and --measure out")
        _check(quick, as_json)
        return
    if quick:
        raise InputError("--quick goes with --check: add it, or leave both out")
    from lockstep.predict.document import ask, document, replays, together
    from lockstep.predict.scaling import asked_ranks, judge, table, usual_ranks

    counts, each = asked_ranks(ranks) if ranks else None, tuple(dict.fromkeys(links)) or (None,)
    if (attached := _attached(words, runs)) is not None:
        slow = straggler if replay else None
        found = _from_what_was_seen(attached, words[1:], counts, measure, slow, each, **options)
        _show(together(found), as_json)
        return
    name, recipe, placement = _asked(words, runs)
    fit, remarks = _fit(name, recipe, placement, options["batch"], options["weak"], measure, data_root)
    found = []
    for link in each:
        asked, assumed = ask(fit, recipe, placement, link=link, **options)
        rows = table(fit, asked, counts or usual_ranks(asked))
        replayed = replays(fit, rows, straggler) if replay else []
        found.append(document(name, fit, asked, rows, judge(fit, asked, rows), [*remarks, *assumed], replayed))
    _show(together(found), as_json)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        _print(found)


def _attached(words: tuple[str, ...], runs: Path | None) -> Run | None:
    """The run that is asked about, if it is one of an attached command."""
    first = words[0] if words else "last"
    if "=" in first or first.endswith(".toml") or _is_published(first):
        return None
    run = Run.find(first, runs_root(runs))
    return run if run.spec().options.attached is not None else None


def _from_what_was_seen(
    run: Run,
    words: tuple[str, ...],
    counts: list[int] | None,
    measure: bool,
    straggler: float | None,
    links: tuple[str | None, ...],
    batch: int | None,
    weak: bool,
    **options: Any,
) -> list[dict[str, Any]]:
    """An attached command keeps the batch of a rank, so scaling is weak whether it is said or not."""
    from lockstep.measure.view import view
    from lockstep.predict.attached import fit_of, remarks, shown
    from lockstep.predict.document import ask, document_of_attached, replays
    from lockstep.predict.scaling import judge, table, usual_ranks

    if batch is not None:
        raise InputError(
            f"--batch {batch}: only the steps that were seen are known: attach to the command with that batch, or ask about accumulation=N"
        )
    accumulation = _accumulation(run, words)
    seen = shown(view(run))
    fit = fit_of(seen, accumulation, note, anew=measure)
    samples = int(fit.compute.alone[0].samples)
    found = []
    for link in links:
        asked, assumed = ask(fit, fit.recipe, fit.placement, weak=True, batch=samples, link=link, **options)
        rows = table(fit, asked, counts or [count for count in usual_ranks(asked) if count <= USUAL_OF_ATTACHED])
        replayed = replays(fit, rows, straggler) if straggler else []
        verdict, said = judge(fit, asked, rows), [*remarks(seen, accumulation), *assumed]
        found.append(document_of_attached(seen, fit, asked, rows, verdict, said, replayed))
    return found


def _accumulation(run: Run, words: tuple[str, ...]) -> int | None:
    for word in words:
        key, _, value = word.partition("=")
        if key != "accumulation" or not value.isdigit() or not int(value):
            raise InputError(
                f"{word}: {run.id} is an attached command, of which nothing can be changed but accumulation=N (passes of a step)"
            )
    return int(words[-1].partition("=")[2]) if words else None


def _asked(words: tuple[str, ...], runs: Path | None) -> tuple[str | None, Recipe, Placement]:
    """The run's name if one is named, and recipe and placement."""
    first = words[0] if words else "last"
    if "=" in first or first.endswith(".toml") or _is_published(first):
        return None, *read_words(words)

    from lockstep.predict.here import as_asked
    from lockstep.settings import dotted

    run = Run.find(first, runs_root(runs))
    spec = run.spec()
    if spec.options.own_loop:
        raise InputError(f"{run.id}: a loop of the user's own cannot be measured step by step: name a recipe instead")
    recipe = msgspec.structs.replace(spec.recipe, batch_per_rank=None)
    base = {key: value for key, value in dotted(recipe, as_asked(spec)).items() if value is not None}
    return run.id, *read_words(words[1:], base)


def _is_published(word: str) -> bool:
    from lockstep.recipes import path_of

    try:
        return path_of(word) is not None
    except InputError:
        return False


def _fit(
    name: str | None,
    recipe: Recipe,
    placement: Placement,
    batch: int | None,
    weak: bool,
    measure: bool,
    data_root: str | None,
) -> tuple[Fit, list[str]]:
    """The fit that is kept, or a new one."""
    from lockstep.predict import fit as fits
    from lockstep.predict.here import here

    recipe, placement, remarks = here(recipe, placement, batch, weak)
    found = None if measure else fits.load(recipe, placement)
    if found is None:
        if name and not measure:
            raise InputError(f"{name}: its recipe has no fit on this machine yet: add --measure (about a minute)")
        from lockstep.predict.measure import make

        found = make(recipe, placement, max(recipe.global_batch, batch or 0), note, data_root, anew=measure)
        note(f"predict: fitted in {found.seconds:.0f} s; kept in {fits.save(found)}")
    return found, remarks


def _print(found: dict[str, Any]) -> None:
    out = console()
    recipe, placement = found["recipe"], found["fit"]["placement"]
    kept = "batch per rank kept (weak scaling)" if found["scaling"] == "weak" else "global batch kept (strong scaling)"
    rounds = f", weights averaged every {found['every']} steps" if found["every"] else ""
    what = f"{recipe['model']}, {placement['backend']}, {placement['strategy']}{rounds}; {kept}"
    out.print(styled((found["run"] or recipe["model"], "bold"), f"  {what}"))
    links = found.get("links", [])
    _print_rows(found["rows"], found["bounds"], several=bool(links))
    out.print(f"{found['basis']}; {found['earned_text']}.", soft_wrap=True)
    for text in found["assumed"]:
        out.print(text, soft_wrap=True)
    if found["replay"]:
        _print_replay(found["replay"], several=bool(links))
    verdicts = {f"{one['link']}: " if links else "": one["verdict"] for one in links or [found]}
    for link, verdict in verdicts.items():
        out.print(styled((link + verdict["text"], "bold")), soft_wrap=True)
    differ = len({verdict["next"] for verdict in verdicts.values()}) > 1
    advice = [(link if differ else "") + verdict["next"] for link, verdict in verdicts.items() if verdict["next"]]
    for text in dict.fromkeys(advice):
        next_step(text, words=not text.startswith("lockstep "))


def _print_rows(rows: list[dict[str, Any]], bounds: str, several: bool) -> None:
    parts = ("compute", "wrapper", "contention", "exchange", "waiting")
    shown = []
    for row in rows:
        if "reason" in row:
            continue
        passes = f"{row['micro_batch'] or '–'}" + (f"x{row['accumulation']}" if row["accumulation"] > 1 else "")
        interval = row["interval_ms"]
        shown.append(
            {
                "ranks": f"{row['ranks']:,}",
                "hosts": f"{row['hosts']:,}",
                **({"link": row["link"] or "–"} if several else {}),
                "batch/rank": passes,
                "step ms": _ms(row["step_ms"]),
                f"{bounds} ms": f"{_ms(interval[0])}–{_ms(interval[1])}" if interval else "not checked",
                **{part: _ms(row[f"{part}_ms"]) for part in parts},
                "samples/s": f"{row['images_per_second']:,.0f}" if row["images_per_second"] else "–",
                "speed-up": f"{row['speed_up']:.2f}",
                "efficiency": f"{row['efficiency']:.0%}",
            }
        )
    at = 1 if several else 0  # one column more
    spare = tuple(column + at if column > 1 else column for column in (7, 6, 9, 5, 8, 4, 2, 1))
    right = [column for column in range(13 + at) if not several or column != 2]
    print_records(shown, right=right, spare=spare)
    for row in rows:
        if "reason" in row:
            console().print(f"{row['ranks']:,} ranks: {row['reason']}.", soft_wrap=True)


def _print_replay(replays: list[dict[str, Any]], several: bool) -> None:
    rows = [
        {
            "ranks": f"{one['ranks']:,}",
            **({"link": one["link"] or "–"} if several else {}),
            "closed form ms": _ms(one["closed_form_ms"]),
            "replay ms": _ms(one["step_ms"]),
            "of it waiting": _ms(one["waiting_ms"]),
            f"one rank {one['straggler']:g}x as slow ms": _ms(one["straggler_step_ms"]),
            "costs": f"{one['straggler_costs']:+.0%}",
            "steps": str(one["steps"]),
            "took s": f"{one['seconds']:.2f}",
        }
        for one in replays
    ]
    console().print("Replayed event by event, with the noise that was measured:")
    print_records(rows, right=[column for column in range(9) if not several or column != 1])


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if abs(milliseconds) >= 1000 else f"{milliseconds:.3g}"


def _check(quick: bool, as_json: bool) -> None:
    from lockstep.predict import check
    from lockstep.predict.score import sentence

    found = check.run(quick, note)
    if as_json:
        print_json(found)
        return
    rows = [
        {
            "fit": case["fit"],
            "held out": case["placement"],
            "predicted ms": _ms(case["predicted_ms"]),
            "measured ms": _ms(case["measured_ms"]),
            "error": f"{case['error']:+.1%}",
        }
        for case in found["cases"]
    ]
    print_records(rows, right=(2, 3, 4))
    kinds = [
        {
            "kind": kind,
            "predictions": str(one["n"]),
            "median error": f"{one['median_error']:.1%}",
            "worst": f"{one['worst_error']:.1%}",
            "mean, signed": f"{one['mean_signed']:+.1%}",
        }
        for kind, one in found["kinds"].items()
    ]
    print_records(kinds, right=(1, 2, 3, 4))
    out = console()
    if found["left_out"]:
        out.print(f"Links were left out: {found['left_out']}", soft_wrap=True)
    for text in found["failed"]:
        out.print(f"Not measured: {text}", soft_wrap=True)
    out.print(f"{sentence(found)}.", soft_wrap=True)
