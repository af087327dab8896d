"""What `lockstep tune` loses against trying everything: in each cell (model x link x cores) it chooses, and then all ways race, the chosen one among them.

Regret is the time that the chosen way takes for a sample beyond what the fastest one takes, both from the same rounds; fastest by the
other starts than those that are compared, in turn.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import ours, stats
from benchmarks.parts import kept
from benchmarks.record import Measurement, Section
from benchmarks.settings import Settings
from lockstep.launch.emulated import network
from lockstep.predict.check import seconds
from lockstep.predict.held import NETS
from lockstep.settings import load
from lockstep.turns import Ranks
from lockstep.turns.ranks import memory_problem
from lockstep.turns.survey import Survey

SURVEY_S, ROUNDS = 40.0, 8
NEAR = 1.3
"""Who takes longer than this, in the first of two starts, is not the fastest in the second."""
GOAL, OF = 0.03, 0.9
MODELS: dict[str, tuple[tuple[str, ...], str]] = {
    "mnist-convnet, batch 32": (("model=mnist-convnet", "data=embedded", "global_batch=32"), "60s"),
    "mnist-convnet, batch 256": (("model=mnist-convnet", "data=embedded", "global_batch=256"), "60s"),
    "resnet, batch 64": ((f"model={NETS}:resnet", "data=embedded-color", "global_batch=64"), "90s"),
    "transformer, batch 64": ((f"model={NETS}:Transformer", "data=embedded", "global_batch=64"), "60s"),
    "cifar-vgg, batch 32": (("model=cifar-vgg", "data=embedded-color", "global_batch=32"), "300s"),
}
LINKS = ("", "1gbit,0.5ms", "100mbit,5ms")


class Cell(NamedTuple):
    model: str
    link: str
    cores: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.link or 'one host'}, {'one core' if self.cores == 1 else f'{self.cores} cores'}"

    @property
    def words(self) -> tuple[str, ...]:
        hosts = ("hosts=emulated:2", "ranks=2", f"link={self.link}") if self.link else ()
        return (*MODELS[self.model][0], "test_limit=100", *hosts)


def measure(settings: Settings) -> Section:
    title = "What `lockstep tune` chose, beside the fastest of all ways"
    section = Section("tune", title, "sample", "milliseconds", [])
    links = LINKS if network.problem() is None else LINKS[:1]
    cores = sorted({1, len(os.sched_getaffinity(0))})
    cells = [Cell(*each) for each in itertools.product(MODELS, links, cores)]
    cells = cells[:1] if settings.quick else cells
    regrets = []
    for number, cell in enumerate(cells, 1):
        found = tried(cell)
        regrets.append(found["regret"])
        section.notes.append(f"{cell.name}: {found['text']}.")
        for who in ("chosen", "fastest"):
            order = len(section.measurements) + 1
            label = f"{cell.name}, {who}"
            section.measurements.append(Measurement(order, number, label, found["batch"], found[f"{who}_s"], 0.0))
        print(f"[tune] {number}/{len(cells)}: {section.notes[-1]}", file=sys.stderr, flush=True)
    good = sum(regret <= GOAL for regret in regrets)
    section.notes.insert(
        0,
        f"Within {GOAL:.0%} of the fastest in {good} of {len(regrets)} cells (goal {OF:.0%}: {'met' if good >= OF * len(regrets) else 'missed'}); "
        f"median regret {stats.median(regrets):.1%}, worst {max(regrets):.1%}.",
    )
    return section


def tried(cell: Cell) -> dict[str, Any]:
    """One cell, which takes two to seven minutes."""
    return kept("tune", cell.name, lambda: _tried(cell))


def _tried(cell: Cell) -> dict[str, Any]:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[: cell.cores])  # what is started from here has no more
    try:
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
            begin = time.perf_counter()
            budget = MODELS[cell.model][1]
            argv = [ours.executable(), "tune", *cell.words, "--budget", budget, "--runs", folder, "--json"]
            found = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
            took = time.perf_counter() - begin
            return _race(cell, tuple(shlex.split(found["command"])[2:]), Path(folder), took)
    finally:
        os.sched_setaffinity(0, allowed)


def _race(cell: Cell, chosen: tuple[str, ...], folder: Path, took: float) -> dict[str, Any]:
    mine = "chosen"
    ways = {" ".join(words): (*cell.words, *words) for words in _everything(cell)}
    ways, left_out = fitting({mine: chosen, **ways})
    racing = [
        Ranks(name, *load([], words), folder / "all" / str(place)) for place, (name, words) in enumerate(ways.items())
    ]
    once = _seconds(racing)
    near = [each for each in racing if each.name == mine or once[each.name] <= NEAR * min(once.values())]
    again = _seconds(near)
    found = {name: fmean((once[name], again[name])) for name in again}
    best = min(found, key=lambda name: found[name])
    regret = fmean((_regret(once, again, mine), _regret(again, once, mine)))
    fastest = "it" if best == mine else best
    said = " ".join(word for word in chosen if word not in cell.words)
    without = (
        f"; left out, for they have no room in memory beside the others: {'; '.join(left_out)}" if left_out else ""
    )
    return {
        "batch": int(load([], cell.words)[0].global_batch),
        "chosen_s": found[mine],
        "fastest_s": found[best],
        "regret": regret,
        "all_s": [once, again],
        "text": f"chose {said} in {took:.0f} s; {fastest} is the fastest of {len(once)}, regret {regret:.1%}{without}",
    }


def fitting(ways: dict[str, tuple[str, ...]]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The first of them that can all be alive at the same time, as in a race, and the names of the others."""
    found, left_out = dict(ways), list[str]()
    while len(found) > 2 and memory_problem(load([], words)[1] for words in found.values()):
        left_out.insert(0, found.popitem()[0])
    return found, left_out


def _seconds(racing: list[Ranks]) -> dict[str, float]:
    """Of a step, in one start of each."""
    survey = Survey(racing, SURVEY_S, ROUNDS)
    survey.run()
    windows = {each.name: survey.of(each.name) for each in racing}
    return {name: seconds(mine) if mine else math.inf for name, mine in windows.items()}


def _regret(there: dict[str, float], here: dict[str, float], mine: str) -> float:
    """Against the way that another start found fastest. Among thirty ways, starts of which differ by 2 %, the fastest one owes its place to
    luck as well; what it takes in a start that had no part in choosing it has no such luck."""
    best = min((name for name in here if name in there), key=lambda name: there[name])
    return here[mine] / here[best] - 1


def _everything(cell: Cell) -> Iterator[tuple[str, ...]]:
    """Places x kernels x layout x passes."""
    here = ("hosts=1", "link=none") if cell.link else ()
    places = [(*here, "ranks=1", f"threads={cell.cores}")]
    if cell.cores > 1:
        for backend, strategy in itertools.product(("shm", "gloo"), ("ddp", "flat")):
            places.append(
                (*here, "ranks=2", f"threads={cell.cores // 2}", f"backend={backend}", f"strategy={strategy}")
            )
    if cell.link:
        places += [("ranks=2", f"strategy={strategy}") for strategy in ("ddp", "flat")]
    for place, fused, layout in itertools.product(places, ("true", "false"), ("channels_last", "contiguous")):
        yield (*place, f"fused={fused}", f"memory_format={layout}")
    for place in places:
        yield (*place, "fused=true", "accumulation=2")
