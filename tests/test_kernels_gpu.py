"""The CUDA source and the Triton kernels, without a GPU: the former compiled for the CPU and by nvcc, the latter in Triton's interpreter.

With a GPU, the operator itself is compared with PyTorch's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lockstep.kernels import gpu
from lockstep.kernels.gpu import Functions

pytestmark = pytest.mark.slow

COMPILER = os.environ.get("CXX") or "c++"
NVCC = shutil.which("nvcc")
CASES = [
    (2, 1, 4, 28, 28, 3, 1),
    (1, 3, 9, 17, 5, 3, 0),
    (2, 4, 8, 7, 7, 5, 2),
    (1, 9, 3, 6, 18, 1, 0),
    (1, 2, 2, 4, 4, 3, 2),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Functions:
    if shutil.which(COMPILER) is None:
        pytest.skip("there is no C++ compiler")
    return gpu.compile_for_host(COMPILER, tmp_path_factory.mktemp("gpu") / "host.so")


def numbers(case: tuple[int, ...], device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    batch, channels, width, height, breadth, kernel, _ = case
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, channels, height, breadth), (width, channels, kernel, kernel), (width,)]
    x, w, b = (torch.randn(*shape, generator=generator).to(device) for shape in shapes)
    return x, w, b


def expected(case: tuple[int, ...], pool: bool, device: str = "cpu") -> tuple[Tensor, Tensor, list[Tensor]]:
    """Result, a gradient for it, and the gradients of x, weight and bias, in double precision."""
    x, w, b = (tensor.double().requires_grad_() for tensor in numbers(case, device))
    y = functional.conv2d(x, w, b, padding=case[-1]).relu()
    y = functional.max_pool2d(y, 2) if pool else y
    grad = torch.randn(*y.shape, generator=torch.Generator().manual_seed(2)).to(device)
    y.backward(grad.double())
    return y.detach(), grad, [x.grad, w.grad, b.grad]


def close(found: Tensor, wanted: Tensor) -> None:
    assert (found.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cuda_source_computes_the_same_on_the_cpu(host: Functions, case: tuple[int, ...], pool: bool) -> None:
    x, w, b = numbers(case)
    wanted, grad, grads = expected(case, pool)
    y, code = host.forward(x, w, b, case[-1], pool)
    close(y, wanted)
    found = host.backward(grad, x, w, code if pool else y, case[-1], pool, 1, True)
    for one, other in zip(found, grads, strict=True):
        close(one, other)


def test_the_cuda_source_lets_nan_through(host: Functions) -> None:
    x, w, b = numbers(CASES[0])
    x[0, 0, 5, 5] = float("nan")
    for pool in (False, True):
        wanted = functional.conv2d(x, w, b, padding=1).relu()
        wanted = functional.max_pool2d(wanted, 2) if pool else wanted
        assert torch.equal(host.forward(x, w, b, 1, pool)[0].isnan(), wanted.isnan())


def test_other_types_are_an_error_in_words(host: Functions) -> None:
    x, w, b = (tensor.double() for tensor in numbers(CASES[0]))
    with pytest.raises(RuntimeError, match=r"computes in float32, not in torch\.float64"):
        host.forward(x, w, b, 1, False)


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_nvcc_compiles_it_without_spilling(tmp_path: Path) -> None:
    assert NVCC is not None
    known = subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    architectures = [name for name in gpu.ARCHITECTURES if f"compute_{name}\n" in known]
    assert {"75", "80", "90"} <= set(architectures)
    for name in architectures[:1] + architectures[-1:]:  # the oldest and the newest: each takes seconds
        said = gpu.compile_for(NVCC, name, tmp_path / f"{name}.so")
        spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", said)]
        assert len(spilled) == 24  # stores and loads of four kernels in three sizes
        assert not any(spilled)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_the_operator_agrees_with_pytorch(case: tuple[int, ...], cudnn: bool) -> None:
    from lockstep.kernels.op import fused

    if not gpu.register():
        pytest.skip("there is no compiler")
    with torch.backends.cudnn.flags(enabled=cudnn, allow_tf32=False):
        for pool in (False, True):
            wanted, grad, grads = expected(case, pool, "cuda")
            inputs = [tensor.requires_grad_() for tensor in numbers(case, "cuda")]
            y = fused(*inputs, case[-1], pool)
            y.backward(grad)
            for found, other in zip([y, *(tensor.grad for tensor in inputs)], [wanted, *grads], strict=True):
                close(found, other)


# The interpreter takes tens of milliseconds for each block.
FEW = [(2, 1, 2, 6, 7, 3, 1), (1, 2, 3, 5, 4, 3, 0), (1, 1, 1, 4, 4, 5, 2), (1, 3, 2, 4, 5, 1, 0)]
TRITON = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_kernels_gpu import FEW, close, expected, numbers
from lockstep.kernels import triton_kernels
for case in FEW:
    for pool in (False, True):
        wanted, grad, grads = expected(case, pool)
        inputs = [tensor.requires_grad_() for tensor in numbers(case)]
        y = triton_kernels.conv_relu(*inputs, case[-1], pool)
        close(y, wanted)
        y.backward(grad)
        for found, other in zip(inputs, grads, strict=True):
            close(found.grad, other)
x, w, b = numbers(FEW[1])
x[0, 0, 1, 1] = float("nan")
for pool in (False, True):
    wanted = torch.nn.functional.conv2d(x, w, b).relu()
    wanted = torch.nn.functional.max_pool2d(wanted, 2) if pool else wanted
    assert torch.equal(triton_kernels.conv_relu(x, w, b, 0, pool).isnan(), wanted.isnan())
print("same")
"""


def test_the_triton_kernels_compute_the_same_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    # The interpreter has to be asked for before Triton is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    words = [sys.executable, "-c", TRITON, str(Path(__file__).parent)]
    done = subprocess.run(words, env=environment, text=True, capture_output=True)
    assert done.stdout.strip() == "same", done.stderr
