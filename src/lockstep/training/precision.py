"""Number formats: mixed precision by autocast, the loss scale of fp16, pure 16-bit training, and what each one loses.

In 16 bits three things go wrong, and a run in such a format counts all three: *overflow* (a gradient beyond the largest
number becomes infinite), *underflow* (one below the smallest becomes zero) and *lost updates* (a weight plus a change that is
smaller than half its last digit is the same weight). Mixed precision keeps fp32 weights, so it has none of the third; a
loss scale moves fp16's gradients away from the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.data.inputs import Inputs
from lockstep.errors import InputError
from lockstep.models.calling import cast, number_type
from lockstep.recipe import Recipe
from lockstep.torch_private import amp_unscale_, amp_update_scale_

# GradScaler's own: start high, halve at every overflow, double after N steps without one.
FIRST_SCALE, GROWTH, BACKOFF, GROWTH_STEPS = 65536.0, 2.0, 0.5, 2000
LOOK_EVERY_STEPS = 50

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """What the step and the evaluation do differently in a recipe's number format."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.name = recipe.precision
        self._pure = self.name.startswith("pure-")
        self._type = _TYPES.get(self.name.removeprefix("pure-"))
        self._device = device
        self._model_type = self._type if self._pure and self._type else torch.float32
        self.scale = LossScale(device) if self.name == "fp16" else None
        self.watch = NumberWatch(self._type) if self._type else None

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model in its number format. One that computes in float64 keeps that, and gets its inputs in float64."""
        if self._type is not None:
            self._check(model)
        model = model.to(self._type) if self._pure else model
        self._model_type = number_type(model)
        return model

    def _check(self, model: nn.Module) -> None:
        """Autocast would pass over these weights, and a conversion would lose their imaginary part, both without a word."""
        wide = (torch.float64, torch.complex64, torch.complex128)
        for name, parameter in model.named_parameters():
            if parameter.dtype in wide:
                kind = str(parameter.dtype).removeprefix("torch.")
                raise InputError(
                    f"precision={self.name}: {name} is {kind}, which has no 16-bit form: choose precision=fp32, which leaves it as it is"
                )

    def images(self, images: Inputs) -> Inputs:
        """A model's inputs in the format that its weights have."""
        return cast(images, self._model_type)

    def context(self) -> AbstractContextManager[Any]:
        """Around forward and loss."""
        if self._type is None or self._pure:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._type)

    def scores(self, scores: Any) -> Any:
        """The loss itself is always computed in fp32: a sum over a batch is the first thing to leave fp16's range."""
        return scores if self._type is None else _floats(scores)

    def summary(self) -> dict[str, Any] | None:
        """What the format has lost, and fp16's loss scale; None in fp32."""
        if self.watch is None:
            return None
        scale = self.scale
        return self.watch.summary() | (
            {"skipped_steps": scale.skipped, "loss_scale": float(scale.value)} if scale else {}
        )


def _floats(output: Any) -> Any:
    """A model's output, whatever it is made of, in fp32."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.is_floating_point() else output
    if isinstance(output, dict):
        return {key: _floats(value) for key, value in output.items()}
    return type(output)(map(_floats, output)) if type(output) in (tuple, list) else output


class LossScale:
    """Multiplies the loss so that small gradients stay in fp16's range; the same rule and kernels as GradScaler's.

    It looks at the exchanged gradients, which are the same on every rank, so all ranks decide alike.
    """

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.full((), FIRST_SCALE, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._found = torch.zeros((), device=device)
        self.skipped = 0

    @property
    def value(self) -> torch.Tensor:
        return self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale

    @torch.no_grad()
    def unscale(self, gradients: list[torch.Tensor]) -> bool:
        """Divide by the scale. False if a gradient is not finite: the step must not be taken."""
        self._found.zero_()
        amp_unscale_(gradients, self._found, self._scale.reciprocal())
        finite = self._found.item() == 0
        amp_update_scale_(self._scale, self._good_steps, self._found, GROWTH, BACKOFF, GROWTH_STEPS)
        self.skipped += not finite
        return finite

    def state(self) -> dict[str, torch.Tensor]:
        return {"scale": self._scale, "good_steps": self._good_steps, "skipped": torch.tensor(self.skipped)}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self._scale.copy_(state["scale"])
        self._good_steps.copy_(state["good_steps"])
        self.skipped = int(state["skipped"])


class NumberWatch:
    """Looks at the numbers of every 50th step: what left the format's range, and which updates did nothing."""

    def __init__(self, kind: torch.dtype) -> None:
        self._smallest = torch.finfo(kind).smallest_normal
        self.looks = self.entries = self.zero = self.subnormal = self.not_finite = self.moved = self.lost = 0
        self._before: list[torch.Tensor] | None = None

    def due(self, step: int) -> bool:
        return step % LOOK_EVERY_STEPS == 0

    @torch.no_grad()
    def before(self, parameters: Sequence[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Of the gradients as backward left them, times the loss scale if there is one."""
        self.looks += 1
        for gradient in gradients:
            size = gradient.float().abs()
            self.entries += size.numel()
            self.zero += int((size == 0).sum())
            self.subnormal += int(((size > 0) & (size < self._smallest)).sum())
            self.not_finite += int((~torch.isfinite(size)).sum())
        self._before = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def after(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        assert self._before is not None
        for old, new, gradient in zip(self._before, parameters, gradients, strict=True):
            if gradient is not None:
                should = gradient != 0
                self.moved += int(should.sum())
                self.lost += int((should & (old == new)).sum())
        self._before = None

    def summary(self) -> dict[str, Any]:
        share = 1 / max(1, self.entries)
        return {
            "looks": self.looks,
            "gradient_zero_share": self.zero * share,
            "gradient_subnormal_share": self.subnormal * share,
            "gradient_not_finite_share": self.not_finite * share,
            "lost_update_share": self.lost / max(1, self.moved),
        }
