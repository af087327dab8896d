"""The units of `fsdp`: what of a model is gathered together, what cannot be divided, and whether all ranks gather the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import InputError

_INSTEAD = "choose strategy=ddp, with zero=true where memory is short"


def units(model: nn.Module) -> list[nn.Module]:
    """Each child by itself, and each member of a list of layers, so that only one is whole at a time.

    Weights that several of them share, and the model's own, are left to the model itself, which is a unit as well.
    """
    found = [unit for child in model.children() for unit in _with_forward(child)]
    users = Counter(id(parameter) for unit in found for parameter in unit.parameters())
    users.update(id(parameter) for parameter in model.parameters(recurse=False))
    return [unit for unit in found if (own := list(unit.parameters())) and all(users[id(p)] == 1 for p in own)]


def _with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """A ModuleList or ModuleDict is never called itself, only its members are."""
    if type(module).forward is not nn.Module.forward:
        yield module
        return
    for member in module.children():
        yield from _with_forward(member)


def check(model: nn.Module) -> None:
    """Refuse what `fully_shard` cannot divide."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise InputError(
                f"strategy=fsdp: {name} has no dimension to be divided along: give it the shape (1,), or {_INSTEAD}"
            )
    inner = units(model)
    taken = {id(parameter) for unit in inner for parameter in unit.parameters()}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    for parameters in (*(list(unit.parameters()) for unit in inner), rest):
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters if p.requires_grad})
        if len(kinds) > 1:
            raise InputError(
                f"strategy=fsdp: weights of {' and '.join(kinds)} are gathered together, and PyTorch wants one type: {_INSTEAD}"
            )


class Alike:
    """Whether all ranks call the same units in the same order, and have the same gradients.

    Each call gathers weights, and ranks that are in different ones (a branch that depends on the samples) would put together what does not
    belong together, without an error where the sizes are the same. A running hash of the calls costs no message in a step; it is compared
    before any result is taken.
    """

    def __init__(self, modules: Sequence[nn.Module], once: bool, group: dist.ProcessGroup | None) -> None:
        """`once`: weights are gathered by the first call of a step only."""
        self._once, self._group = once, group
        self._hash, self._seen = 0, set[int]()
        for number, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._called, number))

    def _called(self, number: int, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled() or (self._once and number in self._seen):
            return
        self._seen.add(number)
        self._hash = hash((self._hash, number))

    def ends(self, gradients: tuple[bool, ...]) -> None:
        """The step ends, with these gradients."""
        self._seen.clear()
        self._hash = hash((self._hash, gradients))

    def check(self) -> None:
        """Collective."""
        mine = self._hash >> 1  # whose negative is in the range, too
        found = torch.tensor([mine, -mine], device="cuda" if dist.get_backend(self._group) == "nccl" else "cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        if found[0] != mine or found[1] != -mine:
            raise InputError(
                "strategy=fsdp: ranks called different layers or got different gradients in a step, and so gathered what does not belong "
                "together: choose strategy=flat, or strategy=ddp with ddp.find_unused_parameters=true"
            )
