"""Two nets of other kinds than the published ones, to check predictions on: a small residual net with batch norm, and a small transformer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        around = [nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)]
        self.around = nn.Sequential(*around) if stride > 1 or inside != outside else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.first_norm(self.first(images)))
        return functional.relu(self.second_norm(self.second(inner)) + self.around(images))


def resnet(classes: int = 10) -> nn.Module:
    """175,000 parameters, for color images."""
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


class Transformer(nn.Module):
    """Patches of 7x7 pixels as 16 words, two layers of attention. 210,000 parameters, for grey images of 28x28."""

    def __init__(self, classes: int = 10, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Conv2d(1, width, 7, 7)
        self.place = nn.Parameter(torch.zeros(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.answer = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        words = self.words(images).flatten(2).transpose(1, 2) + self.place
        answers: torch.Tensor = self.answer(self.layers(words).mean(1))
        return answers
