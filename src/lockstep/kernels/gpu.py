"""The operator on CUDA: cuda/conv_relu.cu, compiled by nvcc on first use, called through plain C functions.

Written and checked without a GPU: the same source, compiled for the CPU, is tested, and nvcc compiles it for every architecture; it has not
run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from lockstep.kernels.way import Tail, result_size
from lockstep.machine.native_code import build_once, compiler_identity, folder, run_compiler

SOURCE = Path(__file__).with_name("cuda") / "conv_relu.cu"
ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")
# Blocks for each pair of channels in the weights' gradient: enough to fill a GPU when there are few pairs.
BLOCKS = 512


class Functions:
    """The two C functions of a compiled library, on tensors of the device that it was compiled for."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._forward, self._backward = loaded.lockstep_forward, loaded.lockstep_backward

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, tail: int, way: int = 1, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """As `lockstep::conv_relu_forward`; `way` is ignored: there is only one."""
        pool = _check(x, weight, tail)
        x, weight = x.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        y = x.new_empty((x.shape[0], weight.shape[0], *result_size(x.shape, weight.shape, padding, tail)))
        code = torch.empty_like(y, dtype=torch.uint8) if pool and keep else x.new_empty(0, dtype=torch.uint8)
        if x.shape[0]:
            sizes = _sizes(x, weight, padding, pool)
            words = (x, weight, bias, y, code if pool and keep else None)
            _done(self._forward(sizes, weight.shape[2], *map(_address, words), _stream(x)))
        return y, code

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, kept: Tensor, padding: int, tail: int, way: int, wants_x: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `lockstep::conv_relu_backward`."""
        pool = _check(x, weight, tail)
        grad, x, kept, plain = grad.contiguous(), x.contiguous(), kept.contiguous(), weight.contiguous()
        grad_x = torch.empty_like(x) if wants_x else x.new_empty(0)
        grad_weight, grad_bias = torch.zeros_like(plain), plain.new_zeros(plain.shape[0])
        if x.shape[0]:
            pairs = plain.shape[0] * plain.shape[1]
            parts = max(1, min(BLOCKS // pairs, x.shape[0]))
            sums = x.new_empty(parts * pairs * (plain.shape[2] ** 2 + 1))
            words = (grad, None if pool else kept, kept if pool else None, x, plain, grad_x if wants_x else None)
            outs = (grad_weight, grad_bias, sums)
            sizes = _sizes(x, plain, padding, pool)
            _done(self._backward(sizes, plain.shape[2], *map(_address, (*words, *outs)), parts, _stream(x)))
        return grad_x, grad_weight, grad_bias


def _check(x: Tensor, weight: Tensor, tail: int) -> bool:
    """Whether there is a pool."""
    if tail == Tail.NOTHING:
        raise RuntimeError(f"conv_relu: on {x.device.type} there is always a ReLU behind it")
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        raise RuntimeError(f"conv_relu: on {x.device.type} it computes in float32, not in {x.dtype}")
    return tail == Tail.RELU_POOL


def _sizes(x: Tensor, weight: Tensor, padding: int, pool: bool) -> ctypes.Array[ctypes.c_int]:
    batch, channels, height, width = x.shape
    return (ctypes.c_int * 7)(batch, channels, weight.shape[0], height, width, padding, int(pool))


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() if tensor is not None else None)


def _stream(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None)


def _done(error: int) -> None:
    if error:
        raise RuntimeError(f"conv_relu: CUDA error {error}")


@cache
def register() -> bool:
    """Make `lockstep::conv_relu` work on CUDA tensors; False where there is no nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return False
    major, minor = torch.cuda.get_device_capability()
    functions = Functions(_compiled(nvcc, f"{major}{minor}"))
    torch.library.impl("lockstep::conv_relu_forward", "CUDA", functions.forward)
    torch.library.impl("lockstep::conv_relu_backward", "CUDA", functions.backward)
    return True


def _compiled(nvcc: str, architecture: str) -> Path:
    made_with = f"{architecture} {compiler_identity(nvcc)} {torch.__version__}"
    name = hashlib.sha256(SOURCE.read_bytes() + made_with.encode()).hexdigest()[:16]
    make = partial(compile_for, nvcc, architecture)
    return build_once(folder() / f"cuda-{name}.so", "the CUDA kernels", make)


def compile_for(nvcc: str, architecture: str, where: Path) -> str:
    """Compile for one architecture ("80") into a shared library; returns what ptxas says about registers."""
    words = [nvcc, "-O3", f"-arch=sm_{architecture}", "-Xptxas", "-v", "-shared", "-Xcompiler", "-fPIC", str(SOURCE)]
    return run_compiler([*words, "-o", str(where)])


def compile_for_host(compiler: str, where: Path, *flags: str) -> Functions:
    """The same source for the CPU, to test its arithmetic."""
    words = [compiler, "-std=c++17", "-O2", "-x", "c++", "-DLOCKSTEP_HOST", "-shared", "-fPIC", *flags, str(SOURCE)]
    subprocess.run([*words, "-o", str(where)], check=True)
    return Functions(where)
