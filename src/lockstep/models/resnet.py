"""ResNet-20 for 32x32 images, as He, Zhang, Ren and Sun describe it (2015, section 4.2): 269,722 parameters.

Three stages of three blocks with 16, 32 and 64 channels. Where the shape changes, the shortcut takes every second pixel and adds
channels of zeros, so it has no weights.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from lockstep.models.layers import BatchNorm2d, Dropout

BLOCKS, CHANNELS = 3, (16, 32, 64)


class Block(nn.Module):
    def __init__(self, channels: int, out_channels: int, stride: int, synchronised: bool) -> None:
        super().__init__()
        self.conv1 = _conv(channels, out_channels, stride)
        self.norm1 = BatchNorm2d(out_channels, synchronised)
        self.conv2 = _conv(out_channels, out_channels)
        self.norm2 = BatchNorm2d(out_channels, synchronised)
        self._stride, self._zeros = stride, out_channels - channels

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found = functional.relu(self.norm1(self.conv1(values)))
        found = self.norm2(self.conv2(found))
        if self._zeros:
            values = functional.pad(
                values[:, :, :: self._stride, :: self._stride],
                (0, 0, 0, 0, self._zeros // 2, self._zeros - self._zeros // 2),
            )
        return functional.relu(found + values)


def resnet20(*, classes: int = 10, dropout: float = 0.0, batch_norm: str = "synchronised") -> nn.Module:
    """`batch_norm`: over all ranks' samples (synchronised) or each rank's own (per-rank); the net has it in any case."""
    if batch_norm not in ("synchronised", "per-rank"):
        raise ValueError(f"batch_norm={batch_norm} is not one of synchronised, per-rank")
    together = batch_norm == "synchronised"
    layers: list[nn.Module] = [_conv(3, CHANNELS[0]), BatchNorm2d(CHANNELS[0], together), nn.ReLU()]
    channels = CHANNELS[0]
    for out_channels in CHANNELS:
        for number in range(BLOCKS):
            stride = 2 if number == 0 and out_channels != channels else 1
            layers.append(Block(channels, out_channels, stride, together))
            channels = out_channels
    layers += [
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        *([Dropout(dropout)] if dropout else []),
        nn.Linear(channels, classes),
    ]
    model = nn.Sequential(*layers)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


def _conv(channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
