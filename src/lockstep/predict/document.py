"""A prediction as one document: rows, assumptions, the model's error on held-out runs, the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec

from lockstep.errors import InputError
from lockstep.launch.emulated.link import Link, parse_link
from lockstep.machine import starving
from lockstep.measure.environment import version_of
from lockstep.placement import Placement, ranks_per_host
from lockstep.predict import check
from lockstep.predict.assumed import SAID, bounds
from lockstep.predict.attached import Shown
from lockstep.predict.between import MEASURED, measured_between
from lockstep.predict.exchange import Between
from lockstep.predict.fit import Fit, age
from lockstep.predict.interval import FEWEST, KINDS, LIKELY, NEARLY_SURE, Interval, interval, kind_of
from lockstep.predict.messages import ROUNDS
from lockstep.predict.model import missed
from lockstep.predict.replay import replay, script_of
from lockstep.predict.scaling import Ask, Row, Verdict
from lockstep.recipe import Recipe
from lockstep.units import counted

AGAIN = "end the other work ('top' shows it), and fit again with --measure"
DEFAULT_LINK = "10gbit,50us"
# A replay of few ranks takes more steps, so that its noise averages out; one of 10,000 ranks stays within seconds.
FEWEST_STEPS, MOST_STEPS, RANK_STEPS = 3, 200, 20_000
# A replay's document has every rank's timeline up to this many ranks.
MOST_TIMELINES = 32


def ask(
    fit: Fit,
    recipe: Recipe,
    placement: Placement,
    *,
    weak: bool = False,
    link: str | None = None,
    batch: int | None = None,
    per_host: int | None = None,
    algorithm: str = "auto",
    every: int | None = None,
) -> tuple[Ask, list[str]]:
    """The command's options applied to this run, and the assumptions they make."""
    stated = link or placement.link
    own = recipe.global_batch if recipe.batch_per_rank is None else recipe.batch_per_rank * placement.ranks
    if weak:
        own = max(1, own // placement.ranks)
    held = fit.placement.ranks
    if per_host is not None and per_host > held:
        raise InputError(
            f"--per-host {per_host}: this host was measured with {counted(held, 'rank')} on it; choose at most {held}"
        )
    usual = ranks_per_host(placement) if placement.ranks > 1 else held
    between = measured_between(fit, placement, every) if stated == MEASURED else parse_link(stated or DEFAULT_LINK)
    if isinstance(between, Link) and between.loss_ppm:
        raise InputError(f"--link {stated}: loss is not modelled; state rate and delay alone")
    if every and fit.norms:
        raise InputError(
            f"--every {every}: layers of regularize.batch_norm=synchronised exchange in every step: leave --every out"
        )
    asked = Ask(
        batch=batch or own,
        weak=weak,
        per_host=per_host or usual,
        link=between,
        algorithm=algorithm,
        every=every,
        micro_batch=placement.micro_batch,
        accumulation=placement.accumulation,
    )
    joined = f"joined by {_named(between)}" + ("" if stated else ", which is assumed (state yours with --link)")
    hosts = (
        f"This host has at most {counted(asked.per_host, 'rank')}; more of them are on more hosts like it, each with "
        f"{counted(asked.per_host, 'rank')} of {counted(fit.placement.threads or 1, 'thread')}, {joined}. This machine's loopback is not a network."
    )
    assumed = [
        hosts,
        "Hosts are disturbed independently of each other, each as much as this one; its ranks as they were here.",
    ]
    if every or fit.placement.strategy in ROUNDS:
        assumed.append(
            "Local SGD was not measured: its steps are taken to be those of ranks that exchange nothing, with one all-reduce of the weights a round."
        )
    return asked, assumed


def _named(link: Link | Between) -> str:
    return f"what was {link.name}" if isinstance(link, Between) else str(link)


def together(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Predictions that differ only in their link, as one: the first, with the rows of several hosts of all of them."""
    first = found[0]
    if len(found) == 1:
        return first
    rows = [*first["rows"], *(row for one in found[1:] for row in one["rows"] if row.get("link"))]
    joined = " or ".join(f"by {one['joined']}" for one in found)
    keys = ("link", "link_measured", "verdict")
    return first | {
        "link": None,
        "links": [{key: one[key] for key in keys} for one in found],
        "rows": sorted(rows, key=lambda row: row["ranks"]),  # stable: links in their order
        "assumed": [line.replace(f"joined by {first['joined']}", f"joined {joined}") for line in first["assumed"]],
        "replay": sorted((each for one in found for each in one["replay"]), key=lambda each: each["ranks"]),
    }


def beyond(fit: Fit, rows: Sequence[Row]) -> list[str]:
    """A remark where a batch lies outside what was measured."""
    low, high = (int(fit.compute.alone[end].samples) for end in (0, -1))
    outside = [row.ranks for row in rows if row.case and not fit.compute.covers(row.case.micro)]
    if not outside:
        return []
    return [f"Batches of a rank were measured from {low} to {high}; those at ranks={_list(outside)} are extrapolated."]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers if len(numbers) <= 4 else [*numbers[:2], "…", numbers[-1]]))


def earned(fit: Fit) -> tuple[dict[str, Any] | None, str]:
    """The model's error on held-out runs of this machine, as figures and as a sentence. Those runs had their cores: a fit that had not has
    earned no interval."""
    if fit.cores_had is not None and starving.starved(fit.cores_had):
        told = starving.sentence(fit.cores_had, "it was fitted on", "its")
        return None, f"no interval: {told}, so its times are too long, by an unknown factor"
    found = check.known()
    if found is None:
        return None, "not checked on this machine: run 'lockstep predict --check'"
    found.setdefault("lockstep", "unknown")
    keys = (
        "time",
        "lockstep",
        "quick",
        "n",
        "median_error",
        "ninth_decile",
        "worst_error",
        "nine_of_ten_held",
        "kinds",
    )
    when = time.strftime("%Y-%m-%d", time.localtime(found["time"]))
    text = (
        f"{found['n']} predictions of held-out placements on this machine ({when}) were off by {found['median_error']:.1%} in the median, nine "
        f"of ten by at most {found['ninth_decile']:.1%}"
    )
    if found["nine_of_ten_held"] is not None:
        text += f"; such intervals (90 %) held in {found['nine_of_ten_held']:.0%}"
    return {key: found[key] for key in keys}, text


def outdated(fit: Fit, figures: dict[str, Any] | None) -> list[str]:
    """A remark where a fit, or what predictions were found to be worth, is of another version of Lockstep. Another machine finds neither."""
    here = version_of("lockstep") or "unknown"
    kept = {
        "This fit is": (fit.lockstep, "fit again with --measure"),
        "The intervals are": (figures["lockstep"] if figures else here, "run 'lockstep predict --check' again"),
    }
    return [
        f"{name} from another version of Lockstep ({was}; this is {here}): {advice}."
        for name, (was, advice) in kept.items()
        if was != here
    ]


def widened(fit: Fit, rows: Sequence[Row], figures: dict[str, Any]) -> list[str]:
    """A remark where more ranks are asked about than were ever checked, or a kind of which too few were."""
    kinds = [(row.ranks, kind_of(fit, row.case)) for row in rows if row.case]
    checked = {kind: one["most_ranks"] for kind, one in figures["kinds"].items() if one["placements"] >= FEWEST}
    found = []
    beyond = [ranks for ranks, kind in kinds if kind in checked and ranks > checked[kind]]
    if beyond:
        most = max(checked[kind] for ranks, kind in kinds if kind in checked)
        found.append(
            f"No more than {counted(most, 'rank')} were checked: intervals widen with every doubling beyond, by as much again ({_list(beyond)} ranks)."
        )
    for kind in dict.fromkeys(kind for _, kind in kinds if kind not in checked):
        found.append(f"No interval for {KINDS[kind]}: too few of it were checked here.")
    return found


def replays(fit: Fit, rows: Sequence[Row], slow: float) -> list[dict[str, Any]]:
    """Replay each row event by event: with the measured noise, and once more with one slow rank."""
    found = []
    for row in rows:
        if row.case is None or row.step is None or row.ranks == 1:
            continue
        script = script_of(fit, row.case)
        began = time.perf_counter()
        steps = max(FEWEST_STEPS, min(MOST_STEPS, RANK_STEPS // row.ranks))
        count = -(-steps // script.every) * script.every
        keep = row.ranks <= MOST_TIMELINES
        usual = replay(script, count, fit.noise, keep=keep)
        held_up = replay(script, count, fit.noise, slow=(row.ranks // 2, slow))
        found.append(
            {
                "ranks": row.ranks,
                "link": _link_of(row),
                "steps": count,
                "closed_form_ms": row.step.seconds * 1e3,
                "step_ms": usual.step * 1e3,
                "waiting_ms": usual.waiting * 1e3,
                "straggler": slow,
                "straggler_step_ms": held_up.step * 1e3,
                "straggler_costs": held_up.step / usual.step - 1,
                "seconds": time.perf_counter() - began,
                "timeline": usual.timeline[:FEWEST_STEPS],
            }
        )
    return found


def document(
    name: str | None,
    fit: Fit,
    ask: Ask,
    rows: Sequence[Row],
    verdict: Verdict,
    remarks: Sequence[str],
    replayed: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    figures, text = earned(fit)
    checked = figures["kinds"] if figures else {}

    def intervals(row: Row) -> tuple[Interval | None, ...]:
        assert row.case
        assert row.step
        kind = kind_of(fit, row.case)
        return tuple(interval(row.step.seconds, kind, row.ranks, checked, level) for level in (LIKELY, NEARLY_SURE))

    assumed = [*outdated(fit, figures), *remarks, *beyond(fit, rows), *(widened(fit, rows, figures) if figures else [])]
    found = _document(name, fit, ask, rows, verdict, assumed, replayed, intervals)
    basis = f"Fitted {age(fit)} in {fit.seconds:.0f} s"
    return found | {"basis": basis, "bounds": "interval", "earned": figures, "earned_text": text}


def document_of_attached(
    seen: Shown,
    fit: Fit,
    ask: Ask,
    rows: Sequence[Row],
    verdict: Verdict,
    remarks: Sequence[str],
    replayed: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The same for a fit that is made of what was seen of a command: with ranges instead of intervals that were earned."""
    found = _document(seen.name, fit, ask, rows, verdict, remarks, replayed, lambda row: (None, bounds(fit, seen, row)))
    if seen.batch is None:
        for row in found["rows"]:
            row |= dict.fromkeys(("global_batch", "micro_batch", "images_per_second"))
    return found | {"basis": f"From what was seen {age(fit)}", "bounds": "range", "earned": None, "earned_text": SAID}


def _document(
    name: str | None,
    fit: Fit,
    ask: Ask,
    rows: Sequence[Row],
    verdict: Verdict,
    assumed: Sequence[str],
    replayed: Sequence[dict[str, Any]],
    intervals: Callable[[Row], tuple[Interval | None, ...]],
) -> dict[str, Any]:
    if starving.starved(fit.cores_had):
        verdict = replace(verdict, text=f"{verdict.text} It is {starving.DOUBT}.", next=AGAIN)
    return {
        "run": name,
        "recipe": msgspec.to_builtins(fit.recipe),
        "fit": {
            "made": age(fit),
            "seconds": fit.seconds,
            "machine": fit.machine,
            "placement": msgspec.to_builtins(fit.placement),
            "batches": [int(point.samples) for point in fit.compute.alone],
            "missed_ms": [missed(fit, point.samples) * 1e3 for point in fit.compute.alone],
        },
        "scaling": "weak" if ask.weak else "strong",
        "link": str(ask.link),
        "link_measured": ask.link.name if isinstance(ask.link, Between) else None,
        "joined": _named(ask.link),
        "algorithm": ask.algorithm,
        "every": ask.every,
        "assumed": list(assumed),
        "rows": [_row(fit, row, intervals) for row in rows],
        "verdict": asdict(verdict),
        "replay": list(replayed),
    }


def _link_of(row: Row) -> str | None:
    """What its hosts are joined by; None on one host."""
    return str(row.case.link) if row.case and row.case.hosts > 1 else None


def _row(fit: Fit, row: Row, intervals: Callable[[Row], tuple[Interval | None, ...]]) -> dict[str, Any]:
    if row.step is None or row.case is None:
        return {"ranks": row.ranks, "reason": row.reason}
    step = row.step
    milliseconds = {f"{part}_ms": seconds * 1e3 for part, seconds in asdict(step).items()}
    likely, sure = ([1e3 * end for end in found] if found else None for found in intervals(row))
    return {
        "ranks": row.ranks,
        "hosts": row.case.hosts,
        "link": _link_of(row),
        "per_host": row.case.per_host,
        "global_batch": row.global_batch,
        "micro_batch": row.case.micro,
        "accumulation": row.case.accumulation,
        "step_ms": step.seconds * 1e3,
        "kind": kind_of(fit, row.case),
        "likely_ms": likely,
        "interval_ms": sure,
        **milliseconds,
        "images_per_second": row.images_per_second,
        "speed_up": row.speed_up,
        "efficiency": row.efficiency,
    }
