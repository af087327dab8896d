"""Optimizers by the recipe's name, on PyTorch's own fused kernels, on CPU too.

The arithmetic is PyTorch's: the same fused kernels that `torch.optim` calls. What is left out is the class around them,
which costs 1.4 s at start (it imports the compiler) and more than half of a small model's update (90 µs instead of
200 µs in a step of the MNIST net, measured). Tests hold the results bit for bit against `torch.optim`.

The fused kernels know real, dense numbers. Complex weights are updated as pairs of real ones, which is what `torch.optim` does with
them, and a sparse gradient is made dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from lockstep.recipe import Optimizer as Settings
from lockstep.strategies.optimizer import WHICH, Optimizer, State
from lockstep.torch_private import (
    foreach_add,
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
)


class Adam(Optimizer):
    """Adam with coupled weight decay (added to the gradient), and AdamW, whose decay is decoupled (taken off the weight)."""

    def __init__(self, parameters: list[nn.Parameter], settings: Settings) -> None:
        self.parameters, self.lr, self.momentum, self._settings = parameters, settings.lr, settings.beta1, settings
        self._update = fused_adamw_ if settings.name == "adamw" else fused_adam_
        self._exp_avg = [torch.zeros_like(p) for p in _reals(parameters)]
        self._exp_avg_sq = [torch.zeros_like(p) for p in _reals(parameters)]
        # One tensor that holds all counts: adding to single numbers, one by one, takes longer than the update of a small net.
        self._counts = torch.zeros(len(parameters), device=parameters[0].device if parameters else None)
        self._steps = list(self._counts.unbind())

    @torch.no_grad()
    def step(self) -> None:
        gradients, which = _gradients(self.parameters)
        kept = (_reals(self.parameters), self._exp_avg, self._exp_avg_sq, self._steps)
        parameters, exp_avg, exp_avg_sq, steps = (_chosen(values, which) for values in kept)
        settings = self._settings
        if which is None:
            self._counts.add_(1)
        else:
            foreach_add_(steps, 1)
        self._update(
            parameters,
            gradients,
            exp_avg,
            exp_avg_sq,
            [],
            steps,
            lr=self.lr,
            beta1=self.momentum,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
        )

    def state(self) -> State:
        return {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq, "steps": self._steps}


class Rmsprop(Optimizer):
    """RMSprop as PyTorch has it, in the same order of operations; there is no fused kernel for it."""

    def __init__(self, parameters: list[nn.Parameter], settings: Settings) -> None:
        self.parameters, self.lr, self.momentum, self._settings = parameters, settings.lr, settings.momentum, settings
        self._square_avg = [torch.zeros_like(p) for p in _reals(parameters)]
        self._momentum_buffer = [torch.zeros_like(p) for p in _reals(parameters)] if settings.momentum > 0 else []

    @torch.no_grad()
    def step(self) -> None:
        gradients, which = _gradients(self.parameters)
        kept = (_reals(self.parameters), self._square_avg, self._momentum_buffer)
        parameters, square_avg, momentum_buffer = (_chosen(values, which) for values in kept)
        settings = self._settings
        if settings.weight_decay:
            gradients = list(foreach_add(gradients, parameters, alpha=settings.weight_decay))
        foreach_mul_(square_avg, settings.alpha)
        foreach_addcmul_(square_avg, gradients, gradients, value=1 - settings.alpha)
        roots = foreach_sqrt(square_avg)
        foreach_add_(roots, settings.eps)
        if momentum_buffer:
            foreach_mul_(momentum_buffer, self.momentum)
            foreach_addcdiv_(momentum_buffer, gradients, roots)
            foreach_add_(parameters, momentum_buffer, alpha=-self.lr)
        else:
            foreach_addcdiv_(parameters, gradients, roots, value=-self.lr)

    def state(self) -> State:
        return {"square_avg": self._square_avg, "momentum_buffer": self._momentum_buffer}


class Sgd(Optimizer):
    """Stochastic gradient descent with PyTorch's momentum and coupled weight decay."""

    def __init__(self, parameters: list[nn.Parameter], settings: Settings) -> None:
        self.parameters, self.lr, self.momentum, self._settings = parameters, settings.lr, settings.momentum, settings
        self._momentum_buffers: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        gradients, which = _gradients(self.parameters)
        chosen = list(range(len(self.parameters))) if which is None else which
        settings = self._settings
        # PyTorch starts a momentum buffer as a copy of the first gradient, so the first time is a call of its own.
        fresh = {i for i in chosen if settings.momentum > 0 and i not in self._momentum_buffers}
        for first in (True, False):
            group = [k for k, i in enumerate(chosen) if (i in fresh) == first]
            if group:
                self._update([chosen[k] for k in group], [gradients[k] for k in group], first)

    def state(self) -> State:
        order = sorted(self._momentum_buffers)
        return {WHICH: [torch.tensor(i) for i in order], "momentum_buffer": [self._momentum_buffers[i] for i in order]}

    def load_state(self, state: State) -> None:
        # The fused kernel walks through memory, so a buffer must lie as its weights do, however it was written down.
        like = _reals(self.parameters)
        kept = zip(state[WHICH], state["momentum_buffer"], strict=True)
        self._momentum_buffers = {
            int(i): torch.empty_like(like[int(i)], dtype=buffer.dtype).copy_(buffer) for i, buffer in kept
        }

    def _update(self, chosen: list[int], gradients: list[torch.Tensor], first: bool) -> None:
        settings = self._settings
        if first:
            self._momentum_buffers |= {i: torch.empty_like(g) for i, g in zip(chosen, gradients, strict=True)}
        parameters = _reals([self.parameters[i] for i in chosen])
        buffers = [self._momentum_buffers[i] for i in chosen] if settings.momentum > 0 else []
        if any(p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16) for p in parameters):
            self._update_plainly(parameters, gradients, buffers, first)
            return
        fused_sgd_(
            parameters,
            gradients,
            buffers,
            weight_decay=settings.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=settings.nesterov and settings.momentum > 0,
            maximize=False,
            is_first_step=first,
        )

    def _update_plainly(
        self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], buffers: list[torch.Tensor], first: bool
    ) -> None:
        """In 16 bits PyTorch's fused kernel for CPUs leaves every vector of 16 weights as it is (torch 2.13.0)."""
        settings = self._settings
        if settings.weight_decay:
            gradients = list(foreach_add(gradients, parameters, alpha=settings.weight_decay))
        if buffers:
            if first:
                foreach_copy_(buffers, gradients)
            else:
                foreach_mul_(buffers, self.momentum)
                foreach_add_(buffers, gradients)
            nesterov = settings.nesterov
            gradients = list(foreach_add(gradients, buffers, alpha=self.momentum)) if nesterov else buffers
        foreach_add_(parameters, gradients, alpha=-self.lr)


def _gradients(parameters: list[nn.Parameter]) -> tuple[list[torch.Tensor], list[int] | None]:
    """The gradients, and which parameters they belong to (None: all). One without a gradient is left alone."""
    found = [p.grad for p in parameters]
    present = [g for g in found if g is not None]
    which = None if len(present) == len(found) else [i for i, g in enumerate(found) if g is not None]
    return _reals([g.to_dense() if g.is_sparse else g for g in present]), which


def _chosen(values: list[torch.Tensor], which: list[int] | None) -> list[torch.Tensor]:
    """Those of the parameters that have a gradient. A list may be empty: RMSprop without momentum has no momentum buffers."""
    return values if which is None or not values else [values[i] for i in which]


def _reals(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Complex numbers as pairs of real ones, in the same memory."""
    return [torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor for tensor in tensors]


def make_dense(parameters: Iterable[nn.Parameter]) -> None:
    """For what looks at the gradients before the optimizer does: clipping, a penalty, a loss scale."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


_KINDS: dict[str, Callable[[list[nn.Parameter], Settings], Optimizer]] = {
    "adam": Adam,
    "adamw": Adam,
    "sgd": Sgd,
    "rmsprop": Rmsprop,
}


def build(settings: Settings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return _KINDS[settings.name]([p for p in parameters if p.requires_grad], settings)


@torch.no_grad()
def clip(
    gradients: list[torch.Tensor], longest: float, global_norm: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Scale the whole gradient down to the norm `longest` where it is longer; returns the norm that it had.

    `global_norm` makes the norm of all gradients from that of this rank's (`Strategy.global_norm`).
    """
    norm = global_norm(torch.linalg.vector_norm(torch.stack(foreach_norm(gradients))))
    foreach_mul_(gradients, (longest / (norm + 1e-6)).clamp(max=1.0))
    return norm
