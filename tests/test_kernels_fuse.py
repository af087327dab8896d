"""Fused modules in models: the published nets and a user's own; and which way is chosen, from which table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lockstep import models
from lockstep.files import locked
from lockstep.kernels import FastConv, FusedConvReLU, dispatch, fuse, native, op, table, timing
from lockstep.kernels.table import Layer, Row
from lockstep.kernels.way import Way, possible
from lockstep.recipe import Recipe
from lockstep.run import Run
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
    ("cifar-vgg", {"batch_norm": "per-rank"}, 6),
    ("resnet20", {}, 17),  # and two with a stride
]


@pytest.mark.parametrize(("name", "arguments", "convolutions"), NETS, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_a_fused_net_has_the_same_parameters_and_scores(
    name: str, arguments: dict[str, Any], convolutions: int, last: bool
) -> None:
    plain, fused = pair(name, **arguments)
    assert sum(isinstance(module, FastConv) for module in fused.modules()) == convolutions
    norms = any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    assert any(isinstance(module, FusedConvReLU) for module in fused.modules()) is not norms
    assert norms or not any(isinstance(module, nn.MaxPool2d) for module in fused.modules())
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert [key for key, _ in fused.named_parameters()] == [key for key, _ in plain.named_parameters()]
    x = torch.randn(8, *models.CATALOGUE[name].shape, generator=torch.Generator().manual_seed(1))
    if last:
        plain, fused, x = (thing.to(memory_format=torch.channels_last) for thing in (plain, fused, x))
    scores = fused(x)
    torch.testing.assert_close(scores, plain(x), rtol=1e-4, atol=1e-5)
    scores.square().sum().backward()
    for parameter in fused.parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("way", [TORCH, DIRECT, WINOGRAD], ids=lambda way: way.name)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("name", "arguments", "convolutions"), NETS, ids=str)
def test_a_fused_net_has_the_same_gradients_by_every_way(
    name: str, arguments: dict[str, Any], convolutions: int, last: bool, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64. In float32 two right ways may round a sum near 0 to either side of it, and then the ReLU lets a gradient pass in one
    of them alone: two such sums among the 800 thousand that the tied net makes of eight images change its gradients by 1e-3."""

    def by_this_way(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, tail: int) -> Tensor:
        ways = possible(weight.shape[1], weight.shape[0], weight.shape[2], padding, x.dtype)
        return op.fused(x, weight, bias, padding, tail, way if way in ways else DIRECT)

    if native.load(True) is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(dispatch, "convolve", by_this_way)
    x = torch.randn(2, *models.CATALOGUE[name].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    nets = [net.double() for net in pair(name, **arguments)]
    if last:
        nets, x = [net.to(memory_format=torch.channels_last) for net in nets], x.to(memory_format=torch.channels_last)
    for net in nets:
        net(x).square().sum().backward()
    # A sum of n terms is off by at most n eps of their sizes' sum. The longest here, a weight's gradient, has a term for each pixel, and
    # each of the up to nine layers hands on what it has lost. A wrong term would be seen at 1 / pixels.
    bound = 9 * x[:, 0].numel() * torch.finfo(torch.float64).eps
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).abs().max() < bound * one.grad.abs().max()


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


def test_a_recipe_with_fused_trains_to_the_same_numbers(tmp_path: Path) -> None:
    short = [*SHORT, "train_limit=480", "test_limit=200", "epochs=1"]
    plain, fused = (train_here(tmp_path, *short, f"fused={word}") for word in ("false", "true"))
    for key in ("train_loss", "test_loss"):
        assert fused[key] == pytest.approx(plain[key], rel=1e-4)
    assert fused["test_accuracy"] == pytest.approx(plain["test_accuracy"], abs=0.006)  # one image of 200


def test_fused_without_effect_is_said(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self):\n        super().__init__(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    short = [*SHORT, "train_limit=96", "test_limit=50", "epochs=1", "fused=true"]
    vain = train_here(tmp_path / "runs", *short, f"model={tmp_path}/own.py:Net")
    assert Run(Path(vain["run"])).model_notes("remarks") == [
        "warning: fused=true has no effect: the model has no Conv2d that they compute (docs/kernels.md)"
    ]
    assert Run(Path(train_here(tmp_path / "runs", *short)["run"])).model_notes("remarks") == []


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
    assert kinds(conv(), nn.MaxPool2d(3), nn.ReLU()) == ["FastConv", "MaxPool2d", "ReLU"]
    assert kinds(conv(), nn.BatchNorm2d(4), nn.ReLU()) == ["FastConv", "BatchNorm2d", "ReLU"]
    assert kinds(conv(), nn.Tanh()) == ["FastConv", "Tanh"]
    assert kinds(conv()) == ["FastConv"]
    assert kinds(nn.Conv2d(4, 4, 3, stride=2)) == ["Conv2d"]
    assert kinds(nn.Conv2d(4, 4, 3, groups=2)) == ["Conv2d"]
    heard = nn.ReLU()
    heard.register_forward_hook(lambda *a: None)
    assert kinds(conv(), heard) == ["FastConv", "ReLU"]
    seen = conv()
    seen.register_forward_hook(lambda *a: None)
    assert kinds(seen) == ["Conv2d"]


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
    os._exit(
        0
    )  # on a busy machine gloo's threads may outlive their group, and end the interpreter's own exit with SIGABRT


def test_ddp_averages_the_gradients_of_fused_modules(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    plain, _ = pair("mnist-convnet")
    images = torch.randn(16, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    plain(images).square().sum().backward()
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for first, second, parameter in zip(*ranks, plain.parameters(), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first * 2, parameter.grad, rtol=1e-4, atol=1e-4)


LAYER = Layer(
    batch=32,
    channels=4,
    out_channels=8,
    height=14,
    width=14,
    kernel=3,
    padding=1,
    relu=True,
    pool=False,
    channels_last=False,
    dtype="float32",
    threads=1,
    learns=True,
    grad_x=True,
)
SLOW, FAST = {"plain": 1.0, "torch": 1.02, "direct": 1.2}, {"plain": 1.0, "torch": 1.02, "direct": 0.5}


def test_the_fastest_of_both_directions_together_is_taken() -> None:
    assert dispatch.best(Row(LAYER, FAST, FAST)) == (DIRECT, DIRECT)
    assert dispatch.best(Row(LAYER, SLOW, SLOW)) is None
    assert dispatch.best(Row(LAYER, SLOW, FAST)) == (TORCH, DIRECT)  # 1.52 against 2
    assert dispatch.best(Row(LAYER, FAST, SLOW)) == (DIRECT, TORCH)
    # What PyTorch's operator takes longer inside of ours is counted: 2.6 against 2.2
    assert (
        dispatch.best(Row(LAYER, {"plain": 1.0, "torch": 2.0, "direct": 2.5}, {**FAST, "plain": 1.2, "direct": 0.6}))
        is None
    )
    three = {"plain": 1.0, "torch": 1.1, "direct": 0.8, "winograd": 0.4}
    assert dispatch.best(Row(LAYER, three, three)) == (WINOGRAD, WINOGRAD)
    assert dispatch.best(Row(LAYER, FAST, {})) == (DIRECT, DIRECT)  # it does not learn: forward alone


def test_a_difference_within_the_noise_is_none() -> None:
    close = {"plain": 1.0, "torch": 1.1, "direct": 0.98}
    assert dispatch.best(Row(LAYER, close, close)) is None
    # A compiled graph has no PyTorch's operators one after the other: there the fastest inside is taken.
    assert dispatch.inside(Row(LAYER, close, SLOW)) == (DIRECT, TORCH)


def test_batches_are_rounded_to_a_power_of_two() -> None:
    assert [table.rounded(batch) for batch in (1, 2, 3, 5, 6, 7, 11, 12, 32, 45, 46, 1000)] == [
        *(1, 2, 4, 4, 8, 8, 8, 16, 32, 32, 64, 1024)
    ]


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine on which nothing was timed yet; the library is the one that is there."""
    kernels = native.load()
    if kernels is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(table, "folder", lambda: tmp_path)
    for known in (table._rows.cache_clear, dispatch._chosen.clear):
        known()
    yield tmp_path
    for known in (table._rows.cache_clear, dispatch._chosen.clear):
        known()


def test_a_layer_is_timed_once_and_found_again(own_folder: Path) -> None:
    timed: list[Layer] = []

    def measure(layer: Layer) -> Row:
        timed.append(layer)
        return Row(layer, FAST, FAST)

    other = msgspec.structs.replace(LAYER, threads=64, batch=1)
    for _ in range(2):
        assert table.find(LAYER, "avx2", measure) == Row(LAYER, FAST, FAST)
        assert table.find(other, "avx2", measure).layer.threads == 64
        table._rows.cache_clear()  # as another process
    assert timed == [LAYER, other], "one thread's times say nothing of 64"
    table.find(LAYER, "portable", measure)
    assert len(timed) == 3, "an instruction set has times of its own"
    table.keep([Row(LAYER, SLOW, SLOW)], "avx2")
    assert table.find(LAYER, "avx2", measure).forward == SLOW
    assert table.find(other, "avx2", measure).forward == FAST
    table.path("avx2").write_text("{")
    table._rows.cache_clear()
    assert table.find(LAYER, "avx2", measure).forward == FAST, "a damaged file is as good as none"


def test_outside_of_a_run_times_of_a_busy_machine_are_taken_again_by_the_next_process(own_folder: Path) -> None:
    answers = [Row(LAYER, SLOW, SLOW, True), Row(LAYER, FAST, FAST), Row(LAYER, SLOW, SLOW)]
    left = iter(answers)
    for expected in (0, 1, 1):
        for _ in range(2):
            assert table.find(LAYER, "avx2", lambda layer: next(left)) == answers[expected]
        table._rows.cache_clear()  # as another process


def test_a_pinned_rank_finds_what_the_machine_knows(own_folder: Path) -> None:
    before, cores = table.path("avx2"), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert table.path("avx2") == before
    finally:
        os.sched_setaffinity(0, cores)


def test_where_nothing_can_be_kept_it_is_timed_for_this_process(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "folder", lambda: Path("/proc/none"))
    timed: list[Layer] = []

    def measure(layer: Layer) -> Row:
        timed.append(layer)
        return Row(layer, FAST, FAST)

    for _ in range(3):
        assert table.find(LAYER, "avx2", measure).forward == FAST
    assert len(timed) == 1


def test_processes_that_meet_a_layer_together_choose_the_same(own_folder: Path) -> None:
    """One of them times it, and the others wait for the answer. Threads with files of their own lock as processes do."""
    timed: list[int] = []

    def ask(number: int) -> Row:
        def measure(layer: Layer) -> Row:
            timed.append(number)
            return Row(layer, {**FAST, "direct": 0.1 * number}, FAST)

        with locked(own_folder / "start", "starting"):
            pass
        return table.find(LAYER, "avx2", measure)

    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(ask, range(1, 5)))
    assert len(timed) == 1
    assert all(row == rows[0] for row in rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wide", [False, True])
def test_a_layer_is_timed_in_every_way_and_leaves_no_trace(dtype: str, wide: bool) -> None:
    if native.load() is None:
        pytest.skip("there is no C++ compiler")
    sizes = {"channels": 16, "out_channels": 16} if wide else {}
    layer = msgspec.structs.replace(LAYER, batch=4, threads=torch.get_num_threads(), dtype=dtype, **sizes)
    state = torch.get_rng_state()
    with (
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):  # whatever surrounds the layer that is met first
        for learns in (True, False):
            row = timing.measure(msgspec.structs.replace(layer, learns=learns, grad_x=learns))
            names = {"plain", "torch", "direct", *(["winograd"] if wide else [])}
            assert set(row.forward) == names
            assert set(row.backward) == (names if learns else set())
            assert all(value > 0 for value in (*row.forward.values(), *row.backward.values()))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_module_times_what_it_meets_and_keeps_it(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Layer] = []

    def measure(layer: Layer) -> Row:
        asked.append(layer)
        return Row(layer, FAST, FAST if layer.learns else {})

    monkeypatch.setattr(timing, "measure", measure)
    conv, x = FusedConvReLU(4, 8, 3, padding=1), torch.randn(30, 4, 14, 14)
    for _ in range(2):
        conv(x).sum().backward()
    with torch.no_grad():
        conv(x)
    conv(x.to(memory_format=torch.channels_last).requires_grad_())
    here = {"threads": torch.get_num_threads()}
    expected = [
        {"grad_x": False},
        {"learns": False, "grad_x": False},
        {"channels_last": True},
    ]
    assert asked == [msgspec.structs.replace(LAYER, **here, **words) for words in expected]
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for batch in (30, 3, 5):  # the graph's batch becomes a symbol; the way is decided when it runs
        compiled(x[:batch]).sum().backward()
    assert [layer.batch for layer in asked[3:]] == [4], "32 was known, 3 and 5 are nearest to 4"
