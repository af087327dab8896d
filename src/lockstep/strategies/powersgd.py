"""DDP's PowerSGD hook with a memory that survives: kept by parameter, not by bucket.

The hook remembers, for each bucket, what it left out of the gradients so far (each rank its own: the error feedback) and where
it starts to look for the next approximation (Q, the same on all ranks). DDP puts its buckets together anew after its first step,
also after the first one of a resumed run. So what is known of each parameter is laid out for the buckets as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.torch_private import GradBucket, powersgd_compresses

# DDP puts its buckets together anew after the first step, and starts to compress after that.
FROM_STEP = 2
# Keeps a gradient that is zero throughout from becoming 0 / 0.
EPSILON = 1e-8


class PowerSgd:
    """PyTorch's hook and its state, for one model."""

    def __init__(self, model: nn.Module, rank: int, group: dist.ProcessGroup | None, in_order: bool = False) -> None:
        """`in_order`: each bucket's exchange is over before DDP goes on, which sends another message behind the last one."""
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._module: Any = powerSGD_hook
        self._group, self._in_order = group, in_order
        self._hooked = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=FROM_STEP,
            orthogonalization_epsilon=EPSILON,
        )
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._buckets: dict[int, list[str]] = {}
        """The parameters of each bucket, in order, as the memory is laid out now."""
        self._under_way: torch.futures.Future[torch.Tensor] | None = None
        self._errors: dict[str, torch.Tensor] = {}
        self._starts: dict[str, torch.Tensor] = {}
        """What is known of parameters and not laid out yet."""

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The exchange of one bucket."""
        # One bucket after the other. PyTorch's hook goes on to its second and third message from the thread in which the first has
        # arrived: of several buckets at once ranks would send in different orders, and gloo's two threads would wait for each other.
        if self._under_way is not None:
            self._under_way.wait()
        index, names = bucket.index(), [self._names[id(parameter)] for parameter in bucket.parameters()]
        if self._buckets.get(index) != names:
            if index in self._buckets:
                self._take_up()
            self._lay_out(index, names)
        future: torch.futures.Future[torch.Tensor] = self._module.powerSGD_hook(self._hooked, bucket)
        self._under_way = future
        if self._in_order:
            future.wait()
        return future

    def kept_bytes(self) -> int:
        """The errors, and the matrices that the next step starts from."""
        state = self._hooked
        held = [state.error_dict, state.p_memory_dict, state.q_memory_dict]
        return sum(tensor.nbytes for tensors in held for tensor in tensors.values())

    def state(self) -> dict[str, torch.Tensor]:
        """Collective: every rank's errors by parameter, what all have in common, and how many steps there were."""
        self._take_up()
        kept = {"powersgd.step": torch.tensor(self._hooked.iter)}
        kept |= {f"powersgd.start.{name}": tensor for name, tensor in self._starts.items()}
        for name, error in self._errors.items():
            every = [torch.empty_like(error) for _ in range(dist.get_world_size(self._group))]
            dist.all_gather(every, error, group=self._group)
            kept[f"powersgd.error.{name}"] = torch.stack(every)
        return kept

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Of the same number of ranks each takes its own errors; of another, each takes their mean, so that no part of the sum is lost."""
        if "powersgd.step" not in state:
            return
        self._hooked.iter = int(state["powersgd.step"])
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        for key, tensor in state.items():
            kind, name = key.split(".", 2)[1:] if key.count(".") > 1 else ("", "")
            if name not in self._shapes:
                continue
            if kind == "start" and tensor.numel() == self._start_size(name):
                self._starts[name] = tensor.clone()
            if kind == "error":
                self._errors[name] = tensor[rank].clone() if len(tensor) == ranks else tensor.mean(0)

    def _take_up(self) -> None:
        """Out of the buckets' memory, back to each parameter."""
        state = self._hooked
        for index, names in self._buckets.items():
            if index in state.error_dict:
                sizes = [self._shapes[name].numel() for name in names]
                self._errors |= zip(
                    names, (part.clone() for part in torch.split(state.error_dict[index], sizes)), strict=True
                )
            if index in state.q_memory_dict:
                compressed = list(self._compressed(names))
                parts = torch.split(state.q_memory_dict[index], [self._start_size(name) for name in compressed])
                self._starts |= zip(compressed, (part.clone() for part in parts), strict=True)
        for memory in (self._buckets, state.error_dict, state.p_memory_dict, state.q_memory_dict):
            memory.clear()

    def _lay_out(self, index: int, names: list[str]) -> None:
        """Into the memory of one bucket, what is known of its parameters."""
        state = self._hooked
        self._buckets[index] = names
        if all(name in self._errors for name in names):
            state.error_dict[index] = torch.cat([self._errors[name] for name in names])
        compressed = list(self._compressed(names))
        if compressed and all(name in self._starts for name in compressed):
            state.q_memory_dict[index] = torch.cat([self._starts[name] for name in compressed])
            left = sum(self._shapes[name][0] * self._rank(name) for name in compressed)
            state.p_memory_dict[index] = state.q_memory_dict[index].new_empty(left)  # computed anew in every step

    def _compressed(self, names: list[str]) -> Iterator[str]:
        """The parameters that the hook compresses, in the order of its memory: those of one shape follow each other."""
        shapes: dict[tuple[int, int], list[str]] = {}
        for name in names:
            n, m = self._matrix(name)
            if powersgd_compresses(n, m, self._rank(name), self._hooked.min_compression_rate):
                shapes.setdefault((n, m), []).append(name)
        for alike in shapes.values():
            yield from alike

    def _matrix(self, name: str) -> tuple[int, int]:
        shape = self._shapes[name]
        rows = shape[0] if shape else 1
        return rows, shape.numel() // max(rows, 1)

    def _rank(self, name: str) -> int:
        return int(min(*self._matrix(name), self._hooked.matrix_approximation_rank))

    def _start_size(self, name: str) -> int:
        return self._matrix(name)[1] * self._rank(name)


def exchange(memory: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """As DDP calls a hook."""
    future: torch.futures.Future[torch.Tensor] = memory.start(bucket)
    return future
