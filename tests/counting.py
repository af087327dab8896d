"""`python -m counting JSON`: which messages a step of the real strategies sends, as one of N ranks that are not there.

Its process group has any number of ranks and one process: it writes down what is to be sent and sends nothing.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from lockstep import models, strategies
from lockstep.backends.python_group import PythonGroup, register
from lockstep.backends.work import Done
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.torch_private import untraced
from lockstep.training import optimizers

STEPS = 4
"""DDP puts its buckets together after the first, and PowerSGD compresses after the second."""
SEEN: list[tuple[str, int]] = []


@untraced
class Counting(PythonGroup):
    backend_name = "counting"

    def _note(self, name: str, sent: torch.Tensor, result: Any) -> Done:
        SEEN.append((name, sent.nbytes))
        return Done(result)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Done:
        return self._note("all_reduce", tensors[0], tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Done:
        return self._note("broadcast", tensors[0], tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Done:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self._note("all_gather", inputs[0], outputs)

    def all_gather_single(self, output: torch.Tensor, part: torch.Tensor, options: Any = None) -> Done:
        output.copy_(part.repeat(self.size()))
        return self._note("all_gather", output, output)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, options: Any = None) -> Done:
        output.copy_(whole[: output.numel()])
        return self._note("reduce_scatter", whole, output)


def main() -> None:
    asked = json.loads(sys.argv[1])
    placement = msgspec.convert(asked["placement"], Placement)
    recipe = msgspec.convert(asked["recipe"], Recipe)
    register(Counting.backend_name, lambda common, _: Counting(common.store, common.group_rank, common.group_size))
    dist.init_process_group(Counting.backend_name, store=dist.HashStore(), rank=0, world_size=placement.ranks)
    model = models.build(recipe, models.blank(tuple(asked["shape"])))
    strategy = strategies.build(placement.strategy, model, placement, torch.device("cpu"))
    optimizer = strategy.optimizer(partial(optimizers.build, recipe.optimizer))
    images = torch.rand(4, *asked["shape"])
    for _ in range(STEPS):
        SEEN.clear()
        for _ in range((placement.accumulation or 1) - 1):
            with strategy.no_exchange():
                strategy.model(images).logsumexp(1).sum().backward()
        strategy.model(images).logsumexp(1).sum().backward()
        strategy.exchange()
        optimizer.step()
        optimizer.exchange()
        for parameter in optimizer.parameters:
            parameter.grad = None
    print(json.dumps(SEEN))


if __name__ == "__main__":
    main()
