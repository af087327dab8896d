"""Steps with `--trace` and without it, in turns, by two ranks of one process group. Prints one line of JSON.

Two runs would not answer this: they differ by more than tracing costs. So each rank has two models, each with its own DDP, optimizer and
clock, and takes some steps with the one, then some with the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROUNDS, STEPS, WARM_UP = 40, 50, 20
BATCH_PER_RANK = 32
RANKS = 2


def main() -> None:
    if len(sys.argv) == 1:
        _start()
    else:
        _rank(int(sys.argv[1]), Path(sys.argv[2]))


def _start() -> None:
    from lockstep.launch import prepare
    from lockstep.placement import Placement
    from lockstep.recipe import Recipe
    from lockstep.run import Options

    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        recipe = Recipe(global_batch=RANKS * BATCH_PER_RANK, shuffle=False)
        placement = Placement(ranks=RANKS, threads=1, backend="gloo", strategy="ddp", launcher="spawn")
        run, _ = prepare(recipe, placement, Options(save_model=False, trace=1000), Path(folder), "trace-cost")
        argv = [sys.executable, "-m", "benchmarks.trace_cost"]
        others = [subprocess.Popen([*argv, str(rank), str(run.folder)]) for rank in range(1, RANKS)]
        first = subprocess.run([*argv, "0", str(run.folder)], stdout=subprocess.PIPE, text=True, check=False)
        codes = [other.wait() for other in others]
        if first.returncode or any(codes):
            raise SystemExit(f"trace_cost: a rank ended with {first.returncode} or {codes}")
        print(first.stdout.strip().splitlines()[-1])


def _rank(number: int, folder: Path) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
    import torch

    from lockstep.backends import group
    from lockstep.backends.ranks import Rank
    from lockstep.run import Run

    torch.set_num_threads(1)
    run, rank = Run.open(folder), Rank(number, RANKS, number, RANKS)
    spec = run.spec()
    group.join(spec.placement, rank, folder)
    lanes = {name: _lane(name, run, spec, rank) for name in ("off", "on")}
    for take in lanes.values():
        take(WARM_UP)
    rounds = []
    for turn in range(ROUNDS):
        names = ("off", "on") if turn % 2 else ("on", "off")
        rounds.append({name: lanes[name](STEPS) for name in names})
    if rank.is_first:
        print(json.dumps({"steps": STEPS, "rounds": rounds}))
    lanes.clear()
    group.leave()


def _lane(name: str, run: Any, spec: Any, rank: Any) -> Any:
    """A function that takes so many steps and returns their seconds."""
    from functools import partial
    from time import perf_counter
    from types import SimpleNamespace

    import torch

    from lockstep import strategies
    from lockstep.measure.clock import CpuClock
    from lockstep.measure.records import StepLog
    from lockstep.measure.trace import Trace, TraceClock
    from lockstep.training import assemble, optimizers
    from lockstep.training.loss import Loss
    from lockstep.training.precision import Precision
    from lockstep.training.recipe_step import RecipeStep, TrainState

    device, recipe, plan = torch.device("cpu"), spec.recipe, spec.plan
    precision = Precision(recipe, device)
    data = assemble.open_set(run, spec)
    model = assemble.build_model(recipe, spec, data, device, precision)
    strategy: Any = strategies.build("ddp", model, spec.placement, device)
    log = StepLog(run.rank_folder(rank.rank) / f"{name}.bin", WARM_UP + ROUNDS * STEPS, device)
    clock = CpuClock(log)
    if name == "on":
        trace = Trace(run.rank_folder(rank.rank), spec, rank.rank, 0, 0)
        trace._first, trace._end = 0, WARM_UP + ROUNDS * STEPS + 1  # every step, and nothing is written in between
        clock = TraceClock(log, trace)
        strategy.watch(trace)
    batches = assemble.train_batches(spec, data, device)
    batches.visit(None, 1)
    optimizer = strategy.optimizer(partial(optimizers.build, recipe.optimizer))
    state = TrainState(model, strategy, optimizer, precision, Loss(recipe))
    step = RecipeStep(recipe, plan, rank, state, batches, SimpleNamespace(clock=clock, log=log))
    taken = 0

    def take(steps: int) -> float:
        nonlocal taken
        begin = perf_counter()
        for _ in range(steps):
            step.run(1, taken % plan.steps_per_epoch * plan.global_batch, plan.global_batch)
            taken += 1
        return perf_counter() - begin

    return take


if __name__ == "__main__":
    main()
