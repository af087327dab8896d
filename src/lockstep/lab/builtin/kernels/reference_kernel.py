"""A plain solution of kernel.py."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional, grad


class ConvRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = functional.conv2d(x, weight, bias, padding=1).relu_()
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, y = ctx.saved_tensors
        through = gradient * (y > 0)
        of_x = grad.conv2d_input(x.shape, weight, through, padding=1) if ctx.needs_input_grad[0] else None
        return of_x, grad.conv2d_weight(x, weight.shape, through, padding=1), through.sum((0, 2, 3))


def conv_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    result: Tensor = ConvRelu.apply(x, weight, bias)
    return result
