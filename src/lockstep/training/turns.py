"""The worker's side of turns (lockstep/turns/): a rank that takes steps when it is asked to, and is parked in between.

Orders and answers are lines of JSON, through two named pipes in the rank's folder, or over TCP where the race has a desk (lockstep/lines.py). A
rank that waits for an order waits in a read: it uses no processor, whatever its backend does while ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time

from lockstep import strategies
from lockstep.backends.group import reduce_max
from lockstep.errors import InputError
from lockstep.lines import Line
from lockstep.machine.cpu import waited_seconds
from lockstep.machine.starving import link_seconds
from lockstep.measure.memory import MemoryMeter, TensorMeter
from lockstep.measure.recorder import Recorder
from lockstep.training.context import Context

# Of an evaluation that takes longer than this a part is timed, so many batches of each rank.
LONG_EVALUATION_S, EVALUATED_BATCHES = 1.0, 2


class Parted(BaseException):
    """No more windows are wanted. Not an Exception, so that a script's own handlers let it through."""


class Turns:
    """Counts the steps of a loop, whoever wrote it, and holds it at the end of each window."""

    def __init__(
        self,
        context: Context,
        recorder: Recorder,
        evaluate: Callable[[int], object] | None = None,
        kept_bytes: Callable[[], int] | None = None,
    ) -> None:
        """`evaluate` tests the model on the first N samples, `kept_bytes` are those of tensors that last from step to step; of a script neither is known."""
        self._recorder, self._evaluate, self._kept_bytes = recorder, evaluate, kept_bytes
        self._device, plan = context.device, context.plan
        self._first = context.rank.is_first
        self._whole = min(plan.global_batch, plan.train_samples)
        self._tested = plan.test_samples
        self._part = min(plan.test_samples, EVALUATED_BATCHES * context.placement.eval_batch * context.rank.world)
        self._counts = False
        self._tensors: TensorMeter | None = None
        self._memory = MemoryMeter(context.device)
        self._line = Line(context.run, context.rank.rank)
        self._lead = self._steps = self._samples = 0
        self._spent = [0.0, 0.0]
        self._since: list[float] | None = None
        self._row, self._asked, self._waited = 0, 0.0, 0.0
        self._line.answer({"whole_steps": _whole_steps(context)})  # ready

    def before_step(self, samples: int) -> None:
        """A step is about to begin; `samples` are those of all ranks."""
        while self._lead == 0 and self._steps == 0:
            self._end_window()
            self._await_order()
        if self._lead:
            self._lead -= 1
            return
        if self._counts and self._kept_bytes:
            if samples < self._whole:
                return  # an epoch's last batch takes less memory: the next one is counted
            self._tensors, self._counts = TensorMeter(self._device, self._kept_bytes()), False
        if self._since is None:
            self._begin_span()
        self._steps -= 1
        self._samples += samples

    def pause(self) -> None:
        """What follows is no training (an evaluation), and is not timed."""
        if self._since is not None:
            self._recorder.clock.flush()  # on a GPU, the steps end here
            self._spent = [
                spent + now - since for spent, now, since in zip(self._spent, _clocks(), self._since, strict=True)
            ]
            self._since = None

    def _begin_span(self) -> None:
        self._recorder.clock.flush()
        if not self._samples:
            self._row = self._recorder.log.count
        self._since = _clocks()

    def _end_window(self) -> None:
        self.pause()
        if self._samples:
            wall, cpu = self._spent
            used, waited = self._used() - self._asked, waited_seconds() - self._waited
            phases = self._recorder.log.phase_seconds(self._row)
            tensors = self._tensors.close() if self._tensors else None
            self._tensors = None
            self._line.answer(
                {
                    "samples": self._samples,
                    "wall": wall,
                    "cpu": cpu,
                    "used": used,
                    "waited": waited,
                    "phases": phases,
                    "tensors": tensors,
                }
            )
        self._samples, self._spent = 0, [0.0, 0.0]

    def _used(self) -> float:
        """Processor seconds that are ours, and so no other work; what carries the bytes of all ranks is counted by one of them."""
        return process_time() + (link_seconds() if self._first else 0.0)

    def _await_order(self) -> None:
        """`lead` steps are not timed: ranks wake one after the other, and caches hold what others have left in them."""
        while (order := self._line.order()).get("look"):
            self._line.answer(self._look())
        if not order:
            raise Parted
        self._lead, self._steps = order["lead"], order["steps"]
        self._asked, self._waited = self._used(), waited_seconds()
        self._counts = bool(order.get("tensors"))

    def _look(self) -> dict[str, float | None]:
        """What of a training is not in its steps: the time of one evaluation, and the memory that all of it has needed so far."""
        seconds = None
        if self._evaluate and self._tested:
            self._test(self._evaluate, self._part)  # builds what the later ones use
            seconds = self._test(self._evaluate, self._part) * self._tested / self._part
            if seconds < LONG_EVALUATION_S and self._part < self._tested:
                seconds = self._test(self._evaluate, self._tested)
        return {"evaluation": seconds, "memory": self._memory.growth_bytes()}

    def _test(self, evaluate: Callable[[int], object], samples: int) -> float:
        """Seconds of the slowest rank, so that all ranks come to the same decision."""
        begin = perf_counter()
        evaluate(samples)
        self._recorder.clock.flush()
        return reduce_max([perf_counter() - begin])[0]


def _whole_steps(context: Context) -> int:
    strategy = context.placement.strategy
    found = strategies.kind_of(strategy).whole_steps(context.placement)
    if not isinstance(found, int) or found < 1:
        raise InputError(f"strategy={strategy}: whole_steps says {found!r}: how many steps belong together, 1 or more")
    return found


def _clocks() -> list[float]:
    return [perf_counter(), process_time()]
