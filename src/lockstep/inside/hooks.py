"""Where the hooks are: what is done to each module of PyTorch when a script has imported it.

Public names alone are replaced or registered with. What stands in for a function calls it with the same arguments, and only notes the time before
and after; from threads other than the one that trains, it does not even do that.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from .clock import BACKWARD, CHECKPOINT, EXCHANGE, FORWARD, OPTIMIZER
from .recorder import Recorder, complain

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


def in_place_of(function: Any) -> Callable[[Any], Any]:
    """A decorator for what stands in for a function of PyTorch.

    It says that it comes from PyTorch's own file. The compiler passes over these files, and so over it; else `torch.compile` would find
    other places to begin at than it does without us, and compiled code has other rounding.
    """

    def decorate(ours: Any) -> Any:
        code = getattr(function, "__code__", None)
        if code is not None:
            ours.__code__ = ours.__code__.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
        return wraps(function)(ours)

    return decorate


class Hooks:
    """One for the process."""

    def __init__(self, run: str) -> None:
        self._recorder = Recorder(run)
        self._clock = self._recorder.clock
        self._clock.thread = threading.main_thread().ident or 0
        self._learns: dict[int, int] = {}
        """How many modules there are in each that has learned from a call, by its identity."""
        self._wrapped: dict[int, LastGradient] = {}
        """Of models in DDP. A hook on the model itself would be copied and saved with it."""
        self._loader: dict[str, Any] = {}
        self._iterators: set[type] = set()
        os.register_at_fork(after_in_child=self._recorder.forked)
        atexit.register(self._recorder.close)
        self.by_module: dict[str, Callable[[Any], None]] = {
            "torch": self._torch,
            "torch.nn.modules.module": self._modules,
            "torch.autograd": self._autograd,
            "torch.optim.optimizer": self._optimizers,
            "torch.utils.data.dataloader": self._loaders,
            "torch.distributed.distributed_c10d": self._collectives,
            "safetensors.torch": self._safetensors,
        }

    def imported(self, name: str, module: Any) -> None:
        try:
            self.by_module[name](module)
        except Exception as error:
            self._recorder.give_up(error)

    def _timed(self, function: Any, kind: int) -> Any:
        clock = self._clock

        @in_place_of(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            if get_ident() != clock.thread:
                return function(*args, **keywords)
            clock.enter(kind)
            try:
                return function(*args, **keywords)
            finally:
                clock.leave()

        return timed

    def _torch(self, torch: Any) -> None:
        torch.save = self._timed(torch.save, CHECKPOINT)

    def _safetensors(self, module: Any) -> None:
        module.save_file = self._timed(module.save_file, CHECKPOINT)

    def _collectives(self, module: Any) -> None:
        for name in COLLECTIVES:
            if hasattr(module, name):
                setattr(module, name, self._timed(getattr(module, name), EXCHANGE))
        module.Work.wait = self._timed(module.Work.wait, EXCHANGE)

    def _autograd(self, module: Any) -> None:
        """`Tensor.backward` calls it too."""
        clock = self._clock

        def timed(function: Any) -> Any:
            @in_place_of(function)
            def backward(*args: Any, **keywords: Any) -> Any:
                if get_ident() != clock.thread:
                    return function(*args, **keywords)
                clock.work(BACKWARD)
                try:
                    return function(*args, **keywords)
                finally:
                    clock.leave_backward()

            return backward

        module.backward, module.grad = timed(module.backward), timed(module.grad)

    def _modules(self, module: Any) -> None:
        """Outermost calls alone are timed, so that a model of a thousand layers costs no more than one.

        PyTorch's global forward hooks would do, but with one registered every call of every layer takes a slower way.
        """
        clock, learns, look, wrapped = self._clock, self._learns, self._look, self._wrapped
        call, torch = module.Module.__call__, module.torch

        @in_place_of(call)
        def timed(self: Any, *args: Any, **keywords: Any) -> Any:
            if clock.busy or torch.compiler.is_compiling() or get_ident() != clock.thread:
                return call(self, *args, **keywords)
            size = learns.get(id(self), 0)
            if torch.is_grad_enabled():
                size = size or look(self)
                if id(self) in wrapped:
                    wrapped[id(self)].before_forward(self)
                clock.work(FORWARD)
            else:
                clock.evaluate(size > 0)
            clock.passed += size
            try:
                return call(self, *args, **keywords)
            finally:
                clock.leave()

        module.Module.__call__ = timed

    def _look(self, module: Any) -> int:
        """A module that learns is called for the first time: how many modules are in it?"""
        self._learns[id(module)] = size = sum(1 for _ in module.modules())
        try:
            inner = getattr(module, "module", None)
            if inner is not None:
                self._learns[id(inner)] = size
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

    def _optimizers(self, module: Any) -> None:
        clock = self._clock

        def before(optimizer: Any, args: Any, keywords: Any) -> None:
            thread = get_ident()
            if thread != clock.thread:
                if clock.steps or not clock.thread:
                    return
                clock.adopt(thread)  # a script that trains in a thread of its own
            clock.work(OPTIMIZER)

        def after(optimizer: Any, args: Any, keywords: Any) -> None:
            if get_ident() != clock.thread:
                return
            if not clock.steps:
                self._first_step(optimizer)
            clock.leave_optimizer(id(optimizer))

        module.register_optimizer_step_pre_hook(before)
        module.register_optimizer_step_post_hook(after)

    def _first_step(self, optimizer: Any) -> None:
        seen = self._recorder.seen
        seen["optimizer"] = type(optimizer).__name__
        if self._loader:
            seen["loader"] = self._loader
        parameter = next((one for group in optimizer.param_groups for one in group["params"]), None)
        if parameter is not None:
            seen["device"] = parameter.device.type

    def _loaders(self, module: Any) -> None:
        iterate, clock = module.DataLoader.__iter__, self._clock

        @in_place_of(iterate)
        def timed(self_: Any) -> Any:
            if get_ident() != clock.thread:
                return iterate(self_)
            clock.fetch()
            try:
                found = iterate(self_)
            finally:
                clock.leave()
            if not clock.steps:
                self._loader = {"workers": self_.num_workers, "batch": self_.batch_size}
            if type(found) not in self._iterators:
                self._iterators.add(type(found))
                self._fetches(type(found))
            return found

        module.DataLoader.__iter__ = timed

    def _fetches(self, kind: Any) -> None:
        """The iterators of a loader, whose class is PyTorch's own affair."""
        fetch, clock = kind.__next__, self._clock

        @in_place_of(fetch)
        def timed(iterator: Any) -> Any:
            if clock.busy or get_ident() != clock.thread:
                return fetch(iterator)
            clock.fetch()
            try:
                return fetch(iterator)
            except StopIteration:
                clock.no_more_batches()
                raise
            finally:
                clock.leave()

        kind.__next__ = timed


_STRATEGIES = {
    "DistributedDataParallel": "ddp",
    "DataParallel": "dp",
    "FullyShardedDataParallel": "fsdp",
    "FSDPModule": "fsdp",
}


class LastGradient:
    """Tells the clock when the last gradient of a backward pass is there. All parameters are watched until a pass has shown whose comes last."""

    def __init__(self, module: Any, clock: Any) -> None:
        self._clock = clock
        self._latest: Any = None
        self._handles = [
            (parameter, parameter.register_post_accumulate_grad_hook(self._seen))
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def _seen(self, parameter: Any) -> None:
        self._latest = parameter
        self._clock.ready = perf_counter_ns()

    def before_forward(self, module: Any) -> None:
        """DDP decides in its forward pass whether the backward pass exchanges."""
        self._clock.exchanges = bool(module.require_backward_grad_sync)
        if self._latest is not None and len(self._handles) > 1:
            for parameter, handle in self._handles:
                if parameter is not self._latest:
                    handle.remove()
            self._handles = self._handles[:1]
