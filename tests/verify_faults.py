"""Faults for `lockstep verify` to find, each a strategy of a user's own: `strategy=tests/verify_faults.py:no_exchange_from_13`.

A strategy's file is loaded in every rank, so it can break anything there, from outside. The name says which fault, and from which
step on (0 if unstated).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep.data import batches
from lockstep.models import batch_norm, layers
from lockstep.strategies import Strategy
from lockstep.training import evaluate, loop, optimizers, recipe_step, schedule, step


class Plain(Strategy):
    """A right strategy: every gradient is added up over the ranks."""

    _start = 0
    """From which step on it is wrong."""

    def __init__(self, model: Any, placement: Any, device: Any) -> None:
        super().__init__(model, placement, device)
        self.taken = 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.before: list[torch.Tensor] | None = None
        self._breakage()

    def after_step(self, number: int) -> None:
        if self._broken():
            self._late()
        self.taken = number

    def _broken(self) -> bool:
        return self.taken >= self._start

    def exchange(self) -> None:
        if self._broken():
            self._fault()
        else:
            self._add_up(self.parameters)

    def _add_up(self, parameters: list[Any]) -> None:
        for parameter in parameters:
            dist.all_reduce(parameter.grad)

    def _breakage(self) -> None:
        """Once, before the training step is made."""

    def _fault(self) -> None:
        """Instead of the exchange."""
        self._add_up(self.parameters)

    def _late(self) -> None:
        """After the optimizer."""


class sum_for_mean(Plain):
    def _fault(self) -> None:
        super()._fault()
        torch._foreach_mul_([p.grad for p in self.parameters], float(self.world))


class divided_twice(Plain):
    def _fault(self) -> None:
        super()._fault()
        torch._foreach_div_([p.grad for p in self.parameters], float(self.world))


class no_exchange(Plain):
    def _fault(self) -> None:
        torch._foreach_mul_([p.grad for p in self.parameters], float(self.world))


class skipped_every_25th(Plain):
    def _fault(self) -> None:
        if (self.taken + 1) % 25:
            super()._fault()


class first_left_out(Plain):
    def _fault(self) -> None:
        self._add_up(self.parameters[1:])


class last_left_out(Plain):
    def _fault(self) -> None:
        self._add_up(self.parameters[:-1])


class Compressed(Plain):
    _kind = torch.float16

    def _fault(self) -> None:
        for parameter in self.parameters:
            parameter.grad.copy_(parameter.grad.to(self._kind))
        super()._fault()


class fp16_exchange(Compressed):
    pass


class bf16_exchange(Compressed):
    _kind = torch.bfloat16


class one_rank_one_per_cent(Plain):
    def _fault(self) -> None:
        super()._fault()
        torch._foreach_mul_([p.grad for p in self.parameters], 1 + 0.01 * (self.rank == 1))


class two_per_mille(Plain):
    def _fault(self) -> None:
        super()._fault()
        torch._foreach_mul_([p.grad for p in self.parameters], 1.002)


class one_share_two_per_mille(Plain):
    """One rank's samples weigh a little more; the ranks agree."""

    def _fault(self) -> None:
        torch._foreach_mul_([p.grad for p in self.parameters], 1 + 0.002 * (self.rank == 1))
        super()._fault()


class stale(Plain):
    """The optimizer is given the gradient of the step before."""

    def exchange(self) -> None:
        self._add_up(self.parameters)
        now = [p.grad.clone() for p in self.parameters]
        if self.before is not None and self._broken():
            for parameter, gradient in zip(self.parameters, self.before, strict=True):
                parameter.grad.copy_(gradient)
        self.before = now


class nan_in_the_last(Plain):
    def _fault(self) -> None:
        super()._fault()
        self.parameters[-1].grad.view(-1)[-1] = float("nan")


class one_entry(Plain):
    """One entry of one tensor is 1 % too large."""

    def _fault(self) -> None:
        super()._fault()
        entries = self.parameters[0].grad.view(-1)
        entries[entries.abs().argmax()] *= 1.01


class mean_of_means(Plain):
    """Every rank divides by its own count: wrong where shares differ, so in the partial batch alone."""

    def _breakage(self) -> None:
        whole = step.Steps.weight

        def weight(steps: Any, count: int) -> Any:
            return whole(steps, steps._open.samples * self.world if count and self._broken() else count)

        step.Steps.weight = weight  # type: ignore[method-assign]


class lr_off(Plain):
    """Seen in the optimizer's own number."""

    def _breakage(self) -> None:
        set_ = schedule.Pace.set

        def pace(self_: Any, number: int) -> None:
            set_(self_, number)
            self_._optimizer.lr = self_._plan.lr * (1.05 if self._broken() else 1.0)

        schedule.Pace.set = pace  # type: ignore[method-assign]


class Stepping(Plain):
    """Something inside the optimizer's step."""

    def _breakage(self) -> None:
        for kind in (optimizers.Adam, optimizers.Sgd):
            kind.step = self._around(kind.step)  # type: ignore[method-assign]

    def _around(self, inner: Any) -> Any:
        def stepped(optimizer: Any) -> None:
            if self._broken():
                self._inside(optimizer, inner)
            else:
                inner(optimizer)

        return stepped

    def _inside(self, optimizer: Any, inner: Any) -> None: ...


class lr_off_unseen(Stepping):
    _factor = 1.05

    def _inside(self, optimizer: Any, inner: Any) -> None:
        lr = optimizer.lr
        optimizer.lr = lr * self._factor
        inner(optimizer)
        optimizer.lr = lr


class lr_off_two_per_mille(lr_off_unseen):
    _factor = 1.002


class momentum_off(Stepping):
    def _inside(self, optimizer: Any, inner: Any) -> None:
        kept = optimizer.momentum
        optimizer.momentum = kept * 0.99
        inner(optimizer)
        optimizer.momentum = kept


class state_forgotten(Stepping):
    def _inside(self, optimizer: Any, inner: Any) -> None:
        inner(optimizer)
        for tensors in optimizer.state().values():
            for tensor in tensors:
                if tensor.dim():
                    tensor.zero_()


class update_lost(Stepping):
    """The last parameter does not move."""

    def _inside(self, optimizer: Any, inner: Any) -> None:
        kept = self.parameters[-1].detach().clone()
        inner(optimizer)
        self.parameters[-1].data.copy_(kept)


class schedule_one_step_late(Plain):
    def _breakage(self) -> None:
        set_ = schedule.Pace.set
        schedule.Pace.set = lambda pace, number: set_(pace, max(0, number - self._broken()))  # type: ignore[method-assign]


class clip_by_divided_norm(Plain):
    def _breakage(self) -> None:
        clip = recipe_step.clip
        recipe_step.clip = lambda found, longest, whole=None: clip(
            found, longest * (self.world if self._broken() else 1), whole
        )


class l2_per_rank(Plain):
    def _breakage(self) -> None:
        penalize = recipe_step.penalize

        def often(parameters: Any, regularize: Any) -> None:
            parameters = list(parameters)
            for _ in range(self.world if self._broken() else 1):
                penalize(parameters, regularize)

        recipe_step.penalize = often


class Twice(Plain):
    """Evaluation takes some samples twice, and some not at all: the count is right."""

    _count = 1

    def _breakage(self) -> None:
        whole = loop.evaluate

        def shifted(model: Any, batches: Any, samples: int, mine: tuple[int, int], *more: Any) -> Any:
            moved = self._count if mine[0] else 0
            return whole(model, batches, samples, (mine[0] - moved, mine[1] - moved), *more)

        loop.evaluate = shifted


class evaluation_1_twice(Twice):
    pass


class evaluation_10_twice(Twice):
    _count = 10


class evaluation_100_twice(Twice):
    _count = 100


class evaluation_hits_off(Plain):
    """One hit more than there were, by the last addition."""

    def _breakage(self) -> None:
        reduce_sum = evaluate.reduce_sum
        evaluate.reduce_sum = lambda values: [v + (n == 1) for n, v in enumerate(reduce_sum(values))]


class Batch(Plain):
    def _breakage(self) -> None:
        inner = batches.Batches.train_batch

        def train_batch(found: Any, low: int, high: int) -> Any:
            if self._broken() and self.rank == 1 and high - low > 1:
                return self._changed(inner, found, low, high)
            return inner(found, low, high)

        batches.Batches.train_batch = train_batch  # type: ignore[method-assign]

    def _changed(self, inner: Any, found: Any, low: int, high: int) -> Any: ...


class sample_of_another_rank(Batch):
    def _changed(self, inner: Any, found: Any, low: int, high: int) -> Any:
        return inner(found, low - 1, high - 1)


class sample_twice(Batch):
    def _changed(self, inner: Any, found: Any, low: int, high: int) -> Any:
        batch = inner(found, low, high)
        batch.images[-1], batch.labels[-1] = batch.images[0], batch.labels[0]
        return batch


class wrong_label(Batch):
    def _changed(self, inner: Any, found: Any, low: int, high: int) -> Any:
        batch = inner(found, low, high)
        return batch._replace(labels=torch.cat(((batch.labels[:1] + 1) % 10, batch.labels[1:])))


class images_scaled(Batch):
    def _changed(self, inner: Any, found: Any, low: int, high: int) -> Any:
        batch = inner(found, low, high)
        return batch._replace(images=batch.images * 1.002)


class seed_of_rank(Plain):
    """The order of samples is drawn from a seed of each rank's own."""

    def _breakage(self) -> None:
        import msgspec

        inner = loop.sample_order

        def order(recipe: Any, epoch: int, count: int) -> Any:
            own = msgspec.structs.replace(recipe, seed=recipe.seed + self.rank)
            return inner(own if epoch > self._start else recipe, epoch, count)

        loop.sample_order = order


class masks_of_rank(Plain):
    """Dropout masks depend on the rank."""

    def _breakage(self) -> None:
        bind = layers.bind

        def bound(keys: Any, real: int | None) -> None:
            bind(keys if keys is None or not self._broken() else keys + self.rank, real)

        layers.bind = bound


class norm_of_rank(Plain):
    """Batch norm's statistics are of each rank's own samples."""

    def _breakage(self) -> None:
        batch_norm.world_size = lambda: 1


class drifts_between_steps(Plain):
    """Weights change after the step, on all ranks alike, by a thousandth of themselves."""

    def _late(self) -> None:
        self.parameters[0].data.mul_(1.001)


class evaluation_disturbs(Plain):
    def consolidate(self) -> None:
        self.parameters[0].data.mul_(1.001)


def __getattr__(name: str) -> Any:
    """`fault_from_13`: the fault of that name, from step 13 on."""
    base, sign, start = name.rpartition("_from_")
    if not sign or not start.isdigit() or base not in globals():
        raise AttributeError(name)
    kind = globals()[base]
    return type(name, (kind,), {"_start": int(start)})
