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
    (
        Settings(name="adamw", lr=0.01, weight_decay=0.05),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.05, fused=True),
    ),
    (Settings(name="rmsprop", lr=0.01), lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True)),
    (
        Settings(name="rmsprop", lr=0.01, alpha=0.9, eps=1e-6, momentum=0.8, weight_decay=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-6, momentum=0.8, weight_decay=0.01, foreach=True),
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


def test_coupled_and_decoupled_decay_are_different_things() -> None:
    """With a gradient of zero, AdamW shrinks the weight by lr x decay; Adam makes a full step of its own out of the decay."""
    found = {}
    for name in ("adam", "adamw"):
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.zeros(1)
        optimizers.build(Settings(name=name, lr=0.1, weight_decay=0.01), [weight]).step()  # type: ignore[arg-type]
        found[name] = weight.item()
    assert found["adamw"] == pytest.approx(1 - 0.1 * 0.01)
    assert found["adam"] == pytest.approx(1 - 0.1)


@pytest.mark.parametrize("longest", [0.5, 1e6])
def test_clip_equals_torch(longest: float) -> None:
    torch.manual_seed(1)
    ours = nn.Linear(7, 5)
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        model(torch.ones(3, 7)).square().sum().backward()
    norm = optimizers.clip([p.grad for p in ours.parameters() if p.grad is not None], longest, lambda norm: norm)
    reference = nn.utils.clip_grad_norm_(theirs.parameters(), longest)
    assert torch.allclose(norm, reference)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "rmsprop"])
def test_state_goes_on_where_it_was(name: str) -> None:
    settings = Settings(name=name, lr=0.01, momentum=0.0 if name.startswith("adam") else 0.9)  # type: ignore[arg-type]
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 3))]
    first = optimizers.build(settings, weights)

    def step(optimizer: optimizers.Optimizer, number: int) -> None:
        for weight in optimizer.parameters:
            weight.grad = torch.full_like(weight, 0.1 * number)
        optimizer.step()

    step(first, 1)
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    second = optimizers.build(settings, copies)
    second.load_state(copy.deepcopy(first.state()))
    for number in (2, 3):
        step(first, number)
        step(second, number)
    assert all(torch.equal(a, b) for a, b in zip(weights, copies, strict=True))


class Unusual(nn.Module):
    """A complex weight, and an embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.spin = nn.Parameter(0.3 * torch.randn(6, 5, dtype=torch.complex64))
        self.words = nn.Embedding(20, 6, sparse=True)
        self.head = nn.Linear(5, 3)

    def forward(self, chosen: torch.Tensor) -> torch.Tensor:
        return self.head((self.words(chosen).to(torch.complex64) @ self.spin).abs())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("settings", "reference"), CASES)
def test_complex_weights_and_sparse_gradients_as_torch_optim_has_them(settings: Settings, reference: object) -> None:
    """torch's fused classes refuse both, so the plain ones are the reference, with the embedding's gradient made dense."""
    torch.manual_seed(0)
    ours = Unusual()
    theirs = copy.deepcopy(ours)
    theirs.words.sparse = False
    mine = optimizers.build(settings, ours.parameters())
    stock = reference(theirs.parameters())  # type: ignore[operator]
    kind, words = type(stock), {k: v for k, v in stock.defaults.items() if k not in ("fused", "foreach")}
    words.pop("decoupled_weight_decay", None)
    stock = kind(theirs.parameters(), **words, foreach=False)
    for _ in range(5):
        chosen = torch.randint(0, 20, (4,))
        for model in (ours, theirs):
            model.zero_grad()
            model(chosen).square().mean().backward()
        assert ours.words.weight.grad is not None
        assert ours.words.weight.grad.is_sparse
        mine.step()
        stock.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    again = optimizers.build(settings, copy.deepcopy(ours).parameters())
    again.load_state(mine.state())
    for name, tensors in mine.state().items():
        assert all(torch.equal(one, other) for one, other in zip(tensors, again.state()[name], strict=True)), name


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_moves_16_bit_weights(kind: torch.dtype, momentum: float) -> None:
    """PyTorch's fused kernel for CPUs does not: weights stayed what they were."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(100, dtype=kind)) for _ in range(2))
    settings = Settings(name="sgd", lr=0.1, momentum=momentum, nesterov=momentum > 0, weight_decay=0.01)
    mine = optimizers.build(settings, [ours])
    stock = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, nesterov=momentum > 0, weight_decay=0.01, foreach=True)
    for _ in range(3):
        ours.grad = torch.randn(100).to(kind)
        theirs.grad = ours.grad.clone()
        mine.step()
        stock.step()
    assert (ours != 1).sum() > 80
    assert torch.equal(ours, theirs)
