"""Two pinned ranks: the backend `shm` against gloo and against bare shared memory, and what a training step costs.

`measure()` starts both ranks. In every round each way does its calls (or steps), in an order that is shuffled anew, so
that what else the machine does falls on all of them; ratios are taken within a round.

Ways of an all-reduce of 17,064 bytes (the MNIST net's gradients):
    bare          the same memory layout, numpy copy and add, no torch.distributed: what Python can reach at all
    shm           dist.all_reduce on the backend shm
    gloo          dist.all_reduce on gloo as it comes
    gloo, batch   the same with gloo's polling thread as a batch thread, as Lockstep runs it (backends/group.py)
Ways of a training step of the MNIST net at batch 32 a rank:
    alone         the two processes do not communicate: the limit
    meet          they exchange one number after each step: what waiting for the slower one costs by itself
    ddp none      inside DDP, whose exchange is left out: what PyTorch's wrapper costs by itself
    ddp shm, flat shm, ddp gloo, flat gloo (gloo with its batch thread)
"""

from __future__ import annotations

import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import ROOT, ContenderFailed, environment, parse_line

BYTES = 17_064
ROUNDS = 60
CALLS = {"bare": 300, "shm": 300, "gloo": 30, "gloo, batch": 30}
STEPS = 30
BARE_BYTES = 256 + 4 * BYTES
RANKS = 2


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    """Microseconds per call and per step of every way, round by round, with the median ratios that the figures are about."""
    handle = os.memfd_create("lockstep-bench")
    os.ftruncate(handle, BARE_BYTES)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.shm_pair",
                    str(Path(folder) / "store"),
                    str(rank),
                    str(handle),
                    str(rounds),
                ],
                cwd=ROOT,
                env={**environment(threads=1), "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=(handle,),
            )
            for rank in range(RANKS)
        ]
        outputs = [process.communicate()[0] for process in ranks]
    os.close(handle)
    codes = [process.returncode for process in ranks]
    if any(codes):
        raise ContenderFailed(f"exit codes {codes}")
    results = [parse_line(output) for output in outputs]
    return summary(results[0], results[1])


def summary(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A round of a way took as long as its slower rank."""
    times: dict[str, dict[str, list[float]]] = {
        kind: {way: list(map(max, one[kind][way], other[kind][way])) for way in one[kind]} for kind in one
    }
    calls, steps = times["calls_us"], times["steps_us"]
    return {
        "bytes": BYTES,
        "rounds": len(calls["shm"]),
        "median_us": {kind: {way: statistics.median(us) for way, us in ways.items()} for kind, ways in times.items()},
        "least_us": {kind: {way: min(us) for way, us in ways.items()} for kind, ways in times.items()},
        "shm_over_bare": _ratios(calls["shm"], calls["bare"]),
        "gloo_over_shm": _ratios(calls["gloo"], calls["shm"]),
        "gloo_batch_over_shm": _ratios(calls["gloo, batch"], calls["shm"]),
        "share_of_the_limit": {way: _ratios(steps["alone"], us) for way, us in steps.items() if way != "alone"},
        "raw": times,
    }


def _ratios(above: list[float], below: list[float]) -> dict[str, float]:
    values = sorted(a / b for a, b in zip(above, below, strict=True))
    quarter = len(values) // 4
    return {
        "median": statistics.median(values),
        "quartile_1": values[quarter],
        "quartile_3": values[-quarter - 1],
        "of_least": min(above) / min(below),
    }


class Bare:
    """Two slots a rank, a counter a rank on a cache line of its own, and nothing else."""

    def __init__(self, handle: int, rank: int) -> None:
        memory = mmap.mmap(handle, BARE_BYTES)
        self._words = memoryview(memory)[:256].cast("Q")
        slots = np.frombuffer(memory, dtype=np.float32, offset=256).reshape(2, RANKS, BYTES // 4)
        self._slots = [(slots[parity][0], slots[parity][1]) for parity in (0, 1)]
        self._rank, self._mine, self._theirs, self._number = rank, 16 * rank, 16 * (1 - rank), 0

    def all_reduce(self, values: np.ndarray[Any, Any]) -> None:
        self._number = number = self._number + 1
        slots, words = self._slots[number & 1], self._words
        np.copyto(slots[self._rank], values)
        words[self._mine] = number
        while words[self._theirs] < number:
            pass
        np.add(slots[0], slots[1], out=values)


def rank_main(store_file: str, rank: int, handle: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from lockstep.backends.shm import group as shm_group
    from lockstep.process import pin

    pin(rank, RANKS, 1)
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, RANKS)
    dist.init_process_group(
        shm_group.register(), store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    gloo = dist.new_group(backend="gloo")
    bare, tensor = Bare(handle, rank), torch.zeros(BYTES // 4)
    array = tensor.numpy()
    calls: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare.all_reduce(array),
        "shm": lambda: dist.all_reduce(tensor),
        "gloo": lambda: dist.all_reduce(tensor, group=gloo),
        "gloo, batch": lambda: dist.all_reduce(tensor, group=gloo),
    }
    for way, call in calls.items():
        tensor.fill_(rank + 1.0)
        call()
        assert tensor.eq(3.0).all(), f"{way}: 1 + 2 = 3 in every place"
    tensor.zero_()
    steps = training_ways(rank, gloo)
    times: dict[str, dict[str, list[float]]] = {
        f"{kind}{clock}_us": {way: [] for way in ways}
        for kind, ways in (("calls", calls), ("steps", steps))
        for clock in ("", "_cpu")
    }
    shuffle = random.Random(0).shuffle  # the same order on both ranks
    for number in range(rounds + 1):
        for kind, ways in (("calls", calls), ("steps", steps)):
            order = list(ways)
            shuffle(order)
            for way in order:
                gloo_thread(batch=way != "gloo")
                count = CALLS.get(way, STEPS)
                dist.barrier()
                begin, busy = time.perf_counter(), time.process_time()
                for _ in range(count):
                    ways[way]()
                took = {"": time.perf_counter() - begin, "_cpu": time.process_time() - busy}
                if number:  # the first round is for warming up
                    for clock, seconds in took.items():
                        times[f"{kind}{clock}_us"][way].append(seconds / count * 1e6)
    print(json.dumps(times), flush=True)
    steps.clear()
    dist.barrier()
    os._exit(0)  # gloo sometimes aborts on its way out; everything is measured and printed


def training_ways(rank: int, gloo: Any) -> dict[str, Callable[[], Any]]:
    """A step each: forward, backward, exchange, update, with the model, the optimizer and the strategies of Lockstep."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from lockstep import models
    from lockstep.placement import Placement
    from lockstep.recipe import Recipe
    from lockstep.strategies.flat import Flat
    from lockstep.training import optimizers

    recipe, placement, cpu = Recipe(), Placement(ranks=RANKS), torch.device("cpu")
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(32, 1, 28, 28, generator=generator).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (32,), generator=generator)

    def way(wrap: Callable[[Any], tuple[Any, Callable[[], None] | None]]) -> Callable[[], None]:
        model = models.build(recipe).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        net, exchange = wrap(model)
        optimizer = optimizers.build(recipe.optimizer, model.parameters())

        def step() -> None:
            functional.cross_entropy(net(images), labels).backward()
            if exchange:
                exchange()
            optimizer.step()
            for parameter in optimizer.parameters:
                parameter.grad = None

        return step

    def flat(group: Any) -> Callable[[Any], tuple[Any, Callable[[], None] | None]]:
        def wrap(model: Any) -> tuple[Any, Callable[[], None] | None]:
            strategy = Flat(model, placement, cpu, group)
            return strategy.model, strategy.exchange

        return wrap

    def ddp(group: Any) -> Callable[[Any], tuple[Any, None]]:
        return lambda model: (
            DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True),
            None,
        )

    def nothing(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, and ours are text
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def ddp_without_exchange(model: Any) -> tuple[Any, None]:
        net = DistributedDataParallel(model, gradient_as_bucket_view=True)
        net.register_comm_hook(None, nothing)
        return net, None

    number, world = torch.zeros(1), dist.group.WORLD
    return {
        "alone": way(lambda model: (model, None)),
        "meet": way(lambda model: (model, lambda: dist.all_reduce(number))),
        "ddp none": way(ddp_without_exchange),
        "ddp shm": way(ddp(world)),
        "flat shm": way(flat(world)),
        "ddp gloo": way(ddp(gloo)),
        "flat gloo": way(flat(gloo)),
    }


def gloo_thread(batch: bool) -> None:
    """Make gloo's polling threads batch threads, or normal ones again."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            if (task / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH if batch else os.SCHED_OTHER, os.sched_param(0))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        rank_main(sys.argv[1], *(int(word) for word in sys.argv[2:]))
    else:
        measured = measure(*(int(word) for word in sys.argv[1:]))
        measured.pop("raw")
        print(json.dumps(measured, indent=1))
