"""Small nets for 1x28x28 images, each with one feature that models of people's own have (test_model_features.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Net(nn.Module):
    """A layer, what a feature puts into the middle, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(784, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.middle(torch.tanh(self.first(x.flatten(1)))))

    def middle(self, x: Tensor) -> Tensor:
        return x


class Tied(Net):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 12)
        self.two.weight = self.one.weight

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x))))


class Frozen(Net):
    """A layer that is not trained, and a bias that is not in one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.head.bias.requires_grad_(False)
        self.inner = nn.Linear(12, 12)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Buffers(Net):
    """A count of steps that the output depends on."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return x / (1 + 0.1 * self.passes)


class Outputs(Net):
    """A dictionary: scores, and the answer of a head that no loss asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x.flatten(1)))
        return {"logits": self.head(x), "more": (x, [self.other(x)])}


class Recurrent(nn.Module):
    """An LSTM and a GRU of two layers, over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.gated = nn.LSTM(28, 8, batch_first=True), nn.GRU(8, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.gated(self.long(x.squeeze(1))[0])[0][:, -1])


def double() -> nn.Module:
    """All of it in float64."""
    return Net().double()


class Mixed(Net):
    """A layer in float64 between others in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12).double()

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x.to(self.inner.weight.dtype))).to(x.dtype)


class Complex(Net):
    """Complex weights, a bias of them, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(12, 12, dtype=torch.complex64) / 5)
        self.shift = nn.Parameter(torch.randn(12, dtype=torch.complex64) / 5)
        self.fixed = nn.Parameter(torch.randn(12, dtype=torch.complex64), requires_grad=False)

    def middle(self, x: Tensor) -> Tensor:
        turned = x.to(self.turn.dtype) @ self.turn + self.shift * self.fixed
        return turned.real + turned.imag


class Sparse(nn.Module):
    """An embedding of brightness, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 6, sparse=True), nn.Linear(28 * 6, 10)

    def levels(self, x: Tensor) -> Tensor:
        return (4 * (x.squeeze(1).mean(1) + 1)).long().clamp(0, 7)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.embedding(self.levels(x)).flatten(1))


class SparseFunction(Sparse):
    """The same by the function, of which no look at the layers tells."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)

    def forward(self, x: Tensor) -> Any:
        return self.head(functional.embedding(self.levels(x), self.embedding.weight, sparse=True).flatten(1))


class Unused(Net):
    """A layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(12, 12)


class Steps(Net):
    """Other layers in every other step; in the first one both, if `together`."""

    steps: Tensor

    def __init__(self, together: bool = False) -> None:
        super().__init__()
        self.together = together
        self.even, self.odd = nn.Linear(12, 12), nn.Linear(12, 12)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def middle(self, x: Tensor) -> Tensor:
        step = int(self.steps)
        if self.training:
            self.steps += 1
        if self.together and step == 0:
            return torch.tanh(self.odd(self.even(x)))
        return torch.tanh((self.odd if step % 2 else self.even)(x))


class Branches(Net):
    """Experts for samples of different brightness: a rank without such samples does not call them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        which = (x.flatten(1).mean(1) * 37).long().abs() % 4
        x = torch.tanh(self.first(x.flatten(1)))
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = which == number
            if chosen.any():
                result[chosen] = torch.tanh(expert(x[chosen]))
        return self.head(result)


class Scalar(Net):
    """A parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def middle(self, x: Tensor) -> Tensor:
        return x * self.scale


class Several(Net):
    """Parameters of two types that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(12)), nn.Parameter(torch.ones(12, dtype=torch.float64))

    def middle(self, x: Tensor) -> Tensor:
        return x * self.one * self.two.to(x.dtype)


class Empty(nn.Module):
    """A parameter of no size."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.ones(0, 10))

    def forward(self, x: Tensor) -> Any:
        return x.flatten(1)[:, :0] @ self.nothing


class Uncalled(Net):
    """A layer whose weights are used, and which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def middle(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.inner.weight, self.inner.bias)
