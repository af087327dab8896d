"""`python -m benchmarks.run`: run the sections, write each one's result, print the tables.

Every section writes `benchmarks/results/<date>-<section>.json` (all raw values, in order) and a table beside
it as soon as it is done. A run shorter than the default is a trial: its files say so in their names, and git
ignores them.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import machine, parts, record
from benchmarks.processes import ROOT, ContenderFailed
from benchmarks.sections import (
    attach,
    attach_cost,
    attached_predict,
    dashboard,
    exchange,
    explain,
    first,
    instrumentation,
    kernels,
    listing,
    loader,
    peers,
    predict,
    quantization,
    scaling,
    shares,
    slow_link,
    start,
    studies,
    techniques,
    tune,
    turns,
)
from benchmarks.settings import Settings

SECTIONS: dict[str, Callable[[Settings], record.Section]] = {
    "peers": peers.measure,
    "scaling": scaling.measure,
    "instrumentation": instrumentation.measure,
    "start": start.measure,
    "first": first.measure,
    "exchange": exchange.measure,
    "techniques": techniques.measure,
    "loader": loader.measure,
    "slow-link": slow_link.measure,
    "listing": listing.measure,
    "explain": explain.measure,
    "attach": attach.measure,
    "attach-held-out": attach.measure_held_out,
    "attach-cost": attach_cost.measure,
    "attached-predict": attached_predict.measure,
    "predict": predict.measure,
    "dashboard": dashboard.measure,
    "quantization": quantization.measure,
    "kernels": kernels.measure,
    "turns": turns.measure,
    "studies": studies.measure,
    "shares": shares.measure,
    "tune": tune.measure,
}
RESULTS = ROOT / "benchmarks" / "results"
QUICK = {"repeats": 2, "samples": 3200}
DEFAULT_REPEATS = 5
QUIET_LOAD = 0.5


def parse(words: Sequence[str] | None = None) -> tuple[Settings, list[str], Path, bool]:
    """Settings, the sections to run, the folder for results, and whether this is only a trial."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.partition("\n")[0])
    known = f"sections: {', '.join(SECTIONS)}; contenders of peers: {', '.join(peers.names())}"
    parser.add_argument("--quick", action="store_true", help="a trial: 2 rounds of 3,200 images")
    parser.add_argument("--only", action="append", default=[], metavar="NAME[,NAME…]", help=known)
    parser.add_argument("--repeats", type=_positive, metavar="N", help=f"rounds (default {DEFAULT_REPEATS})")
    parser.add_argument("--samples", type=_positive, metavar="N", help="images an epoch (default: all 60,000)")
    parser.add_argument("--extras", action="store_true", help="also the peers' variants: transforms, fused, tuned")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="train-*.npy for the peers (default: Lockstep's)")
    parser.add_argument("--seed", type=int, default=0, help="of the order within rounds (default 0)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where results go")
    arguments = parser.parse_args(words)

    chosen = [name for text in arguments.only for name in text.split(",") if name]
    unknown = [name for name in chosen if name not in SECTIONS and name not in peers.names()]
    if unknown:
        parser.error(f"--only: unknown {', '.join(unknown)}; {known}")
    competitors = frozenset(name for name in chosen if name not in SECTIONS)
    sections = [name for name in SECTIONS if not chosen or name in chosen or (name == "peers" and competitors)]
    settings = Settings(
        repeats=arguments.repeats or (QUICK["repeats"] if arguments.quick else DEFAULT_REPEATS),
        samples=arguments.samples or (QUICK["samples"] if arguments.quick else None),
        only=competitors,
        extras=arguments.extras,
        data=arguments.data,
        seed=arguments.seed,
        quick=arguments.quick,
    )
    trial = bool(settings.samples or settings.repeats < DEFAULT_REPEATS or competitors or arguments.data)
    return settings, sections, arguments.results, trial


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0 only if every section gave valid figures; a missed target is a result, not a failure."""
    settings, sections, folder, trial = parse(words)
    now = datetime.datetime.now(datetime.UTC)
    described = {"date": now.strftime("%Y-%m-%d %H:%M UTC"), **machine.describe()}
    valid = True
    load_before = machine.load_average()[0]
    for name in sections:
        load, began = machine.load_average(), time.monotonic()
        try:
            section = SECTIONS[name](settings)
        except ContenderFailed as error:
            print(f"[{name}] not measured: {error}", file=sys.stderr)
            valid = False
            continue
        if load_before > QUIET_LOAD:
            section.notes.append(f"The load was {load_before} before anything was measured: not a quiet machine.")
        on = {**described, "load_at_start": load, "load_at_end": machine.load_average()}
        chosen = {
            "rounds": max((one.round for one in section.measurements), default=0),
            "images_per_epoch": settings.samples or "all",
            "order_seed": settings.seed,
            "minutes": round((time.monotonic() - began) / 60, 1),
        }
        stem = f"{now:%Y-%m-%d}-{name}{'-trial' if trial else ''}"
        table = record.write(folder, stem, section, on, chosen)
        parts.forget(name)
        print(record.as_markdown(section, on, chosen))
        print(f"[{name}] written: {table.name} and .json", file=sys.stderr)
        valid = valid and section.valid
    return 0 if valid else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the sections that were finished are written", file=sys.stderr)
        sys.exit(130)
