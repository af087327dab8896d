"""The strategy `ddp`: PyTorch's DistributedDataParallel, its knobs and its compression hooks.

There is no `from __future__ import annotations` in this file: DDP compares a hook's annotations with the classes
themselves, and would not know them by name.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket

from lockstep.errors import InputError
from lockstep.placement import Ddp as Settings
from lockstep.placement import Placement

# PyTorch's own size. Left unstated, DDP starts with a small bucket of 1 MB, so that the exchange begins early.
DEFAULT_BUCKET_MB = 25.0
# DDP puts its buckets together anew after the first step, and PowerSGD remembers something for each: it starts after that.
POWERSGD_FROM_STEP = 2
# Keeps a gradient that is zero throughout from becoming 0 / 0.
POWERSGD_EPSILON = 1e-8


class Ddp:
    """It averages over ranks, with and without a hook; we want the sum, hence the scale."""

    exchange: Callable[[], None] | None = None

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        if placement.ranks == 1:
            raise InputError(
                "strategy=ddp exchanges between ranks, and there is one: add ranks=2, or leave strategy out"
            )
        settings = placement.ddp
        wrapped = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=None if settings.bucket_mb == DEFAULT_BUCKET_MB else settings.bucket_mb,
            gradient_as_bucket_view=settings.bucket_view,
            static_graph=settings.static_graph,
        )
        if settings.hook != "none":
            wrapped.register_comm_hook(*_hook(settings))
        self.model: nn.Module = wrapped
        self._no_sync: Callable[[], AbstractContextManager[None]] = wrapped.no_sync
        self.gradient_scale = float(placement.ranks)
        self._graph_known = not settings.static_graph

    def no_exchange(self) -> AbstractContextManager[None]:
        if not self._graph_known:
            # DDP learns a static graph from its first backward, which has to exchange (an internal assertion fails otherwise).
            # What is averaged once more later on stays what it is, so this costs one exchange and changes no result.
            self._graph_known = True
            return nullcontext()
        return self._no_sync()


def _hook(settings: Settings) -> tuple[Any, Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]]:
    """PyTorch's own hook and what it keeps. Each divides by the number of ranks, as DDP does without one."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if settings.hook == "fp16":
        return None, default_hooks.fp16_compress_hook
    if settings.hook == "bf16":
        return None, _bf16
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=settings.powersgd_rank,
        start_powerSGD_iter=POWERSGD_FROM_STEP,
        orthogonalization_epsilon=POWERSGD_EPSILON,
    )
    return state, powerSGD_hook.powerSGD_hook


def _bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook by another name: by its own, DDP refuses it without NCCL, though gloo adds up bf16 as well."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(state, bucket)
