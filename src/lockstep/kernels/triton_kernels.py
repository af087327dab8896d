"""The operator in Triton, for float32 in planar order. Imported only where Triton is; tested in Triton's interpreter, not yet run on a GPU."""

# mypy: ignore-errors
# Triton's functions are a language of their own, whose arguments have no Python types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS, CHANNELS = 128, 16


@triton.jit
def _convolved(x, weight, bias, n, out, row, column, inside, channels, out_channels, height, width, padding,
               K: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """CHANNELS x PIXELS outputs of the convolution, with bias."""
    sums = tl.zeros((CHANNELS, PIXELS), tl.float32) + tl.load(bias + out, mask=out < out_channels, other=0.0)[:, None]
    for channel in range(channels):
        for tap in tl.static_range(K * K):
            r, c = row + tap // K - padding, column + tap % K - padding
            there = inside & (r >= 0) & (r < height) & (c >= 0) & (c < width)
            value = tl.load(x + ((n * channels + channel) * height + r) * width + c, mask=there, other=0.0)
            w = tl.load(weight + (out * channels + channel) * K * K + tap, mask=out < out_channels, other=0.0)
            sums += w[:, None] * value[None, :]
    return sums


@triton.jit
def _forward(x, weight, bias, y, code, channels, out_channels, height, width, y_height, y_width, padding,
             K: tl.constexpr, POOL: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """A block: PIXELS results of CHANNELS channels of one image."""
    n = tl.program_id(2)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    out = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = pixel < y_height * y_width
    row, column = pixel // y_width, pixel % y_width
    place = (n * out_channels + out[:, None]) * y_height * y_width + pixel[None, :]
    kept = (out < out_channels)[:, None] & inside[None, :]
    if POOL:
        best = _convolved(x, weight, bias, n, out, 2 * row, 2 * column, inside, channels, out_channels, height, width, padding,
                          K, PIXELS, CHANNELS)  # fmt: skip
        which = tl.zeros((CHANNELS, PIXELS), tl.int32)
        for q in tl.static_range(1, 4):
            other = _convolved(x, weight, bias, n, out, 2 * row + q // 2, 2 * column + q % 2, inside, channels, out_channels, height,
                               width, padding, K, PIXELS, CHANNELS)  # fmt: skip
            # The first of equal ones wins, and NaN wins over numbers, as in PyTorch.
            wins = (other > best) | (other != other)
            best = tl.where(wins, other, best)
            which = tl.where(wins, q, which)
        tl.store(code + place, tl.where(best <= 0, 4, which).to(tl.uint8), mask=kept)
    else:
        best = _convolved(x, weight, bias, n, out, row, column, inside, channels, out_channels, height, width, padding,
                          K, PIXELS, CHANNELS)  # fmt: skip
    tl.store(y + place, tl.where(best <= 0, 0.0, best), mask=kept)  # NaN stays, as in PyTorch


@triton.jit
def _through(grad, kept, plane, row, column, there, y_height, y_width, POOL: tl.constexpr):
    """The gradient of the convolution's output, through pool and ReLU; `kept` is y, or with a pool its code."""
    if POOL:
        there = there & (row // 2 < y_height) & (column // 2 < y_width)
        place = (plane * y_height + row // 2) * y_width + column // 2
        passes = tl.load(kept + place, mask=there, other=4) == row % 2 * 2 + column % 2
    else:
        place = (plane * y_height + row) * y_width + column
        y = tl.load(kept + place, mask=there, other=0.0)
        passes = (y > 0) | (y != y)
    return tl.where(passes, tl.load(grad + place, mask=there, other=0.0), 0.0)


@triton.jit
def _grad_x(grad, kept, weight, grad_x, channels, out_channels, height, width, out_height, out_width, y_height, y_width, padding,
            K: tl.constexpr, POOL: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """A block: the gradient of PIXELS pixels of CHANNELS input channels of one image."""
    n = tl.program_id(2)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    into = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    row, column = pixel // width, pixel % width
    inside = pixel < height * width
    sums = tl.zeros((CHANNELS, PIXELS), tl.float32)
    for out in range(out_channels):
        for tap in tl.static_range(K * K):
            r, c = row + padding - tap // K, column + padding - tap % K
            there = inside & (r >= 0) & (r < out_height) & (c >= 0) & (c < out_width)
            value = _through(grad, kept, n * out_channels + out, r, c, there, y_height, y_width, POOL)
            w = tl.load(weight + (out * channels + into) * K * K + tap, mask=into < channels, other=0.0)
            sums += w[:, None] * value[None, :]
    place = (n * channels + into[:, None]) * height * width + pixel[None, :]
    tl.store(grad_x + place, sums, mask=(into < channels)[:, None] & inside[None, :])


@triton.jit
def _grad_weight(grad, kept, x, grad_weight, grad_bias, batch, channels, out_channels, height, width, out_height, out_width,
                 y_height, y_width, padding, K: tl.constexpr, POOL: tl.constexpr, PIXELS: tl.constexpr):  # fmt: skip
    """A block: one tap between one input and one output channel, over the whole batch; the first also sums the bias."""
    channel, out, tap = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sums = tl.zeros((PIXELS,), tl.float32)
    biases = tl.zeros((PIXELS,), tl.float32)
    for n in range(batch):
        for begin in range(0, out_height * out_width, PIXELS):
            pixel = begin + tl.arange(0, PIXELS)
            row, column = pixel // out_width, pixel % out_width
            inside = pixel < out_height * out_width
            value = _through(grad, kept, n * out_channels + out, row, column, inside, y_height, y_width, POOL)
            r, c = row + tap // K - padding, column + tap % K - padding
            there = inside & (r >= 0) & (r < height) & (c >= 0) & (c < width)
            sums += value * tl.load(x + ((n * channels + channel) * height + r) * width + c, mask=there, other=0.0)
            biases += value
    tl.store(grad_weight + (out * channels + channel) * K * K + tap, tl.sum(sums))
    if (channel == 0) & (tap == 0):
        tl.store(grad_bias + out, tl.sum(biases))


def forward(x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool = False) -> tuple[Tensor, Tensor]:
    """The result, and what `backward` needs: the result itself, or with a pool its code."""
    batch, channels, height, width = x.shape
    out_channels, kernel = weight.shape[0], weight.shape[2]
    size = [(side + 2 * padding - kernel + 1) // (2 if pool else 1) for side in (height, width)]
    y = x.new_empty((batch, out_channels, *size))
    code = torch.empty_like(y, dtype=torch.uint8) if pool else y
    grid = (triton.cdiv(size[0] * size[1], PIXELS), triton.cdiv(out_channels, CHANNELS), batch)
    _forward[grid](
        x, weight, bias, y, code, channels, out_channels, height, width, *size, padding, kernel, pool, PIXELS, CHANNELS
    )
    return y, code


def backward(
    grad: Tensor, kept: Tensor, x: Tensor, weight: Tensor, padding: int, pool: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias."""
    batch, channels, height, width = x.shape
    out_channels, kernel = weight.shape[0], weight.shape[2]
    outputs = [side + 2 * padding - kernel + 1 for side in (height, width)]
    sizes = (channels, out_channels, height, width, *outputs, kept.shape[2], kept.shape[3], padding, kernel, pool)
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    grad_bias = weight.new_empty(out_channels)
    grid = (triton.cdiv(height * width, PIXELS), triton.cdiv(channels, CHANNELS), batch)
    _grad_x[grid](grad, kept, weight, grad_x, *sizes, PIXELS, CHANNELS)
    _grad_weight[(channels, out_channels, kernel * kernel)](
        grad, kept, x, grad_weight, grad_bias, batch, *sizes, PIXELS
    )
    return grad_x, grad_weight, grad_bias


class _ConvRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool) -> Tensor:
        y, kept = forward(x, weight, bias, padding, pool)
        ctx.save_for_backward(kept, x, weight)
        ctx.settings = padding, pool
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(grad.contiguous(), *ctx.saved_tensors, *ctx.settings), None, None


def conv_relu(x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool = False) -> Tensor:
    """With a gradient, for contiguous tensors."""
    return _ConvRelu.apply(x.contiguous(), weight.contiguous(), bias, padding, pool)
