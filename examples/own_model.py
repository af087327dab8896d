"""A model of one's own: any callable that returns a torch.nn.Module.

lockstep run model=examples/own_model.py:Net model_args.width=16 data=embedded ranks=2
"""

import torch
from torch import nn


class Net(nn.Module):
    """A small residual net for 1x28x28 images."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width * 14 * 14, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.first(images))
        features = features + torch.relu(self.second(features))
        return self.head(features.flatten(1))
