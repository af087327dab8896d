"""One optimizer step on one rank: the gradient of a global batch, timed phase by phase. Recipes and a user's own loop share it.

The loss is the sum over samples divided by the *global* count, also in the last, partial batch and in a partial
accumulation window. So the gradient does not depend on how the batch was divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.measure.clock import DATA, EXCHANGE, FORWARD, OPTIMIZER, StepClock
from lockstep.measure.records import StepLog
from lockstep.strategies import Strategy
from lockstep.strategies.optimizer import Optimizer
from lockstep.torch_private import engine
from lockstep.training.reduction import mean_over

_LAPS = {"data": DATA, "forward": FORWARD, "optimizer": OPTIMIZER}


class Records(Protocol):
    """Where times, losses and hits go. The clock and the log may be replaced between steps: a file of rows grows."""

    clock: StepClock
    log: StepLog


class Steps:
    """Takes one rank's steps: what does not change from one to the next, and the one under way."""

    def __init__(
        self, strategy: Strategy, records: Records, world: int, optimizer: Optimizer | None = None, taken: int = 0
    ) -> None:
        """`optimizer`: where the loop is ours; a script's own optimizer is its own affair. `taken`: steps of the run before this process."""
        self.strategy, self.records, self.many, self.taken = strategy, records, world > 1, taken
        self._optimizer = optimizer
        trained = [parameter for parameter in strategy.bare.parameters() if parameter.requires_grad]
        self._unchecked = trained if optimizer is None else None
        """Until a script's first step is over: parameters that must have a gradient then."""
        # In the loss's own type: rounded to fp32, it would cost a model in float64 half of its digits.
        double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in trained)
        kind = torch.float64 if double else torch.float32
        self._weight, self._weighs = torch.zeros((), dtype=kind, device=trained[0].device if trained else "cpu"), 0.0
        self._ready = LastGradient(optimizer.parameters if optimizer else trained, self) if self.many else None
        # A hook that nobody has overridden costs nothing, and leaves no mark in the times.
        # Where weights are divided it also hands gradients over to the optimizer, in a group of one too.
        self.exchanges = (self.many or strategy.divides_weights) and type(strategy).exchange is not Strategy.exchange
        self._sends = self.many and optimizer is not None and type(optimizer).exchange is not Optimizer.exchange
        self._acts_after = self.many and type(strategy).after_step is not Strategy.after_step
        self._open: Step | None = None
        self.row = records.log.count
        """The row of the next step. On a GPU the log counts a row later, when the step's events are read."""

    def open(self, samples: int, count: int, mine: torch.Tensor | None = None, units: float | None = None) -> Step:
        """The next step, on a global batch of `count` samples, of which this rank has `samples`.

        `units`: what the loss over them is divided by, where that is not their number.
        """
        self._open = Step(self, samples, count, mine, count if units is None else units)
        return self._open

    def finish(self, epoch: int) -> Step | None:
        """End the step under way and write its row; None where there is none."""
        step, self._open = self._open, None
        if step is None:
            return None
        if not step.exchanged:
            raise InputError(
                "a step ended without step.backward(loss_sum): its gradients are not those of the global batch"
            )
        clock = self.records.clock
        if step.updated:
            clock.skip()
        else:
            clock.lap(OPTIMIZER)
        if self._sends and self._optimizer is not None:
            self._optimizer.exchange()
            clock.lap(EXCHANGE)
        if self._acts_after:
            self.strategy.after_step(self.taken + 1)
            clock.lap(EXCHANGE)
        clock.finish(epoch, step.samples)
        self.taken += 1
        self.row += 1
        if self._ready:
            self._ready.narrow()
        return step

    def gradients_ready(self) -> None:
        self.records.clock.gradients_ready()

    def weight(self, count: float) -> torch.Tensor:
        """What each sample's loss counts: 1 / global count, times what the strategy divides by; 0 for a dummy sample (count 0)."""
        weighs = self.strategy.gradient_scale / count if count else 0.0
        if weighs != self._weighs:
            self._weighs = weighs
            self._weight.fill_(weighs)
        return self._weight

    def check_loss(self, loss: torch.Tensor, samples: int) -> None:
        """In a script's first step: a mean over the rank's samples would make N ranks compute something else than one."""
        mean = mean_over(loss, samples) if self._unchecked is not None and samples > 1 else None
        if mean:
            raise InputError(
                f"step.backward: the loss is a mean over this rank's samples ({mean}), and ranks have different numbers of them: "
                "give the sum (reduction='sum'); backward divides by the global count"
            )

    def check_gradients(self) -> None:
        """In a script's first step: a strategy that keeps the gradients for itself would leave the script's optimizer without."""
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None and all(parameter.grad is None for parameter in unchecked):
            raise InputError("step.backward: no parameter of the model that s.wrap was given has a gradient after it")


class Step:
    """What the body of `for step in s.steps(…)` works with."""

    def __init__(self, steps: Steps, samples: int, count: int, mine: torch.Tensor | None, units: float) -> None:
        self._steps = steps
        self.samples, self.count, self.units = samples, count, units
        self._mine = mine
        self.exchanged, self.updated, self.correct_known, self.passes = False, False, False, 0
        self._inner = False

    @property
    def mine(self) -> torch.Tensor:
        """Which samples of the set this rank takes. Never empty: a rank without any computes one that counts for nothing."""
        assert self._mine is not None
        return self._mine

    def lap(self, phase: str) -> None:
        """What came since the last mark was `phase`: data, forward or optimizer. Backward and exchange mark themselves."""
        if phase not in _LAPS:
            raise InputError(f"step.lap('{phase}'): known are {', '.join(_LAPS)}")
        self.updated = phase == "optimizer"
        self._steps.records.clock.lap(_LAPS[phase])

    def backward(self, loss_sum: torch.Tensor, scaler: Any = None, *, samples: int | None = None) -> None:
        """Gradients of the mean over the whole global batch; `loss_sum` is the sum over this rank's samples.

        `scaler`: a torch.amp.GradScaler, whose scale the gradients get. `samples`: how many this pass has, where a step takes
        several and some may have none; a pass without samples takes part and counts for nothing.
        """
        if self.exchanged:
            raise InputError(
                "step.backward: gradients were exchanged already; all calls but the last go into step.no_exchange()"
            )
        steps, clock = self._steps, self._steps.records.clock
        clock.lap(FORWARD)
        counts = self.samples if samples is None else samples
        steps.check_loss(loss_sum, counts)
        weight = steps.weight(self.units if counts else 0)
        weight = weight if scaler is None else scaler.scale(weight)
        if type(loss_sum) is torch.Tensor and loss_sum.dim() == 0:
            # retain_graph, create_graph, inputs, allow_unreachable, accumulate_grad: as loss.backward has them
            engine.run_backward((loss_sum,), (weight,), False, False, (), True, True)
        else:
            (loss_sum * weight).backward()  # type: ignore[no-untyped-call]  # PyTorch says what is wrong with it
        clock.lap_backward(steps.many and not self._inner)
        self.passes += 1
        if not self._inner:
            self.exchanged = True
            if steps.exchanges:
                clock.gradients_ready()
                steps.strategy.exchange()
                clock.lap(EXCHANGE)
            steps.check_gradients()
        if counts:
            # A row has samples: in their number, the mean of the step's rows is the loss that was minimised.
            per_sample = 1.0 if self.units == self.count else self.count / (self.units or 1.0)
            steps.records.log.add_loss(
                steps.row, loss_sum.detach() if per_sample == 1.0 else loss_sum.detach() * per_sample
            )
        clock.skip()

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Around forward and backward of all passes but the last, where a step takes several (gradient accumulation)."""
        self._inner = True
        try:
            with self._steps.strategy.no_exchange():
                yield
        finally:
            self._inner = False

    def log(self, *, correct: torch.Tensor | int) -> None:
        """How many of this rank's samples were right. Nothing waits for a tensor's value."""
        steps, clock = self._steps, self._steps.records.clock
        if not self.updated:
            clock.lap(OPTIMIZER if self.exchanged else FORWARD)
        if self.samples:
            steps.records.log.add_correct(steps.row, correct)
        self.correct_known = True
        clock.skip()


class LastGradient:
    """Tells the clock when the last gradient of a backward pass is there, at the cost of one hook.

    All parameters are watched in the first step, which shows whose gradient comes last; from then on only that one.
    """

    def __init__(self, parameters: list[nn.Parameter], steps: Steps) -> None:
        self._steps = steps
        self._latest: nn.Parameter | None = None
        self._handles: list[tuple[nn.Parameter, Any]] = [
            (p, p.register_post_accumulate_grad_hook(self._seen))  # type: ignore[no-untyped-call]
            for p in parameters
            if p.requires_grad
        ]
        self._narrowed = False

    def _seen(self, parameter: nn.Parameter) -> None:
        self._latest = parameter
        self._steps.gradients_ready()

    def narrow(self) -> None:
        if self._narrowed:
            return
        self._narrowed = True
        for parameter, handle in self._handles:
            if parameter is not self._latest:
                handle.remove()
