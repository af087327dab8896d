"""Task kernel: relu(conv2d(x, weight, bias, padding=1)) as one operation, with a backward of your own.

Backward gets the gradient of the result. Where the ReLU cut a number off, no gradient goes through. What is left goes to
the convolution's input, to its weight, and, summed over images and pixels, to its bias. torch.nn.grad has conv2d_input
and conv2d_weight. Keep from forward only what backward needs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class ConvRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = functional.conv2d(x, weight, bias, padding=1).relu_()
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, y = ctx.saved_tensors
        # Yours: the gradients of x (None where ctx.needs_input_grad[0] is false), weight and bias.
        raise NotImplementedError(f"backward in kernel.py is yours to write ({x.shape}, {weight.shape}, {y.shape})")


def conv_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    result: Tensor = ConvRelu.apply(x, weight, bias)
    return result
