"""Calls of modules: training or evaluation, and what kind of model it is that learns."""

from __future__ import annotations

from threading import get_ident
from typing import Any
from weakref import ref

from .clock import FORWARD, ZEROING
from .gradients import LastGradient
from .recorder import Recorder, complain
from .standins import in_place_of
from .suspects import Suspects

_STRATEGIES = {
    "DistributedDataParallel": "ddp",
    "DataParallel": "dp",
    "FullyShardedDataParallel": "fsdp",
    "FSDPModule": "fsdp",
}
_WRAPPERS = {*_STRATEGIES, "OptimizedModule"}
# By these names a wrapper has the model that it wraps.
_WITHIN = "module", "_orig_mod"


class Learner:
    """What is known of a module that has learned from a call, or of one that it wraps or is wrapped in."""

    def __init__(self, module: Any, forget: Any) -> None:
        self.alive = ref(module, forget)
        """The module is not held: another one may have its identity when it is gone."""
        self.size = 1
        """How many modules are in it."""
        self.trains = False
        """It was in training mode when it learned."""
        self.exchanging: list[LastGradient] = []
        """Of the models in DDP that a call of it calls. A hook on the model itself would be copied and saved with it."""


class Modules:
    """All models of the process."""

    def __init__(self, recorder: Recorder, suspects: Suspects) -> None:
        self._recorder, self._clock, self._suspects = recorder, recorder.clock, suspects
        self._learners: dict[int, Learner] = {}
        """By identity."""

    def hook(self, module: Any) -> None:
        """Outermost calls alone are timed, so that a model of a thousand layers costs no more than one.

        PyTorch's global forward hooks would do, but with one registered every call of every layer takes a slower way.
        """
        clock, learners, look, exchanges = self._clock, self._learners, self._look, self._exchanges
        graded = self._suspects.graded
        call, torch = module.Module.__call__, module.torch

        @in_place_of(call)
        def timed(self: Any, *args: Any, **keywords: Any) -> Any:
            if clock.busy or torch.compiler.is_compiling() or get_ident() != clock.thread:
                return call(self, *args, **keywords)
            learner = learners.get(id(self))
            if torch.is_grad_enabled():
                learner = learner or look(self)
                if not self.training and learner.trains:
                    graded(1)
                    clock.evaluate(True)
                else:
                    if learner.exchanging:
                        exchanges(learner)
                    clock.work(FORWARD)
            else:
                clock.evaluate(learner is not None and not self.training)
            if learner is not None:
                clock.passed += learner.size
            try:
                return call(self, *args, **keywords)
            finally:
                clock.leave()

        module.Module.__call__ = timed
        module.Module.zero_grad = self._recorder.inset(module.Module.zero_grad, ZEROING)

    def learns_in_evaluation_mode(self) -> None:
        """Backward follows what was taken for an evaluation with gradients on: the script trains that way."""
        if self._suspects.graded():
            for learner in self._learners.values():
                learner.trains = False

    def _look(self, module: Any) -> Learner:
        """A module that learns is called for the first time. A strategy may stand anywhere in it: in a module of the script's own, or in
        what torch.compile has made of it."""
        found = self._learner(module)
        try:
            found.trains = module.training
            for part in module.modules():
                kinds = {kind.__name__ for kind in type(part).__mro__}
                if part is module or kinds & _WRAPPERS:
                    children = dict(part.named_children())
                    inner = [children.get(name) for name in _WITHIN]
                    for each in (part, *(one for one in inner if one is not None)):
                        learner = self._learner(each)
                        learner.size, learner.trains = len(list(each.modules())), learner.trains or found.trains
                for kind, strategy in _STRATEGIES.items():
                    if kind in kinds:
                        self._recorder.seen["strategy"] = strategy
                if "DistributedDataParallel" in kinds:
                    self._exchange(found, part)
        except Exception as error:
            complain(f"what kind of model {type(module).__name__} is remains unknown: {error}")
        return found

    def _learner(self, module: Any) -> Learner:
        key = id(module)
        if key not in self._learners:
            self._learners[key] = Learner(module, lambda _: self._learners.pop(key, None))
        return self._learners[key]

    def _exchange(self, found: Learner, model: Any) -> None:
        """A model in DDP is called by this one, or is this one."""
        self._recorder.seen["find_unused_parameters"] = bool(model.find_unused_parameters)
        self._recorder.seen["bucket_mb"] = model.bucket_bytes_cap / (1 << 20)
        own = self._learner(model)
        own.exchanging = own.exchanging or [LastGradient(model, self._clock, self._recorder.seen)]
        if own is not found:
            found.exchanging += own.exchanging

    def _exchanges(self, learner: Learner) -> None:
        """Tells the clock whether the backward pass of this call will exchange."""
        try:
            told = [each.before_forward() for each in learner.exchanging]
            self._clock.exchanges = any(told)
        except Exception as error:
            learner.exchanging, self._clock.exchanges = [], False
            complain(f"what the model exchanges is not told apart: {type(error).__name__}: {error}")
