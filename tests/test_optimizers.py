"""Our optimizers against `torch.optim`, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lockstep.recipe import Optimizer as Settings
from lockstep.training import optimizers

CASES = [
    (Settings(name="adam", lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01, fused=True)),
    (
        Settings(name="adam", lr=0.003, weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6),
        lambda p: torch.optim.Adam(p, lr=0.003, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, fused=True),
    ),
    (Settings(name="sgd", lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, fused=True)),
    (
        Settings(name="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    ),
]


@pytest.mark.parametrize(("settings", "reference"), CASES)
def test_same_bits_as_torch_optim(settings: Settings, reference: object) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    theirs = copy.deepcopy(ours)
    mine = optimizers.build(settings, ours.parameters())
    stock = reference(theirs.parameters())  # type: ignore[operator]
    for step in range(5):
        images = torch.randn(3, 1, 8, 8)
        for model in (ours, theirs):
            model.zero_grad()
            model(images).square().sum().backward()
            if step == 2:  # a parameter that took no part in this step
                model[0].bias.grad = None
        mine.step()
        stock.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)


def test_frozen_parameters_stay() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert optimizers.build(Settings(), model.parameters()).parameters == [model.weight]
