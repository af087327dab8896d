"""A chain computes, bit for bit, what its layers compute one by one; what it cannot do, it leaves to them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.kernels import chain, fuse, native
from lockstep.kernels.chain import Chain
from lockstep.kernels.module import FusedConvReLU
from lockstep.models.nets import cifar_vgg, mnist_convnet

if native.load() is None:
    pytest.skip("there is no C++ compiler", allow_module_level=True)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of ours everywhere, whatever is faster here: with times that say so."""
    from lockstep.kernels import table
    from lockstep.kernels.table import Layer, Row
    from lockstep.kernels.way import possible

    def row(layer: Layer, isa: str, measure: Callable[[Layer], Row]) -> Row:
        ways = possible(layer.channels, layer.out_channels, layer.kernel, layer.padding, torch.float32)
        times = {way.name.lower(): 1.0 / (1 + way) for way in ways} | {"plain": 9.0}
        return Row(layer, times, dict(times) if layer.learns else {}, False)

    monkeypatch.setattr(table, "find", row)
    chain._plan.cache_clear()
    torch.manual_seed(3)


def deep() -> nn.Sequential:
    """Direct and Winograd kernels, with a pool and without, and more behind the linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(24, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 4 * 4, 12), nn.ReLU(), nn.Linear(12, 5),
    )  # fmt: skip


def bare() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.ReLU())


NETS = {"d": (mnist_convnet, (1, 28, 28)), "deep": (deep, (3, 16, 16)), "bare": (bare, (3, 9, 10))}


def apart(model: nn.Module) -> nn.Module:
    """The same fused layers, computed one by one."""
    other = copy.deepcopy(model)
    assert type(other) is Chain
    other.__class__ = nn.Sequential
    return other


def results(model: nn.Module, x: Tensor, grad_x: bool) -> list[Tensor]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_(grad_x)
    y = model(x)
    generator = torch.Generator().manual_seed(5)
    gradients = torch.autograd.grad(
        y, [*model.parameters(), *([x] if grad_x else [])], torch.randn(y.shape, generator=generator)
    )
    return [y.detach(), *gradients]


def used(model: nn.Module, x: Tensor) -> bool:
    """Whether it goes in one piece."""
    seen: list[str] = []
    y = model(x)
    queue = [y.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None:
            seen.append(node.name())
            queue += [child for child, _ in node.next_functions]
    return any("_ChainFunction" in name for name in seen)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("grad_x", [False, True])
def test_bits(name: str, order: torch.memory_format, grad_x: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's own linear layer; ours adds up in another order."""
    monkeypatch.setattr(chain, "MOST_PRODUCTS", 0)
    make, shape = NETS[name]
    model = fuse(make()).to(memory_format=order)  # type: ignore[call-overload]
    x = torch.randn(7, *shape).contiguous(memory_format=order)
    assert used(model, x)
    for found, right in zip(results(model, x, grad_x), results(apart(model), x, grad_x), strict=True):
        assert torch.equal(found, right)
        assert found.stride() == right.stride()
    with torch.no_grad():
        assert torch.equal(model(x), apart(model)(x))


@pytest.mark.parametrize("outputs", [1, 10, 13])
@pytest.mark.parametrize("size", [6, 9])
def test_a_small_linear_layer_against_float64(outputs: int, size: int) -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * size**2, outputs)
    )  # fmt: skip
    model, x = fuse(copy.deepcopy(net)), torch.randn(6, 1, size, size)
    assert used(model, x)
    assert chain._plan_for(x, model._known, _parameters(model)).small is not None  # type: ignore[union-attr,arg-type]
    for found, right in zip(results(model, x, True), results(net.double(), x.double(), True), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)
    # What is not finite goes where it goes in PyTorch.
    with torch.no_grad():
        model[-1].weight[0, 3] = float("inf")
        model[-1].bias[-1] = float("nan")
    for found, right in zip(results(model, x, True), results(apart(model), x, True), strict=True):
        torch.testing.assert_close(found, right, equal_nan=True, rtol=1e-4, atol=1e-5)


def _parameters(model: nn.Module) -> list[Tensor]:
    return [parameter for layer in model for parameter in layer.parameters()]  # type: ignore[attr-defined]


def test_larger_linear_layers_are_pytorchs() -> None:
    """Many rows, many outputs, images in channels-last order: the same bits as its layers."""
    for rows, outputs, order in (
        (4, 40, torch.contiguous_format),
        (700, 10, torch.contiguous_format),
        (4, 10, torch.channels_last),
    ):
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(400, outputs),
        )
        model = fuse(net).to(memory_format=order)
        x = torch.randn(rows, 2, 12, 12).contiguous(memory_format=order)
        assert used(model, x)
        for found, right in zip(results(model, x, True), results(apart(model), x, True), strict=True):
            assert torch.equal(found, right)


def test_against_pytorch() -> None:
    plain, x = mnist_convnet(), torch.randn(5, 1, 28, 28)
    model = fuse(copy.deepcopy(plain))
    for found, right in zip(results(model, x, True), results(plain, x, True), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_a_number_that_our_kernels_refuse() -> None:
    model, x = fuse(deep()), torch.randn(4, 3, 16, 16)
    x[1, 0, 0, 0] = float("inf")
    for found, right in zip(results(model, x, True), results(apart(model), x, True), strict=True):
        torch.testing.assert_close(found, right, equal_nan=True)
    grad = torch.full((4, 5), float("nan"))
    x = torch.randn(4, 3, 16, 16)
    both = [torch.autograd.grad(each(x), list(each.parameters()), grad) for each in (model, apart(model))]
    for found, right in zip(*both, strict=True):
        torch.testing.assert_close(found, right, equal_nan=True)


def test_names_copies_and_files() -> None:
    model = fuse(mnist_convnet())
    assert list(model.state_dict()) == list(mnist_convnet().state_dict())
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))


def test_what_it_leaves_to_its_layers() -> None:
    x = torch.randn(2, 1, 28, 28)
    model = fuse(mnist_convnet())
    assert used(model, x)
    heard: list[int] = []
    handle = model[0].register_forward_hook(lambda *_: heard.append(1))
    assert not used(model, x)
    assert heard, "a hook within is called"
    handle.remove()
    assert used(model, x)
    model[7].weight.requires_grad_(False)
    assert not used(model, x), "a frozen layer"
    model[7].weight.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not used(model, x)
    assert not used(model, torch.randn(2, 1, 28, 56)[..., ::2]), "an input with gaps"
    assert not used(copy.deepcopy(model).double(), x.double())


def test_hooks_of_the_whole_model_are_called() -> None:
    plain = mnist_convnet()
    plain.register_forward_hook(lambda module, inputs, y: 2 * y)
    model, x = fuse(copy.deepcopy(plain)), torch.randn(2, 1, 28, 28)
    assert used(model, x)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def test_larger_nets_stay_apart() -> None:
    """Of their gradients the first are exchanged while others are computed."""
    assert type(fuse(cifar_vgg())) is nn.Sequential


def test_no_second_derivative() -> None:
    model, x = fuse(mnist_convnet()), torch.randn(2, 1, 28, 28, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_two_passes_before_their_backward() -> None:
    model = fuse(mnist_convnet())
    first, second = torch.randn(3, 1, 28, 28), torch.randn(3, 1, 28, 28)
    alone = [torch.autograd.grad(model(x).sum(), list(model.parameters())) for x in (first, second)]
    scores = [model(x).sum() for x in (first, second)]
    for y, right in zip(scores, alone, strict=True):
        for found, wanted in zip(torch.autograd.grad(y, list(model.parameters())), right, strict=True):
            assert torch.equal(found, wanted)


def test_it_learns() -> None:
    model = fuse(mnist_convnet())
    x, labels = torch.randn(16, 1, 28, 28), torch.randint(0, 10, (16,))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        loss = functional.cross_entropy(model(x), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]


def test_wrong_operands_get_pytorchs_message() -> None:
    model = fuse(mnist_convnet())
    with pytest.raises(RuntimeError, match="channels"):
        model(torch.randn(2, 3, 28, 28))
    assert isinstance(model[0], FusedConvReLU)
