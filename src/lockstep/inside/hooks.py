"""Where the hooks are: what is done to each module of PyTorch when a script has imported it. Those of other frameworks are in frameworks.py.

Public names alone are replaced or registered with. What stands in for a function calls it with the same arguments, and only notes the time before
and after; from threads other than the one that trains, it does not even do that.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from .clock import BACKWARD, CHECKPOINT, EXCHANGE, OPTIMIZER, READING, SCHEDULE, ZEROING
from .frameworks import Frameworks
from .gradients import FILE as GRADIENTS
from .gradients import Arrivals
from .modules import Modules
from .recorder import Recorder, complain
from .standins import Iterators, in_place_of, leave_no_trace
from .suspects import LOOK_AT, Suspects

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
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
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)
SAVERS = ("save", "async_save", "save_state_dict")
"""Of torch.distributed.checkpoint."""
READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__")
"""What brings a value out of a tensor, and waits for it."""
# Of more values in one step the number is enough: timing each would take as long as reading it.
MOST_TIMED_READS = 64


class Hooks:
    """One for the process."""

    def __init__(self, run: str) -> None:
        self._recorder = Recorder(run)
        self._clock = self._recorder.clock
        self._clock.thread = threading.main_thread().ident or 0
        self._suspects = Suspects(self._clock, self._recorder.seen)
        self._recorder.before_beat = self._suspects.told
        self._modules = Modules(self._recorder, self._suspects)
        self._arrivals = Arrivals()
        self._iterators = Iterators(self._fetching)
        os.register_at_fork(after_in_child=self._recorder.forked)
        atexit.register(self._recorder.close)
        leave_no_trace()
        self.by_module: dict[str, Callable[[Any], None]] = {
            "torch": self._torch,
            "torch.nn.modules.module": self._modules.hook,
            "torch.autograd": self._autograd,
            "torch.optim.optimizer": self._optimizers,
            "torch.optim.lr_scheduler": self._schedulers,
            "torch.profiler.profiler": self._profilers,
            "torch.utils.data.dataloader": self._loaders,
            "torch.distributed.distributed_c10d": self._collectives,
            "torch.distributed.checkpoint.state_dict_saver": self._distributed_checkpoints,
            "safetensors.torch": self._safetensors,
            **Frameworks(self._recorder).by_module,
        }

    def imported(self, name: str, module: Any) -> None:
        try:
            self.by_module[name](module)
        except Exception as error:
            if name.startswith("torch."):
                self._recorder.give_up(error)
            else:
                complain(
                    f"{name} is not as we know it, so what it does is not told apart: {type(error).__name__}: {error}"
                )

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
        torch.compile = self._compiling(torch.compile)
        for name in READS:
            setattr(torch.Tensor, name, self._read(getattr(torch.Tensor, name), torch.__file__))

    def _compiling(self, function: Any) -> Any:
        @in_place_of(function)
        def noted(*args: Any, **keywords: Any) -> Any:
            self._arrivals.compiled = True
            return function(*args, **keywords)

        return noted

    def _read(self, function: Any, file: str) -> Any:
        clock = self._clock

        @in_place_of(function, file)
        def read(tensor: Any, *args: Any, **keywords: Any) -> Any:
            if clock.busy or get_ident() != clock.thread or not clock.between:
                return function(tensor, *args, **keywords)
            clock.reads += 1
            if clock.reads > MOST_TIMED_READS:
                clock.passed += 1
                return function(tensor, *args, **keywords)
            clock.inset(READING)
            try:
                return function(tensor, *args, **keywords)
            finally:
                clock.leave()

        return read

    def _safetensors(self, module: Any) -> None:
        module.save_file = self._timed(module.save_file, CHECKPOINT)

    def _distributed_checkpoints(self, module: Any) -> None:
        for name in SAVERS:
            if hasattr(module, name):
                setattr(module, name, self._timed(getattr(module, name), CHECKPOINT))

    def _collectives(self, module: Any) -> None:
        for name in COLLECTIVES:
            if hasattr(module, name):
                setattr(module, name, self._collective(getattr(module, name)))
        module.Work.wait = self._timed(module.Work.wait, EXCHANGE)

    def _collective(self, function: Any) -> Any:
        """The same, counted where gradients are exchanged by hand."""
        clock = self._clock
        timed = self._timed(function, EXCHANGE)

        @in_place_of(function)
        def counted(*args: Any, **keywords: Any) -> Any:
            if clock.after_backward and get_ident() == clock.thread:
                clock.collectives += 1
            return timed(*args, **keywords)

        return counted

    def _autograd(self, module: Any) -> None:
        """`Tensor.backward` calls it too."""
        clock, modules, arrivals, suspects = self._clock, self._modules, self._arrivals, self._suspects

        def timed(function: Any) -> Any:
            @in_place_of(function)
            def backward(*args: Any, **keywords: Any) -> Any:
                if get_ident() != clock.thread:
                    return function(*args, **keywords)
                if clock.evaluating:
                    modules.learns_in_evaluation_mode()
                if arrivals.watching:
                    arrivals.backward_begins()
                if BACKWARD not in clock.stack:  # else a part of the model is computed again
                    suspects.backward_begins()
                clock.enter_backward()
                try:
                    return function(*args, **keywords)
                finally:
                    clock.leave_backward()

            return backward

        module.backward, module.grad = timed(module.backward), timed(module.grad)

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
            steps = clock.steps
            clock.leave_optimizer(id(optimizer))
            self._suspects.updated(optimizer)
            if clock.steps <= LOOK_AT:
                self._arrivals.know(optimizer)
            if clock.steps > steps:
                self._suspects.stepped(optimizer)
                if LOOK_AT <= steps + 1 <= LOOK_AT + 1:
                    self._look_at_gradients(steps + 1)

        module.register_optimizer_step_pre_hook(before)
        module.register_optimizer_step_post_hook(after)
        module.Optimizer.zero_grad = self._recorder.inset(module.Optimizer.zero_grad, ZEROING)

    def _look_at_gradients(self, step: int) -> None:
        """They are watched in one step."""
        try:
            if step == LOOK_AT:
                self._arrivals.watch()
            elif self._arrivals.watching:
                self._recorder.keep(GRADIENTS, self._arrivals.told())
        except Exception as error:
            complain(f"how large its gradients are remains unknown: {type(error).__name__}: {error}")

    def _schedulers(self, module: Any) -> None:
        """Every kind of schedule that has a way of its own to go on."""
        kinds: set[Any] = {kind for kind in vars(module).values() if isinstance(kind, type) and "step" in vars(kind)}
        for kind in kinds:
            kind.step = self._recorder.inset(kind.step, SCHEDULE, self._suspects.scheduled)

    def _profilers(self, module: Any) -> None:
        suspects = self._suspects

        def noting(function: Any, on: bool) -> Any:
            @in_place_of(function)
            def noted(profiler: Any, *args: Any, **keywords: Any) -> Any:
                suspects.profiles(profiler, on)
                return function(profiler, *args, **keywords)

            return noted

        module.profile.start, module.profile.stop = (
            noting(module.profile.start, True),
            noting(module.profile.stop, False),
        )

    def _first_step(self, optimizer: Any) -> None:
        seen = self._recorder.seen
        seen["optimizer"] = type(optimizer).__name__
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
            begin = perf_counter_ns()
            try:
                found = iterate(self_)
            finally:
                clock.leave()
            self._suspects.loader_starts(self_, found, perf_counter_ns() - begin)
            self._iterators.meet(found)
            return found

        module.DataLoader.__iter__ = timed

    def _fetching(self, fetch: Any) -> Any:
        clock, suspects = self._clock, self._suspects

        @in_place_of(fetch)
        def timed(iterator: Any) -> Any:
            if clock.busy or get_ident() != clock.thread:
                return fetch(iterator)
            loader = suspects.fetches(iterator)
            clock.fetch()
            begin = perf_counter_ns()
            try:
                return fetch(iterator)
            except StopIteration:
                clock.no_more_batches()
                raise
            finally:
                clock.leave()
                if loader is not None and loader.fresh:
                    suspects.fetched(loader, perf_counter_ns() - begin)

        return timed
