"""A fused convolution + bias + ReLU (+ 2x2 max-pool), forward and backward, for where it is faster than PyTorch's operators.

May import measure/, machine/ and the files at the top. Its door is `fuse`, for a model, and `FusedConvReLU`, for a layer of one's own.
"""

from lockstep.kernels.fuse import fuse
from lockstep.kernels.module import FusedConvReLU

__all__ = ["FusedConvReLU", "fuse"]
