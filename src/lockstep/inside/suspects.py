"""What a script does that may make it slow or wrong, as far as it can be seen: facts and counts, which explain/attached.py judges."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import wraps
from threading import get_ident, get_native_id
from time import perf_counter_ns
from typing import Any
from weakref import ref

from .recorder import complain

# A few steps after the beginning, when everything has been set up.
LOOK_AT = 3


def _harmless(look: Callable[..., Any]) -> Callable[..., Any]:
    """Whatever is wrong with us is not the script's business: one line, and nothing more is looked at."""

    @wraps(look)
    def tried(self: Suspects, *arguments: Any) -> Any:
        if self.failed:
            return None
        try:
            return look(self, *arguments)
        except Exception as error:
            self.failed = True
            complain(f"the usual suspects are not looked for any more: {type(error).__name__}: {error}")
            return None

    return tried


class Loader:
    """A loader that was seen. It is not held: another one may have its identity when it is gone."""

    def __init__(self, loader: Any) -> None:
        self.alive = ref(loader)
        self.told = _described(loader)
        self.dataset, self.kind = _held(loader.dataset), _kind(loader)
        self.shuffled_by_epoch = bool(_sampler(loader, "shuffle")) and hasattr(loader.sampler, "set_epoch")
        self.epoch: Any = None
        """Of its sampler, in this pass; and in the last one that trained."""
        self.last_epoch: Any = None
        self.new = self.fresh = True
        """Nothing was learned in this pass; none of its batches is there."""
        self.starting = self.started = False
        """This pass starts its workers; it has had a pass."""
        self.learned = self.evaluated = 0
        """What the clock had counted before the newest batch."""

    def anew(self, loader: Any) -> bool:
        """A script may make the same loader anew for every epoch: is this one in the place of ours, which is gone?"""
        dataset = self.dataset()
        if self.alive() is not None or dataset is None or dataset is not loader.dataset or self.kind != _kind(loader):
            return False
        self.alive, self.started = ref(loader), False
        self.told["made"] += 1
        return True


class Suspects:
    """One for the process. Everything goes into `seen`, which is told with every sign of life."""

    def __init__(self, clock: Any, seen: dict[str, Any]) -> None:
        self._clock, self.seen = clock, seen
        self.failed = False
        self._loaders: list[Loader] = []
        self._of_iterator: dict[int, Loader] = {}
        self._schedulers: dict[tuple[int, int], int] = {}
        """How often each goes on, by itself and the optimizer that it is of."""
        self._updates: dict[int, int] = {}
        """How often each optimizer steps."""
        self._profilers: list[Any] = []
        self._before: tuple[int, int] | None = None
        self._began = self._gc_began = 0
        gc.callbacks.append(self._collecting)

    # --- the loader ---

    @_harmless
    def loader_starts(self, loader: Any, iterator: Any, took: int) -> None:
        """A pass over a loader begins."""
        clock, known = self._clock, self._known(loader)
        told = known.told
        known.epoch = _sampler(loader, "epoch")
        known.fresh = known.new = True
        known.starting = bool(clock.steps) and not (known.started and told["persistent"])
        known.started = True
        told["passes"] += 1
        if known.starting:
            told["starts"] += 1
            told["start_ns"] += took
        self._of_iterator[id(iterator)] = known
        if not clock.steps:
            self.seen["loader"] = told

    def _known(self, loader: Any) -> Loader:
        for known in self._loaders:
            if known.alive() is loader:
                return known
        for known in self._loaders:
            if known.anew(loader):
                return known
        self._loaders.append(Loader(loader))
        return self._loaders[-1]

    @_harmless
    def fetches(self, iterator: Any) -> Loader | None:
        """A batch is about to be fetched: what came after the one before is known now. Of one that was learned from, what else came is an
        evaluation in the middle of an epoch."""
        loader, clock = self._of_iterator.get(id(iterator)), self._clock
        if loader is None:
            return None
        told = loader.told
        learned, evaluated = clock.steps + clock.backwards, clock.evaluations
        fetched = not loader.fresh
        if fetched and learned > loader.learned:
            told["trained"] += 1
            if loader.new:
                self._epoch(loader)
            if told["trained"] > self.seen.get("loader", told)["trained"]:
                self.seen["loader"] = told
        elif fetched and evaluated > loader.evaluated:
            told["evaluated"] += 1
        loader.learned, loader.evaluated = learned, evaluated
        return loader

    def _epoch(self, loader: Loader) -> None:
        """The pass is one of training: others over the same loader, as for the accuracy on its samples, may well have the same order."""
        told = loader.told
        if told["epochs"] and loader.shuffled_by_epoch and loader.epoch == loader.last_epoch:
            told["same_order"] += 1
        loader.new, loader.last_epoch = False, loader.epoch
        told["epochs"] += 1

    @_harmless
    def fetched(self, loader: Loader, took: int) -> None:
        """The first batch of a pass waits for the workers to start."""
        if loader.fresh:
            loader.fresh = False
            if loader.starting:
                loader.told["start_ns"] += took

    # --- the rest ---

    @_harmless
    def scheduled(self, scheduler: Any) -> None:
        if self._clock.steps:
            optimizer = getattr(scheduler, "optimizer", None)
            if id(optimizer) not in self._updates:  # a framework's own stands around PyTorch's
                optimizer = getattr(optimizer, "optimizer", None)
            key = id(scheduler), id(optimizer)
            self._schedulers[key] = self._schedulers.get(key, 0) + 1

    def updated(self, optimizer: Any) -> None:
        self._updates[id(optimizer)] = self._updates.get(id(optimizer), 0) + 1

    @_harmless
    def backward_begins(self) -> None:
        """Anomaly detection may be on around the passes alone."""
        if sys.modules["torch"].is_anomaly_enabled():
            self.seen["anomaly"] = self.seen.get("anomaly", 0) + 1

    def graded(self, more: int = 0) -> bool:
        """A model that is trained was called in evaluation mode, with gradients on; without `more`: forget it, and say whether it was."""
        if more:
            self.seen["graded"] = self.seen.get("graded", 0) + more
            return True
        return bool(self.seen.pop("graded", 0))

    @_harmless
    def profiles(self, profiler: Any, on: bool) -> None:
        if on:
            self._profilers.append(profiler)
        elif profiler in self._profilers:
            self._profilers.remove(profiler)

    @_harmless
    def stepped(self, optimizer: Any) -> None:
        """A step is over."""
        steps = self._clock.steps
        if self._profilers and any(_recording(profiler) for profiler in self._profilers):
            self.seen["profiled"] = self.seen.get("profiled", 0) + 1
        if steps == 1:
            self._began, self._before = perf_counter_ns(), _scheduled()
        if steps == LOOK_AT:
            self._look(optimizer)

    def _look(self, optimizer: Any) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if not parameters:
            return
        group = optimizer.param_groups[0]
        self.seen["update"] = {
            "parameters": len(parameters),
            "can_fuse": "fused" in optimizer.defaults,
            "fused": bool(group.get("fused") or group.get("foreach")),
        }
        self.seen["numbers"] = str(parameters[0].dtype).rpartition(".")[2]

    def told(self) -> None:
        """Before a sign of life: what changes all the time."""
        clock = self._clock
        if self._schedulers:
            self.seen["scheduled"] = self._most_scheduled()
        self.seen["exchanged"], self.seen["updates"] = clock.exchanged, clock.updates
        self.seen["evaluated_by"] = [each.told for each in self._loaders if each.told["evaluated"]][:4]
        self.seen["steps"] = clock.steps
        self.seen["backwards"], self.seen["collectives"] = clock.backwards, clock.collectives
        now = _scheduled() if self._before is not None and get_ident() == clock.thread else None
        if self._before is not None and now is not None:
            self.seen["ran_seconds"] = (now[0] - self._before[0]) / 1e9
            self.seen["delayed_seconds"] = (now[1] - self._before[1]) / 1e9
            self.seen["since_seconds"] = (perf_counter_ns() - self._began) / 1e9

    def _most_scheduled(self) -> tuple[int, int]:
        """How often the schedule that goes on most often per update did so, and the updates of its own optimizer."""
        known = ((times, self._updates.get(of, self._clock.steps)) for (_, of), times in self._schedulers.items())
        return max(known, key=lambda schedule: schedule[0] / max(1, schedule[1]))

    def _collecting(self, phase: str, info: dict[str, Any]) -> None:
        """The garbage collector calls this before and after it has run."""
        clock = self._clock
        if get_ident() != clock.thread:
            return
        now = perf_counter_ns()
        if phase == "start":
            self._gc_began = now
        elif self._gc_began:
            clock.collected(now - self._gc_began)
            self._gc_began = 0
            if info.get("generation") == 2 and clock.steps:
                self.seen["collections"] = self.seen.get("collections", 0) + 1


def _described(loader: Any) -> dict[str, Any]:
    """What is told of a loader."""
    total, samples = _sampler(loader, "total_size"), _length(loader.dataset)
    pads = isinstance(total, int) and samples is not None and not _sampler(loader, "drop_last")
    return {
        "workers": loader.num_workers,
        "persistent": bool(loader.persistent_workers),
        "batch": loader.batch_size,
        "batches": _length(loader),
        "samples": samples,
        "shares": _sampler(loader, "num_replicas") or _sampler(loader, "num_processes") or 1,
        "padded": max(0, total - samples) if pads else 0,
        "made": 1,
        "epochs": 0,
        "same_order": 0,
        "passes": 0,
        "starts": 0,
        "start_ns": 0,
        "trained": 0,
        "evaluated": 0,
    }


def _kind(loader: Any) -> tuple[Any, ...]:
    return type(loader.sampler), type(loader.batch_sampler), loader.num_workers, loader.batch_size


def _sampler(loader: Any, name: str) -> Any:
    """What the sampler of a loader says of itself, or the sampler of its batches."""
    for place in (loader.sampler, loader.batch_sampler):
        found = getattr(place, name, None)
        if found is not None:
            return found
    return None


def _held(thing: Any) -> Callable[[], Any]:
    """A weak reference; of what cannot have one, as a list, nothing is known later."""
    try:
        return ref(thing)
    except TypeError:
        return lambda: None


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # an iterable has none, and whatever else a user's class raises is not our business
        return None


def _recording(profiler: Any) -> bool:
    """Of torch.profiler's, whether it records now: it may have a schedule."""
    action = getattr(profiler, "current_action", None)
    return action is None or str(getattr(action, "name", action)).startswith("RECORD")


def _scheduled() -> tuple[int, int] | None:
    """Nanoseconds in which this thread has run, and in which it could have run and had no processor, as Linux counts them."""
    try:
        with open(f"/proc/self/task/{get_native_id()}/schedstat", encoding="ascii") as file:
            ran, delayed, *_ = file.read().split()
            return int(ran), int(delayed)
    except (OSError, ValueError):
        return None
