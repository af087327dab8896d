"""Batch norm behind a convolution becomes part of its weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights


def fold_batch_norm(model: nn.Module, example: Tensor) -> tuple[nn.Module, dict[str, str]]:
    """Returns the model, and the name of the convolution for each batch norm that was folded.

    A run of the model shows which batch norm follows which convolution: its input is the very tensor that the convolution returned. If
    something else reads that tensor too, the result changes, and the pair is left as it was.
    """
    pairs = _norms_behind(model, example)
    names = {id(layer): name for name, layer in model.named_modules()}
    folded: dict[str, str] = {}
    for norm, conv in pairs:
        trial = copy.deepcopy(model)
        norm_name, conv_name = names[id(norm)], names[id(conv)]
        trial = _fold(trial, trial.get_submodule(conv_name), trial.get_submodule(norm_name))
        if _same(model, trial, example):
            folded[norm_name] = conv_name
            model = trial
            names |= {id(layer): name for name, layer in model.named_modules()}
    return model, folded


def _norms_behind(model: nn.Module, example: Tensor) -> list[tuple[nn.Module, nn.Module]]:
    made: dict[int, tuple[nn.Module, Tensor]] = {}
    calls: dict[nn.Module, int] = {}
    pairs: dict[nn.Module, nn.Module] = {}

    def after_conv(module: nn.Module, args: Any, output: Tensor) -> None:
        calls[module] = calls.get(module, 0) + 1
        made[id(output)] = (module, output)  # the tensor is kept, or its id could be another's

    def before_norm(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls[module] = calls.get(module, 0) + 1
        if id(args[0]) in made:
            pairs[module] = made[id(args[0])][0]

    handles: list[Any] = []
    for layer in model.modules():
        if type(layer) is nn.Conv2d:
            handles.append(layer.register_forward_hook(after_conv))
        elif isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None:
            handles.append(layer.register_forward_pre_hook(before_norm))
    with torch.no_grad():
        model(example)
    for handle in handles:
        handle.remove()
    # A layer that is applied twice cannot take up two sets of statistics.
    return [(norm, conv) for norm, conv in pairs.items() if calls[norm] == calls[conv] == 1]


def _fold(model: nn.Module, conv: nn.Module, norm: nn.Module) -> nn.Module:
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    weight, bias = fuse_conv_bn_weights(
        conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    conv.weight, conv.bias = weight, bias
    return replace(model, {id(norm): nn.Identity()})


def _same(one: nn.Module, other: nn.Module, example: Tensor) -> bool:
    with torch.no_grad():
        before, after = one(example), other(example)
    reach = float(before.abs().max()) or 1.0
    return bool((before - after).abs().max() <= 1e-4 * reach)


def replace(model: nn.Module, replaced: Mapping[int, nn.Module]) -> nn.Module:
    """Put others in the place of layers, wherever they are referred to (a tied layer is in several places)."""
    if id(model) in replaced:
        return replaced[id(model)]
    for path, child in reversed(list(model.named_modules(remove_duplicate=False))):
        if id(child) in replaced:
            model.set_submodule(path, replaced[id(child)])
    return model
