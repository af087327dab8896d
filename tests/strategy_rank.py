"""What a rank of test_strategies.py computes, and the same in one process, written as plainly as possible.

`train` keeps to the contract of `strategies.Strategy` and nothing else; the references share no code with it
beyond the model and the samples. `shm_rank.Session` runs `train` in real processes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from lockstep import strategies
from lockstep.placement import Ddp, Fsdp, LocalSgd, Placement
from lockstep.recipe import Optimizer as Settings
from lockstep.strategies import powersgd, zero
from lockstep.training import optimizers

# Full batches, one that no number of ranks divides, and one that leaves ranks without a sample.
BATCHES = (12, 12, 7, 12, 1, 12)
Tensors = list[torch.Tensor]


def build_model(statistics: bool = False, seed: int = 5, double: bool = False) -> nn.Module:
    """Seven or nine parameters of very different sizes; with `statistics`, batch norm's buffers. The same numbers in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            *([nn.BatchNorm2d(6)] if statistics else []),
            nn.Tanh(),
            nn.Conv2d(6, 4, 3, bias=False),
            nn.Flatten(),
            nn.Linear(64, 16),
            nn.Tanh(),
            nn.Linear(16, 5),
        )
    model = model.double() if double else model
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def samples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    images = torch.randn(count, 2, 6, 6, generator=generator)
    return images, torch.randint(0, 5, (count,), generator=generator)


def share(count: int, rank: int, ranks: int) -> slice:
    """Neighbours in the batch, as evenly as it goes."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def placement(
    ranks: int,
    strategy: str,
    passes: int,
    ddp: dict[str, Any] | None = None,
    local: dict[str, Any] | None = None,
    fsdp: dict[str, Any] | None = None,
) -> Placement:
    knobs: dict[str, Any] = {
        "ddp": Ddp(**(ddp or {})),
        "fsdp": Fsdp(**(fsdp or {})),
        "local_sgd": LocalSgd(**(local or {})),
    }
    return Placement(ranks=ranks, strategy=strategy, accumulation=passes, **knobs)


def backward(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, weight: float) -> None:
    scores = model(images.to(next(model.parameters()).dtype))
    (functional.cross_entropy(scores, labels, reduction="sum") * weight).backward()  # type: ignore[no-untyped-call]


def gradients_of_step(strategy: Any, step: int, count: int, rank: int, ranks: int, passes: int) -> None:
    """Forward and backward of this rank's share, in so many passes, and the exchange."""
    images, labels = samples(step, count)
    mine = range(count)[share(count, rank, ranks)]
    parts = [part for part in torch.tensor_split(torch.tensor(list(mine), dtype=torch.int64), passes) if len(part)]
    for number, part in enumerate(parts or [torch.tensor([0])], 1):
        weight = strategy.gradient_scale / count if parts else 0.0
        with nullcontext() if number >= len(parts) else strategy.no_exchange():
            backward(strategy.model, images[part], labels[part], weight)
    strategy.exchange()


def train(
    rank: int,
    ranks: int,
    strategy: str,
    settings: dict[str, Any],
    ddp: dict[str, Any] | None = None,
    local: dict[str, Any] | None = None,
    passes: int = 1,
    batches: Sequence[int] = BATCHES,
    statistics: bool = False,
    settle_after: Sequence[int] = (),
    start: dict[str, Any] | None = None,
    double: bool = False,
    fsdp: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Weights at the end, and the gradients of every step, on one rank. `start` is the result of the steps before."""
    model = build_model(statistics, double=double)
    if start:
        model.load_state_dict(start["weights"])
    if rank:  # ranks start from other weights unless the strategy sees to it
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    made = strategies.build(strategy, model, placement(ranks, strategy, passes, ddp, local, fsdp), torch.device("cpu"))
    optimizer = made.optimizer(lambda parameters: optimizers.build(Settings(**settings), parameters))
    found: list[Tensors] = []
    if start:
        made.load_state(start["state"])
    for step, count in enumerate(batches, 1 + (start["steps"] if start else 0)):
        gradients_of_step(made, step, count, rank, ranks, passes)
        found.append([made.whole(index, p.grad).clone() for index, p in enumerate(optimizer.parameters)])
        optimizer.step()
        for parameter in optimizer.parameters:
            parameter.grad = None
        made.after_step(step)
        if step in settle_after:
            made.consolidate()
    made.consolidate()
    state = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in model.state_dict().items()}
    state = {name: tensor.detach().contiguous().clone() for name, tensor in state.items()}
    return {
        "weights": state,
        "gradients": [[g.contiguous() for g in step] for step in found],
        "steps": len(batches),
        "state": {key: tensor.clone() for key, tensor in made.state().items()},
    }


def interrupted(rank: int, ranks: int, **arguments: Any) -> dict[str, Any]:
    """Four steps; then all is built anew from what a checkpoint keeps, for the rest."""
    first = train(rank, ranks, batches=BATCHES[:4], **arguments)
    return train(rank, ranks, batches=BATCHES[4:], start=first, **arguments)


def in_own_group(rank: int, ranks: int, hook: str) -> list[Tensors]:
    """Gradients of three steps of each rank's own samples, by a DDP whose group is this rank alone; and the same without DDP."""
    groups = [dist.new_group([member]) for member in range(ranks)]  # all ranks take part in the making of every group
    knobs = {"hook": hook, "powersgd_rank": 64}
    model, bare = build_model(), build_model()
    made = strategies.STRATEGIES["ddp"](model, placement(ranks, "ddp", 1, knobs), torch.device("cpu"), groups[rank])
    found: list[Tensors] = []
    for step in range(3):
        images, labels = samples(100 * rank + step, 12)
        for one in (made.model, bare):
            one.zero_grad()
            backward(one, images, labels, 1 / 12)
        found.append([p.grad.clone() for one in (model, bare) for p in one.parameters() if p.grad is not None])
    return found


class Bucket:
    """Some parameters' gradients, as DDP hands them to a hook."""

    def __init__(self, index: int, parameters: list[nn.Parameter], seed: int, last: bool) -> None:
        self._index, self._parameters, self._last = index, parameters, last
        sizes = [p.numel() for p in parameters]
        self._buffer = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))
        parts = self._buffer.split(sizes)
        self._gradients = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> Tensors:
        return self._gradients

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters


def rebuilt_buckets(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """PowerSGD's memory after a step whose second bucket is another one than before, while the first is still under way.

    DDP builds its buckets anew after a resumed run's first step, and its first bucket may stay as it was. All but the first rank
    come to the first bucket late, so that on the first rank it cannot be over when the second one starts.
    """
    model = nn.Sequential(
        *(nn.Linear(24, 24) for _ in range(3))
    )  # biases are not compressed: they are the first message
    first, second, third = (list(layer.parameters()) for layer in model)
    memory = powersgd.PowerSgd(model, 1, None)
    memory._hooked.iter = powersgd.FROM_STEP
    store = dist.distributed_c10d._get_default_store()
    for step, rest in enumerate(([second, third], [second + third])):
        buckets = [first, *rest]
        for index, parameters in enumerate(buckets):
            if step and index == 0 and rank:
                store.wait(["the first rank has started its second bucket"])
            if step and index == 1 and rank == 0:
                threading.Timer(0.2, store.set, ("the first rank has started its second bucket", "")).start()
            bucket: Any = Bucket(index, parameters, 100 * step + 10 * index + rank, index + 1 == len(buckets))
            future = memory.start(bucket)
        future.wait()
    return memory.state()


class Branches(nn.Module):
    """Two heads, of which a step uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.body, self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = torch.tanh(self.body(x))
        result: torch.Tensor = self.first(y) + (self.second(y) if both else 0)
        return result


def unused_parameters(rank: int, ranks: int, find: bool, own: bool) -> Any:
    """Three steps in which only rank 0 uses the second head (`own`), or nobody does. The gradients, or what the error says."""
    model = Branches()
    made = strategies.build(
        "ddp", model, placement(ranks, "ddp", 1, {"find_unused_parameters": find}), torch.device("cpu")
    )
    found = []
    for step in range(3):
        images = torch.randn(4 * ranks, 4, generator=torch.Generator().manual_seed(step))[4 * rank : 4 * rank + 4]
        try:
            scores = made.model(images, own and rank == 0)
        except ValueError as error:
            return str(error)
        model.zero_grad()
        (scores.square().sum() * made.gradient_scale).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


def fsdp_parts(rank: int, ranks: int, settings: dict[str, Any], replicas: int = 1) -> dict[str, Any]:
    """What a rank keeps, what it puts together, and an evaluation in which ranks do not wait for each other."""
    model = build_model()
    chosen = placement(ranks, "fsdp", 1, fsdp={"replicas": replicas})
    made: Any = strategies.build("fsdp", model, chosen, torch.device("cpu"))

    def make() -> Any:
        return made.optimizer(lambda parameters: optimizers.build(Settings(**settings), parameters))

    optimizer, other = make(), make()
    for step in (1, 2):
        gradients_of_step(made, step, 12, rank, ranks, 1)
        optimizer.step()
    state = copy.deepcopy(optimizer.state())
    other.load_state(state)
    made.consolidate()
    with torch.inference_mode():
        images, labels = samples(9, 8)
        for _ in range(1 + rank):  # as many as a rank likes: nothing is exchanged
            loss = float(functional.cross_entropy(model(images), labels))
    made.resume_training()
    gradients_of_step(made, 3, 12, rank, ranks, 1)
    optimizer.step()
    kept = sum(parameter.numel() for parameter in optimizer.parameters)
    norm = made.global_norm(torch.tensor([float(rank % (ranks // replicas))]))
    made.load_weights(build_model(seed=6).state_dict())
    loaded = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    return {
        "norm": float(norm),
        "loaded": loaded,
        "kept": kept,
        "state": state,
        "reloaded": other.state(),
        "evaluated": loss,
    }


def count_messages(rank: int, ranks: int, strategy: str, passes: int, **more: Any) -> list[int]:
    """The collectives of each of four steps, as PyTorch's own profiler sees them leave, whoever called them."""
    model = build_model()
    made = strategies.build(strategy, model, placement(ranks, strategy, passes, **more), torch.device("cpu"))
    counts = []
    for step in range(1, 5):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            gradients_of_step(made, step, 24, rank, ranks, passes)
        counts.append(sum(event.count for event in profile.key_averages() if event.key.startswith("c10d::")))
        for parameter in model.parameters():
            parameter.grad = None
    return counts


def build_thin(channels_last: bool) -> nn.Module:
    """Convolutions of one channel and of one tap, whose weights lie in memory in both orders at once, or in neither."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 3, 1), nn.Conv2d(3, 1, 3), nn.Linear(9, 5))
    order = torch.channels_last if channels_last else torch.contiguous_format
    return model.to(memory_format=order)  # type: ignore[call-overload, no-any-return]


def zero_and_whole(
    rank: int,
    ranks: int,
    settings: dict[str, Any],
    start: Any = None,
    change_lr: bool = True,
    thin: bool = False,
    channels_last: bool = True,
) -> dict[str, Any]:
    """Five steps by the divided optimizer and by the undivided one, from the same state, with the same gradients."""
    result: dict[str, Any] = {}
    for kind in ("zero", "whole"):
        model = build_thin(channels_last) if thin else build_model()
        parameters = list(model.parameters())

        def make(part: list[nn.Parameter]) -> Any:
            return optimizers.build(Settings(**settings), part)

        optimizer = zero.zero_optimizer(make, parameters) if kind == "zero" else make(parameters)
        if start:
            optimizer.load_state(copy.deepcopy(start))
        for step in range(5):
            if step == 3 and change_lr:
                optimizer.lr = 0.007
            give_gradients(parameters, step)
            optimizer.step()
            if kind == "zero":
                optimizer.exchange()
        state = optimizer.state()
        result[kind] = {
            "weights": [p.detach().contiguous() for p in parameters],
            "state": {key: [tensor.contiguous() for tensor in values] for key, values in state.items()},
        }
        if kind == "zero":
            kept = optimizer.inner.state()
            result["own"] = sum(tensor.numel() for values in kept.values() for tensor in values)
    return result


def give_gradients(parameters: Sequence[nn.Parameter], step: int) -> None:
    """The same on all ranks, as after an exchange. One parameter has none in the first two steps."""
    generator = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if index == 2 and step < 2 else torch.empty_like(parameter).copy_(gradient)


def torch_zero(rank: int, ranks: int, lr: float, decay: float) -> Tensors:
    """The same five steps (without the change of the learning rate) by PyTorch's own ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = list(build_model().parameters())
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=lr, weight_decay=decay)
    for step in range(5):
        give_gradients(parameters, step)
        optimizer.step()
    return [parameter.detach().contiguous() for parameter in parameters]


def alone(make: Callable[[Any], torch.optim.Optimizer], batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """One process: the mean loss of each batch, PyTorch's own optimizer."""
    model = build_model()
    optimizer = make(model.parameters())
    found = []
    for step, count in enumerate(batches, 1):
        optimizer.zero_grad()
        images, labels = samples(step, count)
        nn.CrossEntropyLoss()(model(images), labels).backward()
        found.append([p.grad.clone().contiguous() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return {"weights": {k: v.detach().contiguous() for k, v in model.state_dict().items()}, "gradients": found}


def local_reference(
    make: Callable[[Any], torch.optim.Optimizer],
    ranks: int,
    every: int,
    warm_start: int = 0,
    outer: tuple[float, float] | None = None,
    batches: Sequence[int] = BATCHES,
    settle_after: Sequence[int] = (),
) -> dict[str, torch.Tensor]:
    """Local SGD, and DiLoCo with `outer`, as a list of models in one process, in float64. Rounds end where `settle_after` says, too."""
    models = [build_model(double=True) for _ in range(ranks)]
    own = [make(model.parameters()) for model in models]
    anchor = [p.detach().clone() for p in models[0].parameters()]
    outer_optimizer = None
    if outer:
        anchor = [nn.Parameter(tensor) for tensor in anchor]
        outer_optimizer = torch.optim.SGD(anchor, lr=outer[0], momentum=outer[1], nesterov=outer[1] > 0)
    since = 0
    for step, count in enumerate(batches, 1):
        images, labels = samples(step, count)
        images = images.double()
        for rank, (model, optimizer) in enumerate(zip(models, own, strict=True)):
            optimizer.zero_grad()
            if step <= warm_start:
                nn.CrossEntropyLoss()(model(images), labels).backward()
            else:
                mine = share(count, rank, ranks)
                scores = model(images[mine])
                per_sample = functional.cross_entropy(scores, labels[mine], reduction="none")
                (per_sample.sum() * ranks / count).backward()
            optimizer.step()
        if step == warm_start:
            for tensor, parameter in zip(anchor, models[0].parameters(), strict=True):
                tensor.data.copy_(parameter.data)
        since += step > warm_start
        if since and (since == every or step in settle_after or step == len(batches)):
            since = 0
            with torch.no_grad():
                for tensor, *parameters in zip(anchor, *(model.parameters() for model in models), strict=True):
                    mean = torch.stack([p.data for p in parameters]).mean(0)
                    if outer_optimizer:
                        tensor.grad = tensor.data - mean
                    else:
                        tensor.copy_(mean)
            if outer_optimizer:
                outer_optimizer.step()
            for model in models:
                for parameter, tensor in zip(model.parameters(), anchor, strict=True):
                    parameter.data.copy_(tensor.data)
    return {name: tensor.detach().contiguous() for name, tensor in models[0].state_dict().items()}
