"""The published nets: as the reports describe them, bit for bit."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import models
from lockstep.errors import InputError
from lockstep.recipe import Recipe, Regularize
from support import backward


def as_reported(name: str) -> nn.Module:
    """The reports' own order: convolution, ReLU, max-pool."""
    if name == "mnist-convnet":
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 10),
        )  # fmt: skip
    convolutions: list[nn.Module] = []
    for a, b, c in ((3, 32, 64), (64, 128, 256), (256, 256, 256)):
        convolutions += [
            nn.Conv2d(a, b, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(b, c, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    head = [nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*convolutions, *head)


@pytest.mark.parametrize(("name", "parameters"), [("mnist-convnet", 4_266), ("cifar-vgg", 2_625_962)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_same_bits_as_the_reports_order(name: str, parameters: int, memory_format: torch.memory_format) -> None:
    ours = models.build(Recipe(model=name, seed=5)).to(memory_format=memory_format)
    assert sum(p.numel() for p in ours.parameters()) == parameters
    theirs = as_reported(name).to(memory_format=memory_format)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    torch.manual_seed(0)
    images = torch.randn(6, *models.CATALOGUE[name].shape)
    images[:, :, :14] = -1.0  # a plain background: many equal numbers within a pooling window
    images = images.to(memory_format=memory_format)
    assert torch.equal(backward(ours, images), backward(theirs, images))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("name", models.CATALOGUE)
@pytest.mark.parametrize(
    "more", [{}, {"regularize": Regularize(batch_norm="synchronised")}], ids=["plain", "batch norm"]
)
def test_what_is_trained_is_counted(name: str, more: dict[str, Any]) -> None:
    recipe = Recipe(model=name, **more)
    if name == "gpt" and more:
        with pytest.raises(InputError, match="model=gpt takes no argument 'batch_norm': leave it out"):
            models.build(recipe)
        return
    parameters = list(models.build(recipe).parameters())
    count = sum(p.numel() for p in parameters)
    assert models.trained_size(recipe) == (count, 4 * count)


def test_the_catalogue_knows_its_parameters() -> None:
    for info in models.CATALOGUE.values():
        assert info.parameters == sum(p.numel() for p in models.build(Recipe(model=info.name)).parameters())


def test_tied_conv_shares_its_weights_whatever_k() -> None:
    recipes = {k: Recipe(model="tied-conv", model_args={"k": k}) for k in (2, 10)}
    counts = {k: sum(p.numel() for p in models.build(recipe).parameters()) for k, recipe in recipes.items()}
    assert counts[2] == counts[10]


def test_seed_to_weights_is_the_same_whatever_was_drawn_before() -> None:
    torch.manual_seed(1)
    one = models.build(Recipe())
    torch.rand(100)
    two = models.build(Recipe())
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_strided_1x1_convolutions_of_odd_channels_never_see_channels_last() -> None:
    """There PyTorch writes beyond its memory (docs/machine.md), which may or may not end the process: so it is kept from happening."""
    from lockstep.models import memory

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1, stride=2), nn.ReLU(), nn.Conv2d(4, 16, 3), nn.Conv2d(16, 4, 1, stride=2)
    )
    plain = copy.deepcopy(net)
    seen: list[bool] = []
    arranged = memory.arrange(net, torch.channels_last)
    for layer in (arranged[1], arranged[4]):
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].is_contiguous()))
    images = torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    found = arranged(images)
    assert seen == [True, False], "8 channels in contiguous memory; 16 stay as they are"
    torch.testing.assert_close(found, plain(images.contiguous()))
    assert not any(memory.fragile(layer) for layer in (nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()))


_FRAGILE = """
import sys, torch
from torch import nn
from lockstep.models import memory

torch.set_num_threads(2)
for dtype in (torch.float32, torch.bfloat16):
    for batch, size in ((1, 28), (2, 8), (4, 28)):
        for channels in (3, 4, 8, 20):
            for width in (1, 8):
                net = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, width, 1, stride=2))
                net = memory.arrange(net, torch.channels_last).to(dtype)
                images = torch.randn(batch, 3, size, size, dtype=dtype).contiguous(memory_format=torch.channels_last)
                net(images).float().square().sum().backward()
print("whole")
"""


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE_AMX"])
def test_such_layers_train_without_damage(isa: str) -> None:
    """Without `arrange` the same cases end with SIGABRT or SIGSEGV: in fp32 with AVX2, in bf16 where there is AVX512."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([sys.executable, "-c", _FRAGILE], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
