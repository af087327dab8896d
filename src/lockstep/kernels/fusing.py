"""Puts our modules into a model that was built of PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lockstep.kernels import chain
from lockstep.kernels.module import FastConv, FusedConvReLU, is_simple
from lockstep.torch_private import has_hooks


def fuse(model: nn.Module) -> nn.Module:
    """Replace, in place, Conv2d + ReLU (+ MaxPool2d(2), in either order) by FusedConvReLU, and any other Conv2d by FastConv; returns the model.

    Looks into every `nn.Sequential`. A model whose own `forward` calls a convolution and then a ReLU may say so by a method
    `convolutions_before_relu()` that returns the names of such convolutions (dotted, as in its state dict); it leaves out the ReLU where the convolution's
    `applies_relu` is true. Parameters and their names stay: what was a module of its own becomes `nn.Identity`.
    """
    for module in list(model.modules()):
        if type(module).forward is nn.Sequential.forward and isinstance(module, nn.Sequential):
            _fuse_sequence(module)
            chain.join(module)
        named: Callable[[], list[str]] | None = getattr(module, "convolutions_before_relu", None)
        for name in named() if named else ():
            conv = module.get_submodule(name)
            if isinstance(conv, nn.Conv2d) and _is_plain(conv, nn.Conv2d):
                module.set_submodule(name, FusedConvReLU.of(conv))
    _replace_others(model)
    return model


def _replace_others(model: nn.Module) -> None:
    """Convolutions with something else behind them: a batch norm, a sum. One that stands in several places stays one."""
    made: dict[nn.Module, FastConv] = {}
    for parent in list(model.modules()):
        for name, conv in parent.named_children():
            if isinstance(conv, nn.Conv2d) and _is_plain(conv, nn.Conv2d) and is_simple(conv):
                made.setdefault(conv, FastConv.of(conv))
                parent.set_submodule(name, made[conv])


def _fuse_sequence(sequence: nn.Sequential) -> None:
    for index, module in enumerate(sequence):
        if not _is_plain(module, nn.Conv2d):
            continue
        behind = list(sequence)[index + 1 : index + 3]
        pool = _pool_and_relu(behind)
        if pool is None:
            continue
        assert isinstance(module, nn.Conv2d)
        sequence[index] = FusedConvReLU.of(module, pool=pool)
        for place in range(index + 1, index + (3 if pool else 2)):
            sequence[place] = nn.Identity()


def _pool_and_relu(behind: list[nn.Module]) -> bool | None:
    """Of the modules behind a convolution: True for ReLU and pool, False for a ReLU alone, None for neither."""
    kinds = ["relu" if _is_plain(module, nn.ReLU) else "pool" if _halves(module) else "" for module in behind]
    if sorted(kinds) == ["pool", "relu"]:
        return True
    return False if kinds[:1] == ["relu"] else None


def _halves(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.MaxPool2d)
        and _is_plain(module, nn.MaxPool2d)
        and module.kernel_size in (2, (2, 2))
        and module.stride in (2, (2, 2))
        and module.padding in (0, (0, 0))
        and module.dilation in (1, (1, 1))
        and not module.ceil_mode
        and not module.return_indices
    )


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Exactly this class, without hooks."""
    return type(module) is kind and not has_hooks(module)
