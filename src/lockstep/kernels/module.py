"""`FastConv`: `torch.nn.Conv2d` by the fastest way that was found. `FusedConvReLU`: with the ReLU, and perhaps the max-pool, that follows it."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from lockstep.kernels import dispatch, native, op
from lockstep.kernels.way import Tail


class FastConv(nn.Conv2d):
    """`nn.Conv2d`: the same parameters, initialisation and state dict.

    What our kernels do not do (strides, groups, dilation, other devices and types), or were measured not to do faster, is computed by
    PyTorch's own operators.
    """

    tail: int = Tail.NOTHING

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        native.load()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        native.load()

    @classmethod
    def of(cls, conv: nn.Conv2d, **options: bool) -> Self:
        """With the parameters of this convolution: not copies of them."""
        made = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            conv.bias is not None,
            conv.padding_mode,
            device="meta",
            **options,
        )
        made.weight, made.bias = conv.weight, conv.bias
        made.train(conv.training)
        return made

    def forward(self, input: Tensor) -> Tensor:
        if is_simple(self):
            return dispatch.convolve(input, self.weight, self.bias, int(self.padding[0]), self.tail)
        if self.padding_mode != "zeros":
            input = nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            return op.plain(input, self.weight, self.bias, self.stride, 0, self.dilation, self.groups, self.tail)
        return op.plain(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.tail)


class FusedConvReLU(FastConv):
    """`nn.Sequential(nn.Conv2d(...), nn.ReLU())`, and with pool=True `nn.MaxPool2d(2)` behind it, as one module."""

    applies_relu = True
    """Tells a model that applies the ReLU itself to leave it out."""

    def __init__(self, *args: Any, pool: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool = pool
        self.tail = Tail.RELU_POOL if pool else Tail.RELU

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.tail = Tail.RELU_POOL if self.pool else Tail.RELU  # a module that was pickled by an older version has none

    def extra_repr(self) -> str:
        conv = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{conv}{', pool=True' if self.pool else ''}"


def is_simple(conv: nn.Conv2d) -> bool:
    """Whether our operator can express it at all."""
    return (
        conv.stride == (1, 1)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
        and conv.kernel_size[0] == conv.kernel_size[1]
        and not isinstance(conv.padding, str)
        and conv.padding[0] == conv.padding[1]
    )
