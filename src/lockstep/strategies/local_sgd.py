"""The strategies `local-sgd` and `diloco`: ranks that train by themselves and meet every N steps. Both compute
something else than one process would.

**Gradients.** In a full batch a rank's gradient is the mean over its own samples. In the last, partial batch shares may
differ, and a rank may have none; there every sample keeps the weight that it has elsewhere in that batch (ranks / global
count), so that a rank with fewer samples has a smaller gradient, and one without any a gradient of zero.

**Averages** are therefore plain means over ranks: the samples have had their weight already. So one step of SGD between
averages gives exactly what ddp gives, partial batches included. Weighting by samples once more would count them twice.

**A round ends** after `every` steps, and whenever there must be one model: at an evaluation and at the end. Training goes on from
that average. A checkpoint within a round keeps each rank's weights (training/resuming.py), so that a run that is resumed goes on as
one that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lockstep.placement import Placement
from lockstep.strategies.base import Strategy
from lockstep.strategies.flat import Bucket, Memory, by_type, copy, start_together, trained
from lockstep.torch_private import foreach_div_


class LocalSgd(Strategy):
    """Average the weights at the end of each round."""

    ranks_differ = True
    works_with_zero = False

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        super().__init__(model, placement, device)
        self.gradient_scale = float(placement.ranks)
        self._ranks, self._settings = placement.ranks, placement.local_sgd
        self._steps = self._since = 0
        if self._ranks == 1:
            return
        start_together(model)
        self._parameters = by_type(trained(model))
        self._rows = [Memory(group, device) for group in self._parameters]
        floating = [buffer for buffer in model.buffers() if buffer.is_floating_point() or buffer.is_complex()]
        self._statistics = [(group, Memory(group, device)) for group in by_type(floating)]
        self._counters = [
            buffer for buffer in model.buffers() if not (buffer.is_floating_point() or buffer.is_complex())
        ]
        self._buckets = [Bucket(group, device, None) for group in self._parameters] if self._warms_up() else []

    @classmethod
    def whole_steps(cls, placement: Placement) -> int:
        return placement.local_sgd.every if placement.ranks > 1 else 1

    def exchange(self) -> None:
        """While warming up, exchange gradients as ddp does; after that, nothing."""
        if not self._warms_up():
            return
        for bucket in self._buckets:
            bucket.exchange()
        for parameters in self._parameters:
            given = [parameter.grad for parameter in parameters if parameter.grad is not None]
            foreach_div_(given, float(self._ranks))

    def after_step(self, number: int) -> None:
        exchanged, self._steps = self._warms_up(), number
        if self._ranks == 1:
            return
        if exchanged:  # the ranks have one model
            if not self._warms_up():
                self._start_alone()
                self._round_begins()
            return
        self._since += 1
        if self._since >= self._settings.every:
            self.consolidate()

    @torch.no_grad()
    def consolidate(self) -> None:
        """End the round: all ranks have one model. Nothing is sent where they have it already."""
        if self._since == 0:
            return
        self._since = 0
        for parameters, memory in zip(self._parameters, self._rows, strict=True):
            self._mean(parameters, memory)
        self._outer_step()
        for parameters, memory in zip(self._parameters, self._rows, strict=True):
            copy(parameters, memory.views)
        for buffers, memory in self._statistics:
            self._mean(buffers, memory)
            copy(buffers, memory.views)
        for counter in self._counters:
            dist.broadcast(counter, 0)

    def kept_bytes(self) -> int:
        if self._ranks == 1:
            return 0
        memories = [*self._rows, *(memory for _, memory in self._statistics)]
        return sum(memory.row.nbytes for memory in memories) + sum(bucket.kept_bytes for bucket in self._buckets)

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint needs beside weights and optimizer; the same on all ranks."""
        return {"steps": torch.tensor(self._steps), "since": torch.tensor(self._since)}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        if "steps" not in state:  # another strategy's
            return
        self._steps = int(state["steps"])
        self._since = int(state["since"]) if "since" in state else 0  # version 0.1 ended the round
        if self._ranks > 1 and not self._warms_up():
            self._start_alone()

    def _warms_up(self) -> bool:
        return self._steps < self._settings.warm_start

    def _start_alone(self) -> None:
        """From here on ranks keep their gradients to themselves."""
        self._buckets = []

    def _mean(self, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
        """The mean over ranks, left in the memory."""
        copy(memory.views, tensors)
        dist.all_reduce(memory.row)
        memory.row.div_(self._ranks)

    def _round_begins(self) -> None:
        """The first one, from weights that are the same on all ranks."""

    def _outer_step(self) -> None:
        """What becomes of the average before ranks go on from it: here, nothing."""


class DiLoCo(LocalSgd):
    """What the ranks learnt in a round is one gradient for an outer SGD with Nesterov's momentum (DiLoCo, 2023).

    With `outer_lr=1` and `outer_momentum=0` the outer step goes to the average itself: local-sgd.
    """

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        super().__init__(model, placement, device)
        if self._ranks == 1:
            return
        self._anchors = [Memory(group, device) for group in self._parameters]
        self._momenta = [Memory(group, device) for group in self._parameters]
        self._round_begins()

    def kept_bytes(self) -> int:
        outer = [] if self._ranks == 1 else [*self._anchors, *self._momenta]
        return super().kept_bytes() + sum(memory.row.nbytes for memory in outer)

    def state(self) -> dict[str, torch.Tensor]:
        kept = super().state()
        if self._ranks == 1:
            return kept
        for name, memories in (("momentum", self._momenta), ("anchor", self._anchors)):
            views = [view for memory in memories for view in memory.views]
            kept |= {f"{name}.{index}": view for index, view in enumerate(views)}
        return kept

    @torch.no_grad()
    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        super().load_state(state)
        if self._ranks == 1:
            return
        for index, view in enumerate(view for memory in self._momenta for view in memory.views):
            view.copy_(state.get(f"momentum.{index}", torch.zeros(())))  # one rank keeps none
        # One rank and local-sgd keep no anchor. Then it stays where it was made: at the weights that all ranks started from,
        # which within a round are the mean of theirs. By now each rank has its own.
        if "anchor.0" not in state:
            return
        for index, view in enumerate(view for memory in self._anchors for view in memory.views):
            view.copy_(state[f"anchor.{index}"])

    @torch.no_grad()
    def _round_begins(self) -> None:
        """It is measured from the weights of now."""
        for parameters, anchor in zip(self._parameters, self._anchors, strict=True):
            copy(anchor.views, parameters)

    def _outer_step(self) -> None:
        lr, momentum = self._settings.outer_lr, self._settings.outer_momentum
        for memory, anchor, speed in zip(self._rows, self._anchors, self._momenta, strict=True):
            learnt = anchor.row - memory.row  # points uphill, as a gradient does
            speed.row.mul_(momentum).add_(learnt)
            anchor.row.sub_(learnt.add_(speed.row, alpha=momentum), alpha=lr)
            memory.row.copy_(anchor.row)
