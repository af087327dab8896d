"""Fused modules in models: the published nets and a user's own; and which way is chosen, from which table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from lockstep import models
from lockstep.kernels import FusedConvReLU, dispatch, fuse, native, op, table
from lockstep.kernels.dispatch import Way
from lockstep.kernels.table import Row
from lockstep.recipe import Recipe
from support import SHORT, train_here

DIRECT, TORCH, WINOGRAD = Way.DIRECT, Way.TORCH, Way.WINOGRAD


def pair(name: str, **arguments: Any) -> tuple[nn.Module, nn.Module]:
    recipe = Recipe(model=name, model_args=arguments)
    return models.build(recipe), fuse(models.build(recipe))


NETS = [
    ("mnist-convnet", {}, 2),
    ("cifar-vgg", {}, 6),
    ("tied-conv", {"k": 3}, 2),
    ("tied-conv", {"k": 3, "tied": False}, 4),
]


@pytest.mark.parametrize(("name", "arguments", "convolutions"), NETS, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_a_fused_net_has_the_same_parameters_and_computes_the_same(
    name: str, arguments: dict[str, Any], convolutions: int, last: bool
) -> None:
    plain, fused = pair(name, **arguments)
    assert sum(isinstance(module, FusedConvReLU) for module in fused.modules()) == convolutions
    assert not any(isinstance(module, nn.MaxPool2d) for module in fused.modules())
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert [key for key, _ in fused.named_parameters()] == [key for key, _ in plain.named_parameters()]
    x = torch.randn(8, *models.CATALOGUE[name].shape, generator=torch.Generator().manual_seed(1))
    if last:
        plain, fused, x = (thing.to(memory_format=torch.channels_last) for thing in (plain, fused, x))
    a, b = plain(x), fused(x)
    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    for scores in (a, b):
        scores.square().sum().backward()
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        scale = one.grad.abs().max()
        assert (one.grad - other.grad).abs().max() < 1e-4 * scale + 1e-9
        assert other.grad.stride() == other.stride()


def test_a_convolution_without_onednn_computes_the_same_by_other_code() -> None:
    usual, other = (models.build(Recipe(model="tied-conv", model_args={"onednn": on})) for on in (True, False))
    assert fuse(other) is other
    assert not any(isinstance(module, FusedConvReLU) for module in other.modules())
    x = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    with torch.profiler.profile() as seen:
        other(x).square().sum().backward()
    called = {event.key for event in seen.key_averages()}
    assert "aten::_slow_conv2d_backward" in called
    assert not any("mkldnn" in name for name in called)
    assert torch._C._get_mkldnn_enabled()
    usual(x).square().sum().backward()
    for one, two in zip(usual.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-4)


def test_a_recipe_with_fused_trains_to_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = op.plain
    monkeypatch.setattr(op, "plain", lambda *words: calls.append(1) or real(*words))
    short = [*SHORT, "train_limit=480", "test_limit=200", "epochs=1"]
    plain, fused = (train_here(tmp_path, *short, f"fused={word}") for word in ("false", "true"))
    kernels = native.load()
    if kernels is not None and table.rows(kernels.isa):
        assert not calls, "the built-in table knows both layers"
    for key in ("train_loss", "test_loss"):
        assert fused[key] == pytest.approx(plain[key], rel=1e-4)
    assert fused["test_accuracy"] == pytest.approx(plain["test_accuracy"], abs=0.006)  # one image of 200


def test_training_steps_lead_to_the_same_weights() -> None:
    plain, fused = pair("mnist-convnet")
    data = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(32, 1, 28, 28, generator=data), torch.randint(10, (32,), generator=data)) for _ in range(10)
    ]
    for model in (plain, fused):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_only_what_is_convolution_relu_and_pool_of_two_is_replaced() -> None:
    def kinds(*modules: nn.Module) -> list[str]:
        return [type(module).__name__ for module in fuse(nn.Sequential(*modules))]

    def conv() -> nn.Conv2d:
        return nn.Conv2d(4, 4, 3)

    fused, same = "FusedConvReLU", "Identity"
    assert kinds(conv(), nn.ReLU()) == [fused, same]
    assert kinds(conv(), nn.ReLU(), nn.MaxPool2d(2)) == [fused, same, same]
    assert kinds(conv(), nn.MaxPool2d(2), nn.ReLU()) == [fused, same, same]
    assert kinds(conv(), nn.ReLU(), nn.MaxPool2d(3)) == [fused, same, "MaxPool2d"]
    assert kinds(conv(), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)) == [fused, same, "MaxPool2d"]
    assert kinds(conv(), nn.MaxPool2d(3), nn.ReLU()) == ["Conv2d", "MaxPool2d", "ReLU"]
    assert kinds(conv(), nn.BatchNorm2d(4), nn.ReLU()) == ["Conv2d", "BatchNorm2d", "ReLU"]
    assert kinds(conv(), nn.Tanh()) == ["Conv2d", "Tanh"]
    assert kinds(conv()) == ["Conv2d"]
    heard = nn.ReLU()
    heard.register_forward_hook(lambda *a: None)
    assert kinds(conv(), heard) == ["Conv2d", "ReLU"]


class Own(nn.Module):
    """A user's own model that applies the ReLU itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True))

    def convolutions_before_relu(self) -> list[str]:
        return ["conv"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y = y if getattr(self.conv, "applies_relu", False) else torch.relu(y)
        result: torch.Tensor = self.block(y)
        return result


def test_a_model_may_name_its_convolutions() -> None:
    model = Own()
    x = torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    wanted, names = model(x), list(model.state_dict())
    fuse(model)
    assert isinstance(model.conv, FusedConvReLU)
    assert isinstance(model.block[0], FusedConvReLU)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-6)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    _, fused = pair("mnist-convnet")
    model = nn.parallel.DistributedDataParallel(fused)
    images = torch.randn(16, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    model(images[rank * 8 : rank * 8 + 8]).square().sum().backward()
    torch.save([parameter.grad for parameter in fused.parameters()], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ddp_averages_the_gradients_of_fused_modules(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    plain, _ = pair("mnist-convnet")
    images = torch.randn(16, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    plain(images).square().sum().backward()
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for first, second, parameter in zip(*ranks, plain.parameters(), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first * 2, parameter.grad, rtol=1e-4, atol=1e-4)


def row(**words: Any) -> Row:
    usual = {
        "channels": 4,
        "width": 8,
        "size": 14,
        "kernel": 3,
        "pool": False,
        "batch": 32,
        "threads": 1,
        "grad_x": True,
    }
    times = {"forward": {"torch": 1.0, "direct": 0.5}, "backward": {"torch": 1.0, "direct": 0.5}}
    return Row(**{**usual, **times, **words})


def chosen(monkeypatch: pytest.MonkeyPatch, rows: list[Row], **words: Any) -> tuple[Way, Way]:
    if native.load() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(dispatch, "rows", lambda isa: tuple(rows))
    dispatch.choose.cache_clear()
    usual = {"batch": 32, "channels": 4, "width": 8, "height": 14, "breadth": 14, "kernel": 3, "padding": 1}
    rest = {"pool": False, "last": False, "dtype": torch.float32}
    others = {"threads": 1, "grad_x": True, "isa": "avx2"}
    try:
        layer = dispatch.Layer(**{**usual, **rest, **{key: words[key] for key in words if key not in others}})
        return dispatch.choose(layer, **{key: words.get(key, value) for key, value in others.items()})
    finally:
        dispatch.choose.cache_clear()


def test_the_table_decides_and_far_from_it_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    near = row()
    assert chosen(monkeypatch, [near]) == (DIRECT, DIRECT)
    assert chosen(monkeypatch, [near], batch=64, height=28, breadth=28) == (DIRECT, DIRECT)
    assert chosen(monkeypatch, [near], batch=2) == (TORCH, TORCH)
    assert chosen(monkeypatch, [near], batch=5000) == (DIRECT, DIRECT)  # larger batches are more of the same
    assert chosen(monkeypatch, [near], last=True) == (TORCH, TORCH)
    assert chosen(monkeypatch, [near], kernel=5) == (TORCH, TORCH)
    monkeypatch.setattr(dispatch, "cpu_support", lambda: {"bf16": ["AVX512-BF16"]})
    assert chosen(monkeypatch, [near], dtype=torch.bfloat16) == (TORCH, TORCH)
    monkeypatch.setattr(dispatch, "cpu_support", lambda: {"bf16": []})
    assert chosen(monkeypatch, [near], dtype=torch.bfloat16) == (DIRECT, DIRECT)
    assert chosen(monkeypatch, [near], dtype=torch.float64) == (TORCH, TORCH)
    assert chosen(monkeypatch, []) == (TORCH, TORCH)


def test_each_direction_goes_its_own_way_unless_there_is_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"torch": 1.0, "direct": 1.2}
    assert chosen(monkeypatch, [row(forward=slow)]) == (TORCH, DIRECT)
    assert chosen(monkeypatch, [row(backward=slow)]) == (DIRECT, TORCH)
    assert chosen(monkeypatch, [row(backward=slow, pool=True)], pool=True) == (DIRECT, DIRECT)  # 1.7 against 2.0 in all
    short = {"torch": 0.1, "direct": 0.05}
    assert chosen(monkeypatch, [row(forward=slow, backward=short)]) == (TORCH, TORCH)  # too short to be mixed
    slower = {"torch": 1.0, "direct": 1.6}
    assert chosen(monkeypatch, [row(backward=slower, pool=True)], pool=True) == (TORCH, TORCH)


def test_a_difference_within_the_noise_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    close = {"torch": 1.0, "direct": 0.98}
    assert chosen(monkeypatch, [row(forward=close)]) == (TORCH, DIRECT)


def test_the_nearest_row_counts_with_threads_and_grad_x_last(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"torch": 1.0, "direct": 2.0}
    rows = [
        row(threads=1),
        row(threads=2, forward=slow),
        row(threads=2, grad_x=False, backward=slow),
        row(batch=1, forward=slow),
    ]
    assert chosen(monkeypatch, rows) == (DIRECT, DIRECT)
    assert chosen(monkeypatch, rows, threads=2) == (TORCH, DIRECT)
    assert chosen(monkeypatch, rows, threads=2, grad_x=False) == (DIRECT, TORCH)
    assert chosen(monkeypatch, rows, batch=2) == (TORCH, DIRECT)


def test_this_machines_table_goes_before_the_built_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "data"))
    table.rows.cache_clear()
    built_in = table.rows("avx2")
    assert built_in
    table.save(table.document([row()], "avx2", {}))
    assert table.rows("avx2") == (row(),)
    assert table.rows("portable") == ()  # one of another instruction set says nothing …
    assert table.rows("avx512") == built_in  # … but of its nearest relative, where there is none of its own
    table.path().write_text("{")
    table.rows.cache_clear()
    assert table.rows("avx2") == built_in
    table.rows.cache_clear()
