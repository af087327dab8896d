"""From a fit to a table over rank counts: strong and weak scaling, speed-up, efficiency, and where it stops paying."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.errors import InputError
from lockstep.launch.emulated.link import Link
from lockstep.predict.exchange import NO_LINK, WITHIN_ONE_HOST, Between
from lockstep.predict.fit import Fit
from lockstep.predict.model import Case, Step, predict
from lockstep.units import counted, duration

MOST_RANKS = 100_000
# Data parallelism pays while the efficiency is above one half.
PAYING = 0.5
ROUND = 8
"""Steps between two averages, when local SGD is the advice."""


@dataclass(frozen=True)
class Ask:
    """The question asked for every rank count."""

    batch: int
    """The global batch, or with `weak` that of one rank."""
    weak: bool = False
    per_host: int = 1
    link: Link | Between = NO_LINK
    algorithm: str = "auto"
    every: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None


@dataclass(frozen=True)
class Row:
    """One rank count: the step, or why there is none."""

    ranks: int
    case: Case | None = None
    step: Step | None = None
    global_batch: int = 0
    images_per_second: float = 0.0
    speed_up: float = 0.0
    efficiency: float = 0.0
    reason: str = ""


MOST_ROWS = 200


def asked_ranks(text: str) -> list[int]:
    """`2,4,8,…,1024`: numbers; dots continue by the same factor up to the next number."""
    found: list[int] = []
    dots = False
    for word in (part.strip() for part in text.split(",")):
        if re.fullmatch(r"…|\.\.+", word):
            if len(found) < 2 or found[-1] <= found[-2]:
                raise InputError(f"--ranks {text}: dots need two rising numbers before them, for example 2,4,…,64")
            dots = True
            continue
        if not re.fullmatch("[0-9]{1,9}", word) or not 1 <= int(word) <= MOST_RANKS:
            raise InputError(f"--ranks {text}: '{word}' is not a number of ranks from 1 to {MOST_RANKS:,}")
        if dots:
            factor = found[-1] / found[-2]
            while (following := round(found[-1] * factor)) < int(word):
                found.append(following)
                if len(found) > MOST_ROWS:
                    raise InputError(
                        f"--ranks {text}: that is more than {MOST_ROWS} numbers of ranks; take larger steps"
                    )
            dots = False
        found.append(int(word))
    if dots:
        raise InputError(f"--ranks {text}: say where the dots end, for example 2,4,…,64")
    return sorted(set(found))


def usual_ranks(ask: Ask) -> list[int]:
    """Powers of two up to 1,024, or until a rank has one sample."""
    most = 1024 if ask.weak else min(1024, ask.batch)
    return [2**power for power in range(1, 11) if 2**power <= most]


def table(fit: Fit, ask: Ask, ranks: Sequence[int]) -> list[Row]:
    """One rank comes first: the baseline of the others."""
    one = replace(ask, per_host=1, every=None)
    alone = predict(fit, case_of(fit, one, 1)).seconds
    return [_row(fit, ask, count, alone) for count in sorted({1, *ranks})]


def _row(fit: Fit, ask: Ask, ranks: int, alone: float) -> Row:
    try:
        case = case_of(fit, ask, ranks)
    except InputError as error:
        return Row(ranks, reason=str(error))
    step = predict(fit, case)
    work = ranks if ask.weak else 1  # multiples of the work of one rank alone
    speed_up = work * alone / step.seconds
    batch = case.share * ranks
    return Row(ranks, case, step, batch, batch / step.seconds, speed_up, speed_up / ranks)


def case_of(fit: Fit, ask: Ask, ranks: int) -> Case:
    """Divide ranks over hosts and samples over ranks; InputError if they do not divide."""
    per_host = min(ask.per_host, ranks)
    if ranks % per_host:
        raise InputError(f"{ranks} ranks do not divide over hosts of {per_host}")
    hosts = ranks // per_host
    if hosts > 1 and fit.placement.backend in WITHIN_ONE_HOST:
        raise InputError(f"backend={fit.placement.backend} stays on one host, which holds {ask.per_host} ranks")
    if not ask.weak and ask.batch % ranks:
        raise InputError(f"global batch {ask.batch} does not divide by {ranks}")
    share = ask.batch if ask.weak else ask.batch // ranks
    micro, accumulation = passes(share, ask)
    return Case(micro, accumulation, hosts, per_host, None, ask.link, ask.algorithm, ask.every if ranks > 1 else None)


def passes(share: int, ask: Ask) -> tuple[int, int]:
    """One rank's share of a batch as passes: of `micro_batch` samples, or `accumulation` of them; one sample at least."""
    if ask.accumulation:
        count = min(ask.accumulation, share)
        if share % count:
            raise InputError(f"accumulation={count} does not divide the share of one rank, {share}")
        return share // count, count
    micro = min(ask.micro_batch or share, share)
    if share % micro:
        raise InputError(f"micro_batch={micro} does not divide the share of one rank, {share}")
    return micro, share // micro


@dataclass(frozen=True)
class Verdict:
    pays_up_to: int
    """The most ranks that pay, of those asked for."""
    stops_at: int | None
    text: str
    next: str


def judge(fit: Fit, ask: Ask, rows: Sequence[Row]) -> Verdict:
    """Where data parallelism stops paying: the speed-up falls, or more than half of the ranks is lost."""
    known = [row for row in rows if row.step]
    paying = known[0]
    for row in known[1:]:
        if row.speed_up < paying.speed_up or row.efficiency < PAYING:
            return _stopped(fit, ask, known[0], paying, row)
        paying = row
    if paying.ranks == 1:
        reason = next((row.reason for row in rows if row.reason), "")
        return Verdict(1, None, "Nothing to compare: no rank count that was asked for can be placed.", reason)
    cause, lost = loss(known[0], paying, ask)
    text = f"Data parallelism still pays at {paying.ranks} ranks: speed-up {paying.speed_up:.1f}, efficiency {paying.efficiency:.0%}."
    return Verdict(paying.ranks, None, text, _next(fit, ask, paying, cause, lost))


def _stopped(fit: Fit, ask: Ask, first: Row, paying: Row, row: Row) -> Verdict:
    falls = row.speed_up < paying.speed_up
    why = (
        f"the speed-up falls from {paying.speed_up:.1f} to {row.speed_up:.1f}"
        if falls
        else f"{row.efficiency:.0%} of the ranks' time is used, less than half"
    )
    text = f"Data parallelism stops paying at {row.ranks} ranks: {why}."
    if paying.ranks > 1:
        text += f" {paying.ranks} ranks still pay (speed-up {paying.speed_up:.1f}, efficiency {paying.efficiency:.0%})."
    cause, lost = loss(first, row, ask)
    return Verdict(paying.ranks, row.ranks, text, _next(fit, ask, row, cause, lost))


CAUSES = {
    "batch": "small batches, which have a floor",
    "wrapper": "the strategy's own work",
    "contention": "ranks of one host in each other's way",
    "exchange": "exchange that nothing hides",
    "waiting": "waiting for the slowest rank",
}


def loss(first: Row, row: Row, ask: Ask) -> tuple[str, float]:
    """The largest part of a step beyond its ideal time, and its share of the step."""
    assert first.step
    assert row.step
    ideal = first.step.seconds if ask.weak else first.step.seconds / row.ranks
    step = row.step
    parts = {
        "batch": step.compute - ideal,
        "wrapper": step.wrapper,
        "contention": step.contention,
        "exchange": step.exchange,
        "waiting": step.waiting,
    }
    cause = max(parts, key=lambda name: parts[name])
    return cause, parts[cause] / step.seconds


def _next(fit: Fit, ask: Ask, row: Row, cause: str, lost: float) -> str:
    """What to do about the largest loss, with the gain that the model predicts."""
    assert row.case
    assert row.step
    if lost <= 0.02:
        return "Nothing stands out; ask about more ranks."
    advice = {
        "batch": f"a rank has {counted(row.case.share, 'sample')} in a step; a larger --batch, or --weak, keeps the ranks busy.",
        "contention": "try fewer ranks on a host with more threads each (--per-host).",
        "wrapper": "strategy=flat does less around the exchange."
        if fit.placement.strategy == "ddp"
        else "a larger batch a step makes it weigh less.",
        "waiting": f"hosts that do nothing else, and pinned ranks, make steps more even; local SGD (--every {ROUND}) waits less often.",
    }
    begin = f"{lost:.0%} of a step at {row.ranks} ranks is {CAUSES[cause]}: "
    return begin + (advice.get(cause) or _less_exchange(fit, ask, row.case, row.step.seconds))


def _less_exchange(fit: Fit, ask: Ask, case: Case, now: float) -> str:
    """What would shorten a step of `now` seconds, the most effective first."""
    changed: dict[str, Case] = {}
    if case.every is None and not fit.norms:
        text = f"averaging weights every {ROUND} steps (--every {ROUND}; changes the mathematics)"
        changed[text] = replace(case, every=ROUND)
    if case.hosts > 1:
        for name in ("tree", "hierarchical") if case.algorithm == "auto" else ():
            changed[f"an exchange by {name} (--algorithm {name})"] = replace(case, algorithm=name)
        if isinstance(case.link, Link):
            changed["a link without delay"] = replace(case, link=Link(rate=case.link.rate, delay_us=0))
    tried = sorted((predict(fit, other).seconds, text) for text, other in changed.items())
    better = [f"{text} would make it {duration(seconds)}" for seconds, text in tried if seconds < 0.95 * now]
    if not better:
        how = "" if ask.weak else " (--batch, or --weak)"
        return f"a larger batch of a rank gives more to compute for each exchange{how}."
    return f"{'; '.join(better)} instead of {duration(now)}."
