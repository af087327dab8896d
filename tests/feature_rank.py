"""What a rank of test_model_features.py computes with a net of feature_nets.py, and the same in one process, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import feature_nets
from lockstep import strategies
from lockstep.errors import InputError
from lockstep.models import layers
from lockstep.models.output import only_scores
from lockstep.placement import Ddp, Placement
from lockstep.training.trial import dense
from lockstep.training.truth import in_double

STEPS, BATCH = 3, 8


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model: nn.Module = getattr(feature_nets, name)()
    layers.prepare(model)
    model.register_forward_hook(only_scores)
    return model


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Their brightness differs, so that ranks take different branches."""
    generator = torch.Generator().manual_seed(step)
    images = torch.rand(BATCH, 1, 28, 28, generator=generator) - torch.linspace(0.1, 0.9, BATCH).view(-1, 1, 1, 1)
    return images, torch.randint(0, 10, (BATCH,), generator=generator)


def backward(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, weight: float) -> None:
    kind = next(model.parameters()).dtype
    scores = model(images.double() if kind in (torch.float64, torch.complex128) else images)
    (functional.cross_entropy(scores, labels, reduction="sum") * weight).backward()  # type: ignore[no-untyped-call]


def gradients(rank: int, ranks: int, name: str, strategy: str, find: bool, sparse: list[str]) -> Any:
    """The exchanged gradients of each step; weights are not updated."""
    model = build(name)
    for parameter in sparse:
        model.get_parameter(parameter).register_post_accumulate_grad_hook(dense)  # type: ignore[no-untyped-call]
    placement = Placement(ranks=ranks, strategy=strategy, ddp=Ddp(find_unused_parameters=find))
    made = strategies.build(strategy, model, placement, torch.device("cpu"))
    found = []
    for step in range(STEPS):
        images, labels = (part[rank::ranks] for part in samples(step))
        backward(made.model, images, labels, made.gradient_scale / BATCH)
        made.exchange()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    made.consolidate()
    return found


def truth(name: str) -> list[list[torch.Tensor | None]]:
    model = in_double(build(name))
    found = []
    for step in range(STEPS):
        backward(model, *samples(step), 1 / BATCH)
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append([None if g is None else g.to_dense() if g.is_sparse else g.clone() for g in gradients])
        model.zero_grad()
    return found


def different_layers(rank: int, ranks: int, ddp: bool) -> str:
    """Each rank calls another of two layers of one size: what fsdp says before an evaluation, and ddp."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers[rank % 2](x)

    strategy = "ddp" if ddp else "fsdp"
    made = strategies.build(strategy, Apart(), Placement(ranks=ranks, strategy=strategy), torch.device("cpu"))
    made.model(torch.ones(2, 4)).sum().backward()
    made.exchange()
    try:
        made.consolidate()
    except InputError as error:
        return str(error)
    return ""


def left_out_at_the_end(rank: int, ranks: int) -> str:
    """What ddp says when the very last step has left out a parameter that those before used."""
    model = feature_nets.Steps(together=True)
    made = strategies.build("ddp", model, Placement(ranks=ranks, strategy="ddp"), torch.device("cpu"))
    for step in range(2):
        backward(made.model, *samples(step), 1.0)
        try:
            made.consolidate()
        except InputError as error:
            return f"step {step}: {error}"
    return ""
