"""`FusedConvReLU`: `torch.nn.Conv2d` with the ReLU, and perhaps the max-pool, that follows it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lockstep.kernels import dispatch, native, op


class FusedConvReLU(nn.Conv2d):
    """`nn.Sequential(nn.Conv2d(...), nn.ReLU())`, and with pool=True `nn.MaxPool2d(2)` behind it, as one module.

    Takes what `Conv2d` takes, and has its parameters, initialisation and state dict. What the fused kernels do not do (strides,
    groups, dilation, other devices and types), or were measured not to do faster, is computed by PyTorch's own operators.
    """

    applies_relu = True
    """Tells a model that applies the ReLU itself to leave it out."""

    def __init__(self, *args: Any, pool: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool = pool
        native.load()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        native.load()

    @classmethod
    def of(cls, conv: nn.Conv2d, pool: bool = False) -> FusedConvReLU:
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
            pool=pool,
        )
        made.weight, made.bias = conv.weight, conv.bias
        made.train(conv.training)
        return made

    def forward(self, input: Tensor) -> Tensor:
        if self.is_simple():
            return dispatch.conv_relu(input, self.weight, self.bias, int(self.padding[0]), self.pool)
        if self.padding_mode != "zeros":
            input = nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            return op.plain(input, self.weight, self.bias, self.stride, 0, self.dilation, self.groups, self.pool)
        return op.plain(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.pool)

    def is_simple(self) -> bool:
        """Whether the fused operator can express it at all."""
        return (
            self.stride == (1, 1)
            and self.dilation == (1, 1)
            and self.groups == 1
            and self.padding_mode == "zeros"
            and self.kernel_size[0] == self.kernel_size[1]
            and not isinstance(self.padding, str)
            and self.padding[0] == self.padding[1]
        )

    def extra_repr(self) -> str:
        conv = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{conv}{', pool=True' if self.pool else ''}"
