"""Every call that Lockstep makes into PyTorch without PyTorch's promise to keep it.

Private names change without notice, so they are all here, and tests/test_torch_private.py says of each what Lockstep relies on. What is
called at every step is PyTorch's own function under a name of ours, not a wrapper: it costs nothing. Imports no room of Lockstep.

Two things cannot be moved here, because they are methods that PyTorch calls on classes of ours: what a process group in Python has to
have (backends/python_group.py), and the hook by which DDP tells the compiler what it does (strategies/plain_ddp.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

# Documented under torch.distributed, whose stubs do not export them.
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._dynamo import eval_frame

Kind = TypeVar("Kind", bound=type)

# One call for many tensors. The public way is a loop, which costs a few microseconds for each tensor.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt

# The fused steps of torch.optim, whose import takes 1.4 s and brings the compiler.
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_

# The loss scale. torch.amp.GradScaler wants an optimizer of torch.optim.
amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
amp_update_scale_ = torch._amp_update_scale_

engine: Any = torch.autograd.Variable._execution_engine
"""What tensor.backward calls. With a gradient to begin from, that imports the symbolic shapes of the compiler (0.5 s) to compare two shapes."""

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that is under way in this thread; -1 outside of one."""


def collectives_begun() -> int | None:
    """How many collectives this rank has begun in the group of all ranks; None where there is no group."""
    world: Any = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if world is None else int(world._get_sequence_number_for_group())


def allocations(profile: Any) -> list[int]:
    """Bytes that a profile with `profile_memory` saw allocated, or freed where negative, in the order of time."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


# The operators behind autograd. torch.autograd.grad would compute the forward pass again.
batch_norm_backward = torch.ops.aten.native_batch_norm_backward
convolution_backward = torch.ops.aten.convolution_backward
hardtanh_backward = torch.ops.aten.hardtanh_backward
threshold_backward = torch.ops.aten.threshold_backward

# Namespaces of operators whose signatures are not promised. Which of them a build of PyTorch has shows only when one is asked for.
mkldnn = torch.ops.mkldnn
onednn = torch.ops.onednn
quantized = torch.ops.quantized

int_mm = torch._int_mm
"""A product of int8 matrices, in int32."""

# Quantized tensors from integers as they are; torch.quantize_per_tensor and _per_channel would round floats once more.
per_channel_quantized = torch._make_per_channel_quantized_tensor
per_tensor_quantized = torch._make_per_tensor_quantized_tensor

AnyBatchNorm = nn.modules.batchnorm._BatchNorm
"""The class of all batch norms. nn.modules.batchnorm has no public name for it."""

default_store: Callable[[], Store] = dist.distributed_c10d._get_default_store
"""The store by which the ranks of the default group have met."""


def quantized_decomposed() -> Any:
    """The operators by which exported graphs say quantize and dequantize. Importing them takes a while."""
    import torch.ao.quantization.fx._decomposed  # registers them

    return torch.ops.quantized_decomposed


def inductor_settings() -> Any:
    """Inductor's settings. `torch.compile(options=...)` sets them for Inductor alone, and Dynamo asks for `freezing` too."""
    import torch._inductor.config as settings

    return settings


@contextmanager
def without_onednn() -> Iterator[None]:
    """As torch.backends.mkldnn.flags(enabled=False), which also sets what is for other devices, and warns of it."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def ddp_ignored(model: nn.Module) -> list[str]:
    """The parameters and buffers that DDP leaves alone."""
    return list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def ddp_ignore(model: nn.Module, names: list[str]) -> None:
    """Have DDP leave these alone, and no others."""
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]


def ddp_check_finished(wrapped: nn.parallel.DistributedDataParallel) -> None:
    """A RuntimeError where the last backward pass has left a bucket without its exchange; the next forward pass would raise the same."""
    wrapped._check_reducer_finalized()  # type: ignore[no-untyped-call]


def ddp_logging_data(wrapped: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    """What DDP counts about itself: sizes of its buckets, times of its steps."""
    found: dict[str, Any] = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return found


def powersgd_compresses(rows: int, columns: int, rank: int, least_rate: float) -> bool:
    """Whether PyTorch's PowerSGD hook compresses a matrix of this shape."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    compresses, *_ = powerSGD_hook._should_compress(rows, columns, rank, least_rate)  # type: ignore[no-untyped-call]
    return bool(compresses)


def has_hooks(module: nn.Module) -> bool:
    """Whether anybody listens to a module's forward or backward pass."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def children(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules within, by their places, without a look at each."""
    return tuple(module._modules.values())  # type: ignore[arg-type]


def own_parameters(module: nn.Module) -> Iterable[nn.Parameter | None]:
    """A module's own parameters; where it has none of a name, None. Its attributes are looked for in three places."""
    return module._parameters.values()


def drop_load_hooks(module: nn.Module) -> None:
    """Remove all hooks that run after load_state_dict. A handle would not do: it knows the module, not a copy of it."""
    module._load_state_dict_post_hooks.clear()


def saved(node: Any, name: str) -> Any:
    """What a node of autograd's graph has kept of its call under this name; None where it has kept nothing."""
    return getattr(node, f"_saved_{name}", None)


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group that torch.distributed does not list. dist.new_group is collective over all ranks, and needs a default group first."""
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def untraced(kind: Kind) -> Kind:
    """Keep the compiler out of every method of a class and of all that it calls: of the process groups that are written in Python, which it
    enters inside a compiled model around DDP. It cannot compile an exchange through memory that other processes write, and fails trying.

    It costs nothing per call, while torch.compiler.disable costs a microsecond and the import of the compiler."""
    skip = eval_frame._FrameAction.SKIP
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return kind


def compile_in_place(model: nn.Module) -> None:
    """As `model.compile()`, which passes over a model whose own forward is PyTorch's (a Sequential) without a word: the compiler
    skips PyTorch's files. A function of ours around the call is compiled, and all that it calls."""
    inner = model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call)


def compiled_graphs() -> int:
    """How many graphs the compiler has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
