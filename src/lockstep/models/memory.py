"""The order of a model's memory, and the one kind of layer that must not have channels-last.

A 1x1 convolution with a stride, whose number of input channels is not a multiple of 16, writes beyond its scratch memory in the
gradient of its weight if its input is channels-last (oneDNN in torch 2.13.0: in fp32 with AVX2, in bf16 with AVX512 and two
threads). With contiguous input, or with 16, 32 or 64 channels, it did not fail (docs/machine.md). Damaged memory may or may not
end the process, so trying it proves nothing: such layers always compute in contiguous memory, and the rest of the model as asked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SAFE_MULTIPLE = 16


def arrange(model: nn.Module, memory_format: torch.memory_format) -> nn.Module:
    """Convert the weights to this memory format, except in layers that it would break."""
    model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
    if memory_format == torch.channels_last:
        for layer in model.modules():
            if fragile(layer):
                layer.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
                layer.register_forward_pre_hook(_contiguous)
    return model


def fragile(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Conv2d)
        and layer.kernel_size == (1, 1)
        and max(layer.stride) > 1
        and layer.in_channels // layer.groups % SAFE_MULTIPLE != 0
    )


def _contiguous(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    first, *rest = inputs
    return (first.contiguous(), *rest) if isinstance(first, Tensor) else inputs
