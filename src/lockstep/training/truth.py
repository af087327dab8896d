"""The truth for `lockstep verify`: a step's gradient and an evaluation in float64, and what perturbations of rounding size do to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batches import Batch, Batches
from lockstep.data.inputs import Inputs, mapped
from lockstep.errors import RunFailed
from lockstep.models import layers
from lockstep.models.calling import call
from lockstep.models.output import scores_of
from lockstep.recipe import Recipe
from lockstep.task import IGNORED
from lockstep.training import measures
from lockstep.training.loss import Loss
from lockstep.training.precision import Precision

# How far the judge moves weights and images, in roundings of the recipe's number format: far enough to cross every kink (a ReLU, the
# choice of a max-pool) that float32 may fall on either side of.
PERTURBATION = 32 * 2.0**-24
UNIT_ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "pure-bf16": 2.0**-8, "pure-fp16": 2.0**-11}


@dataclass
class Pass:
    """One forward pass of a step: what it was given, and what the loss of its global batch is divided by."""

    batch: Batch
    real: int
    """How many of the samples count: 0 for the dummy of a rank without any."""
    count: float


@dataclass
class Gradient:
    """The gradient of the mean loss over a whole global batch."""

    names: list[str]
    passes: list[Pass]
    loss: Loss
    generator: Tensor
    """The state of torch's generator when the step began: what a model draws, it draws again."""

    def of(
        self, judge: nn.Module, noise: Callable[[Tensor], Tensor] = lambda images: images
    ) -> tuple[float, dict[str, Tensor]]:
        """The loss, and the gradient by parameter. `noise` changes the images."""
        parameters = [p for p in judge.parameters() if p.requires_grad]
        now = torch.get_rng_state()
        torch.set_rng_state(self.generator)
        total, sums = 0.0, [torch.zeros_like(p) for p in parameters]
        for each in self.passes:
            layers.bind(each.batch.keys, each.real)
            try:
                loss = self.loss(call(judge, _doubled(each.batch.images, noise)), each.batch) / (each.count or 1.0)
            except RuntimeError as error:
                text = str(error).partition("\n")[0]
                raise RunFailed(f"verify needs the model in float64, and there it fails: {text}") from None
            total += loss.item()
            for sum_, gradient in zip(sums, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                if gradient is not None:
                    sum_ += gradient
        torch.set_rng_state(now)
        return total, dict(zip(self.names, sums, strict=True))


def true_step(judge: nn.Module, gradient: Gradient, precision: str, step: int) -> dict[str, Any]:
    """Gradient and loss of a step by a model in float64, and how far four small moves of weights and images move them."""
    start = {name: tensor.clone() for name, tensor in judge.state_dict().items()}
    loss, truth = gradient.of(judge)
    moved: dict[str, Tensor] = {name: torch.zeros((), dtype=torch.float64) for name in truth}
    loss_moved = 0.0
    size = max(PERTURBATION, 2 * UNIT_ROUNDING[precision])
    for draw, sign in ((0, 1.0), (0, -1.0), (1, 1.0), (1, -1.0)):
        judge.load_state_dict(start)
        noise = Noise(sign * size, 2 * step + draw)
        with torch.no_grad():
            for parameter in judge.parameters():
                parameter.copy_(noise(parameter))
        other, near = gradient.of(judge, noise)
        loss_moved = max(loss_moved, abs(other - loss))
        for name in moved:
            moved[name] = torch.maximum(moved[name], (near[name] - truth[name]).norm())
    return {"gradient": truth, "moved": moved, "loss": loss, "loss_moved": loss_moved}


def in_double(model: nn.Module) -> nn.Module:
    """The model itself in float64. `Module.double` leaves complex weights as they are."""
    for tensor in (*model.double().parameters(), *model.buffers()):
        if tensor.is_complex():
            tensor.data = tensor.data.to(torch.complex128)
    return model


@torch.inference_mode()
def true_evaluation(
    model: nn.Module, test: Batches, samples: int, batch: int, precision: Precision, recipe: Recipe, loss_of: Loss
) -> dict[str, Any]:
    """The evaluation in float64, and of measures that count answers: in which share of them rounding may decide."""
    judge = in_double(copy.deepcopy(model)).eval()
    model.eval()
    loss, error = 0.0, 0.0
    judged = measures.summed(recipe)
    sums = {name: [0.0, 0.0] for name in judged}
    margins: dict[str, list[Tensor]] = {name: [] for name in judged if name in measures.COUNTED}
    for low in range(0, samples, batch):
        images, labels = test.take(low, min(low + batch, samples))
        truth = call(judge, _doubled(images))
        with precision.context():
            ours = precision.scores(call(model, precision.images(images)))
        loss += loss_of.plain(truth, labels).item()
        for name, of in judged.items():
            sums[name] = [before + float(now) for before, now in zip(sums[name], of(truth, labels), strict=True)]
        for name, found in margins.items():
            error = max(error, float((scores_of(ours).double() - scores_of(truth)).abs().max()))
            margin = _margins(scores_of(truth), recipe.loss, measures.COUNTED[name])
            found.append(margin if recipe.loss == "bce" else margin[labels.long().flatten() != IGNORED])
    model.train()
    mean = loss / (test.units(0, samples) or 1.0)
    exact = measures.derived(recipe, mean, {name: total / (count or 1.0) for name, (total, count) in sums.items()})
    unsure = {name: float((torch.cat(found) < 4 * error).double().mean()) for name, found in margins.items()}
    return {"true_loss": mean, "true_measures": exact, "unsure": unsure}


def _margins(scores: Tensor, loss: str, best: int) -> Tensor:
    """By how much each answer is one, and not another: the class that is just among the best, before the next one."""
    if loss == "bce":
        return scores.abs().flatten()
    classes = scores.flatten(0, -2) if loss == "next-token" else scores.movedim(1, -1).flatten(0, -2)
    if classes.shape[1] <= best:
        return torch.full((len(classes),), torch.inf)
    first = classes.topk(best + 1, 1).values
    return first[:, best - 1] - first[:, best]


def _doubled(inputs: Inputs, noise: Callable[[Tensor], Tensor] = lambda values: values) -> Inputs:
    return mapped(inputs, lambda one: noise(one.double()) if one.is_floating_point() else one)


class Noise:
    """Every entry of what it is given, times 1 ± `size` or so. Of two with opposite signs, one crosses what is within reach on either side."""

    def __init__(self, size: float, seed: int) -> None:
        self._size, self._generator = size, torch.Generator().manual_seed(seed)

    def __call__(self, values: Tensor) -> Tensor:
        noise = torch.randn(values.shape, generator=self._generator, dtype=torch.float64)
        return values * (1 + self._size * noise.to(values.device))
