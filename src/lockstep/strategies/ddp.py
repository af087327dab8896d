"""The strategy `ddp`: PyTorch's DistributedDataParallel, its knobs and its compression hooks.

There is no `from __future__ import annotations` in this file: DDP compares a hook's annotations with the classes
themselves, and would not know them by name.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import InputError
from lockstep.placement import DEFAULT_BUCKET_MB, FIRST_BUCKET_BYTES, Placement
from lockstep.strategies import powersgd
from lockstep.strategies.base import Strategy, Watcher
from lockstep.strategies.flat import trained
from lockstep.strategies.plain_ddp import PlainDdp
from lockstep.strategies.powersgd import PowerSgd
from lockstep.torch_private import GradBucket, ddp_logging_data

# Of DDP's logging data, what a run keeps.
_SIZES = ("bucket_sizes", "rebuilt_bucket_sizes")
_COUNTS = (
    "iteration",
    "num_parameter_tensors",
    "total_parameter_size_bytes",
    "unused_parameter_size",
    "can_set_static_graph",
    *(
        f"{prefix}{name}"
        for prefix in ("", "avg_")
        for name in (
            "forward_compute_time",
            "backward_compute_time",
            "backward_comm_time",
            "backward_compute_comm_overlap_time",
        )
    ),
)

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Ddp(Strategy):
    """It averages over ranks, with and without a hook; we want the sum, hence the scale."""

    takes_group = True

    def __init__(
        self, model: nn.Module, placement: Placement, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(model, placement, device)
        settings = placement.ddp
        if settings.hook != "none":
            _check_real(model, settings.hook)
        wrapped = PlainDdp(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=None if settings.bucket_mb == DEFAULT_BUCKET_MB else settings.bucket_mb,
            gradient_as_bucket_view=settings.bucket_view,
            static_graph=settings.static_graph,
            find_unused_parameters=settings.find_unused_parameters
            is True,  # auto is settled before (training/trial.py)
            process_group=group,
        )
        self._exchanges: Exchanges | None = None
        self._powersgd: PowerSgd | None = None
        if settings.hook == "powersgd":
            # DDP's message about unused parameters would come between PowerSGD's on one rank and behind them on another.
            self._powersgd = PowerSgd(
                model, settings.powersgd_rank, group, in_order=settings.find_unused_parameters is True
            )
            self._exchanges = Exchanges(self._powersgd, powersgd.exchange)
        elif settings.hook != "none":
            self._exchanges = Exchanges(group, _compression(settings.hook))
        if self._exchanges is not None:
            wrapped.register_comm_hook(self._exchanges, _exchange)
        self.model = wrapped
        self._wrapped, self._group = wrapped, group
        self._no_sync: Callable[[], AbstractContextManager[None]] = wrapped.no_sync
        self.gradient_scale = float(dist.get_world_size(group))
        self._graph_known = not settings.static_graph
        self._bucket_bytes = int(settings.bucket_mb * (1 << 20))

    def no_exchange(self) -> AbstractContextManager[None]:
        if not self._graph_known:
            # DDP learns a static graph from its first backward, which has to exchange (an internal assertion fails otherwise).
            # What is averaged once more later on stays what it is, so this costs one exchange and changes no result.
            self._graph_known = True
            return nullcontext()
        return self._no_sync()

    def consolidate(self) -> None:
        """Every rank has the whole model. But a step that left out a parameter has not exchanged all gradients, which DDP says only in the next one."""
        self._wrapped.check_finished()

    def watch(self, watcher: Watcher) -> None:
        """Tell about every bucket's exchange. Before the first step: DDP takes no hook later, and keeps the one it has."""
        size = sum(p.numel() * p.element_size() for p in self._wrapped.module.parameters() if p.requires_grad)
        if self._exchanges is None and size <= min(FIRST_BUCKET_BYTES, self._bucket_bytes):
            # A hook in Python would cost a short step a tenth (measured), and would tell what the step's own clock knows.
            watcher.only_bucket = size
            return
        if self._exchanges is None:
            self._exchanges = Exchanges(self._group, _average)
            self._wrapped.register_comm_hook(self._exchanges, _exchange)
        self._exchanges.watcher = watcher

    def kept_bytes(self) -> int:
        """DDP's buckets have a place for every gradient."""
        buckets = sum(parameter.nbytes for parameter in trained(self._wrapped.module))
        return buckets + (self._powersgd.kept_bytes() if self._powersgd else 0)

    def state(self) -> dict[str, torch.Tensor]:
        """PowerSGD's error feedback."""
        return self._powersgd.state() if self._powersgd else {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        if self._powersgd:
            self._powersgd.load_state(state)

    def figures(self) -> dict[str, Any]:
        """What DDP has counted itself, in the first ten steps and every hundredth (docs/timeline.md). Times are nanoseconds."""
        found = ddp_logging_data(self._wrapped)
        sizes = {key: [int(size) for size in found[key].split(", ")] for key in _SIZES if found.get(key)}
        looks = {"find_unused_parameters": self._wrapped.find_unused_parameters}
        return sizes | looks | {key: found[key] for key in _COUNTS if key in found}


class Exchanges:
    """What DDP calls for every bucket that is full: the exchange, with its times where somebody watches."""

    def __init__(self, state: Any, hook: Hook) -> None:
        self._state, self._hook = state, hook
        self.watcher: Watcher | None = None

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        watcher = self.watcher
        if watcher is None or not watcher.active:
            return self._hook(self._state, bucket)
        begin = perf_counter_ns()
        # Every link of a chain of futures wakes Python up in another thread: where we do the exchange ourselves, ours is the only one.
        ours = self._hook is _average
        future: torch.futures.Future[Any] = (
            _start_average(self._state, bucket) if ours else self._hook(self._state, bucket)
        )
        launched = perf_counter_ns()
        index, size = bucket.index(), bucket.buffer().nbytes

        def over(future: torch.futures.Future[Any]) -> torch.Tensor:
            # Within the chain, not beside it: it is done before DDP goes on.
            watcher.bucket(index, size, begin, launched, perf_counter_ns())
            return _only(future) if ours else future.value()

        return future.then(over)


def _exchange(exchanges: Exchanges, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """By the name of bf16_compress_hook, DDP would refuse it without NCCL, though gloo adds up bf16 as well."""
    return exchanges.start(bucket)


def _average(group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook. It multiplies (PyTorch's allreduce_hook divides), which for three ranks is not the same bits."""
    future: torch.futures.Future[torch.Tensor] = _start_average(group, bucket).then(_only)
    return future


def _start_average(group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[list[torch.Tensor]]:
    """Without the checks of dist.all_reduce: it is called for every bucket, with the same tensor each time."""
    group = group or dist.group.WORLD
    assert group is not None
    buffer = bucket.buffer()
    buffer = torch.view_as_real(buffer) if buffer.is_complex() else buffer  # gloo adds up real numbers
    work = group.allreduce([buffer.mul_(1.0 / group.size())])
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future


def _only(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def _check_real(model: nn.Module, hook: str) -> None:
    """A hook would lose the imaginary part of complex gradients, and say nothing."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise InputError(f"ddp.hook={hook} compresses real numbers, and {name} is complex: leave ddp.hook out")


def _compression(name: str) -> Hook:
    """PyTorch's own hook. Each divides by the number of ranks in the group, as DDP does without one."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.fp16_compress_hook if name == "fp16" else default_hooks.bf16_compress_hook
