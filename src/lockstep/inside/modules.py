"""Calls of modules: training or evaluation, and what kind of model it is that learns."""

from __future__ import annotations

from threading import get_ident
from typing import Any

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


class Modules:
    """All models of the process."""

    def __init__(self, recorder: Recorder, suspects: Suspects) -> None:
        self._recorder, self._clock, self._suspects = recorder, recorder.clock, suspects
        self._learns: dict[int, int] = {}
        """How many modules there are in each that has learned from a call, by its identity."""
        self._trains: set[int] = set()
        """Those that were in training mode then."""
        self._wrapped: dict[int, LastGradient] = {}
        """Of models in DDP. A hook on the model itself would be copied and saved with it."""

    def hook(self, module: Any) -> None:
        """Outermost calls alone are timed, so that a model of a thousand layers costs no more than one.

        PyTorch's global forward hooks would do, but with one registered every call of every layer takes a slower way.
        """
        clock, learns, look, wrapped, trains = self._clock, self._learns, self._look, self._wrapped, self._trains
        passed, graded = self._suspects.passed, self._suspects.graded
        call, torch = module.Module.__call__, module.torch

        @in_place_of(call)
        def timed(self: Any, *args: Any, **keywords: Any) -> Any:
            if clock.busy or torch.compiler.is_compiling() or get_ident() != clock.thread:
                return call(self, *args, **keywords)
            size = learns.get(id(self), 0)
            if torch.is_grad_enabled():
                size = size or look(self)
                if not self.training and id(self) in trains:
                    graded(1)
                    clock.evaluate(True)
                else:
                    if id(self) in wrapped:
                        passed(wrapped[id(self)].before_forward(self))
                    clock.work(FORWARD)
            else:
                clock.evaluate(size > 0)
            clock.passed += size
            try:
                return call(self, *args, **keywords)
            finally:
                clock.leave()

        module.Module.__call__ = timed
        module.Module.zero_grad = self._recorder.inset(module.Module.zero_grad, ZEROING)

    def learns_in_evaluation_mode(self) -> None:
        """Backward follows what was taken for an evaluation with gradients on: the script trains that way."""
        if self._suspects.graded():
            self._trains.clear()

    def _look(self, module: Any) -> int:
        """A module that learns is called for the first time: how many modules are in it?"""
        self._learns[id(module)] = size = sum(1 for _ in module.modules())
        try:
            inner = getattr(module, "module", None)
            if inner is not None:
                self._learns[id(inner)] = size
            if module.training:
                self._trains |= {id(module), id(inner)}
            kinds = {kind.__name__ for kind in type(module).__mro__}
            for kind, strategy in _STRATEGIES.items():
                if kind in kinds:
                    self._recorder.seen["strategy"] = strategy
            if "DistributedDataParallel" in kinds:
                self._recorder.seen["find_unused_parameters"] = bool(module.find_unused_parameters)
                self._recorder.seen["bucket_mb"] = module.bucket_bytes_cap / (1 << 20)
                self._wrapped[id(module)] = LastGradient(module, self._clock)
        except Exception as error:
            complain(f"what kind of model {type(module).__name__} is remains unknown: {error}")
        return size
