"""Optimizers by the recipe's name, on PyTorch's own fused kernels, on CPU too.

The arithmetic is PyTorch's: the same fused kernels that `torch.optim` calls. What is left out is the class around them,
which costs 1.4 s at start (it imports the compiler) and more than half of a small model's update (90 µs instead of
200 µs in a step of the MNIST net, measured). Tests hold the results bit for bit against `torch.optim`.

The fused kernels know real, dense numbers. Complex weights are updated as pairs of real ones, which is what `torch.optim` does with
them, and a sparse gradient is made dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from lockstep.recipe import Optimizer as Settings


class Optimizer(Protocol):
    """What the training step needs."""

    parameters: list[nn.Parameter]
    lr: float
    inertia: float
    """Momentum, or Adam's beta1: what a schedule may move beside the learning rate."""

    def step(self) -> None: ...
    def state(self) -> dict[str, list[torch.Tensor]]:
        """What must be kept to go on where it was."""

    def load_state(self, state: dict[str, list[torch.Tensor]]) -> None: ...


class Adam:
    """Adam with coupled weight decay (added to the gradient), and AdamW, whose decay is decoupled (taken off the weight)."""

    def __init__(self, parameters: list[nn.Parameter], settings: Settings) -> None:
        self.parameters, self.lr, self.inertia, self._settings = parameters, settings.lr, settings.beta1, settings
        self._update = torch._fused_adamw_ if settings.name == "adamw" else torch._fused_adam_
        self._means = [torch.zeros_like(p) for p in _reals(parameters)]
        self._squares = [torch.zeros_like(p) for p in _reals(parameters)]
        self._steps = [torch.zeros((), device=p.device) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        gradients, given = _gradients(self.parameters)
        everything: list[list[torch.Tensor]] = [_reals(self.parameters), self._means, self._squares, self._steps]
        if given is not None:
            everything = [[values[i] for i in given] for values in everything]
        parameters, means, squares, steps = everything
        settings = self._settings
        torch._foreach_add_(steps, 1)
        self._update(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            lr=self.lr,
            beta1=self.inertia,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
        )

    def state(self) -> dict[str, list[torch.Tensor]]:
        return {"means": self._means, "squares": self._squares, "steps": self._steps}

    def load_state(self, state: dict[str, list[torch.Tensor]]) -> None:
        _copy_state(self.state(), state)


class Rmsprop:
    """RMSprop as PyTorch has it, in the same order of operations; there is no fused kernel for it."""

    def __init__(self, parameters: list[nn.Parameter], settings: Settings) -> None:
        self.parameters, self.lr, self.inertia, self._settings = parameters, settings.lr, settings.momentum, settings
        self._squares = [torch.zeros_like(p) for p in _reals(parameters)]
        self._speeds = [torch.zeros_like(p) for p in _reals(parameters)] if settings.momentum > 0 else []

    @torch.no_grad()
    def step(self) -> None:
        gradients, given = _gradients(self.parameters)
        everything: list[list[torch.Tensor]] = [_reals(self.parameters), self._squares, self._speeds]
        if given is not None:
            everything = [[values[i] for i in given] if values else [] for values in everything]
        parameters, squares, speeds = everything
        settings = self._settings
        if settings.weight_decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=settings.weight_decay))
        torch._foreach_mul_(squares, settings.alpha)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - settings.alpha)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, settings.eps)
        if speeds:
            torch._foreach_mul_(speeds, self.inertia)
            torch._foreach_addcdiv_(speeds, gradients, roots)
            torch._foreach_add_(parameters, speeds, alpha=-self.lr)
        else:
            torch._foreach_addcdiv_(parameters, gradients, roots, value=-self.lr)

    def state(self) -> dict[str, list[torch.Tensor]]:
        return {"squares": self._squares, "speeds": self._speeds}

    def load_state(self, state: dict[str, list[torch.Tensor]]) -> None:
        _copy_state(self.state(), state)


class Sgd:
    """Stochastic gradient descent with PyTorch's momentum and coupled weight decay."""

    def __init__(self, parameters: list[nn.Parameter], settings: Settings) -> None:
        self.parameters, self.lr, self.inertia, self._settings = parameters, settings.lr, settings.momentum, settings
        self._speeds: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        gradients, given = _gradients(self.parameters)
        chosen = list(range(len(self.parameters))) if given is None else given
        settings = self._settings
        # PyTorch starts a momentum buffer as a copy of the first gradient, so the first time is a call of its own.
        fresh = {i for i in chosen if settings.momentum > 0 and i not in self._speeds}
        for first in (True, False):
            group = [k for k, i in enumerate(chosen) if (i in fresh) == first]
            if group:
                self._update([chosen[k] for k in group], [gradients[k] for k in group], first)

    def state(self) -> dict[str, list[torch.Tensor]]:
        order = sorted(self._speeds)
        return {"which": [torch.tensor(i) for i in order], "speeds": [self._speeds[i] for i in order]}

    def load_state(self, state: dict[str, list[torch.Tensor]]) -> None:
        # The fused kernel walks through memory, so a buffer must lie as its weights do, however it was written down.
        like = _reals(self.parameters)
        kept = zip(state["which"], state["speeds"], strict=True)
        self._speeds = {int(i): torch.empty_like(like[int(i)], dtype=speed.dtype).copy_(speed) for i, speed in kept}

    def _update(self, chosen: list[int], gradients: list[torch.Tensor], first: bool) -> None:
        settings = self._settings
        if first:
            self._speeds |= {i: torch.empty_like(g) for i, g in zip(chosen, gradients, strict=True)}
        parameters = _reals([self.parameters[i] for i in chosen])
        speeds = [self._speeds[i] for i in chosen] if settings.momentum > 0 else []
        if any(p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16) for p in parameters):
            self._update_plainly(parameters, gradients, speeds, first)
            return
        torch._fused_sgd_(
            parameters,
            gradients,
            speeds,
            weight_decay=settings.weight_decay,
            momentum=self.inertia,
            lr=self.lr,
            dampening=0.0,
            nesterov=settings.nesterov and settings.momentum > 0,
            maximize=False,
            is_first_step=first,
        )

    def _update_plainly(
        self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], speeds: list[torch.Tensor], first: bool
    ) -> None:
        """In 16 bits PyTorch's fused kernel for CPUs leaves every vector of 16 weights as it is (torch 2.13.0)."""
        settings = self._settings
        if settings.weight_decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=settings.weight_decay))
        if speeds:
            if first:
                torch._foreach_copy_(speeds, gradients)
            else:
                torch._foreach_mul_(speeds, self.inertia)
                torch._foreach_add_(speeds, gradients)
            nesterov = settings.nesterov
            gradients = list(torch._foreach_add(gradients, speeds, alpha=self.inertia)) if nesterov else speeds
        torch._foreach_add_(parameters, gradients, alpha=-self.lr)


@torch.no_grad()
def _copy_state(mine: dict[str, list[torch.Tensor]], kept: dict[str, list[torch.Tensor]]) -> None:
    for name, tensors in mine.items():
        for tensor, value in zip(tensors, kept[name], strict=True):
            tensor.copy_(value)


def _gradients(parameters: list[nn.Parameter]) -> tuple[list[torch.Tensor], list[int] | None]:
    """The gradients, and which parameters they belong to (None: all). One without a gradient is left alone."""
    found = [p.grad for p in parameters]
    present = [g for g in found if g is not None]
    which = None if len(present) == len(found) else [i for i, g in enumerate(found) if g is not None]
    return _reals([g.to_dense() if g.is_sparse else g for g in present]), which


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
    gradients: list[torch.Tensor], longest: float, whole: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Scale the whole gradient down to the norm `longest` where it is longer; returns the norm that it had.

    `whole` makes the norm of all gradients from that of this rank's, where ranks have parts of them.
    """
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if whole is not None:
        norm = whole(norm)
    torch._foreach_mul_(gradients, (longest / (norm + 1e-6)).clamp(max=1.0))
    return norm
