"""`python -m lockstep.predict.layers FILE`: how large a recipe's gradients are, when in the backward pass each one comes, which layers
exchange, and what an update of a part takes where the optimizer is divided.

It runs in a separate process, so that the command itself needs no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from lockstep.errors import InputError, LockstepError, RunFailed
from lockstep.placement import Placement
from lockstep.predict.messages import Gradient, Norm
from lockstep.recipe import Recipe

SAMPLES = 8
PASSES = 5
PARTS, UPDATES, MOST_UPDATES_S = (1, 2, 4, 8, 16, 64), 15, 3.0


class Question(msgspec.Struct, frozen=True, kw_only=True):
    recipe: Recipe
    placement: Placement
    data_root: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    gradients: list[Gradient]
    """By parameter, in the model's order."""
    norms: list[Norm]
    updates: list[tuple[int, float]]
    seconds_per_sample: float
    """Of forward and backward."""


def ask(question: Question) -> Answer:
    """Run this module in a child process and read its answer."""
    with tempfile.TemporaryDirectory(prefix="lockstep-predict-") as scratch:
        path = Path(scratch) / "question.json"
        path.write_bytes(msgspec.json.encode(question))
        done = subprocess.run([sys.executable, "-m", __name__, str(path)], capture_output=True, text=True)
    if done.returncode == InputError.exit_code:
        raise InputError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RunFailed(f"predict: the model's layers could not be timed: {said[-1] if said else done.returncode}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Answer)


def answer(question: Question, scratch: Path) -> Answer:
    import torch

    from lockstep import models
    from lockstep.data import open_data
    from lockstep.data.arrays import open_batches
    from lockstep.models import memory
    from lockstep.models.calling import call, cast, number_type
    from lockstep.strategies.units import units
    from lockstep.training.assemble import build_fitting
    from lockstep.training.loss import Loss

    recipe, placement = question.recipe, question.placement
    torch.set_num_threads(placement.threads or 1)
    data = open_data(recipe.data, question.data_root, scratch=scratch / "data", quiet=True)
    channels_last = placement.memory_format == "channels_last"
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    device = torch.device(placement.device)
    # As for an evaluation: layers that draw random numbers would ask for the samples' keys.
    model: Any = memory.arrange(build_fitting(recipe, data).eval().to(device=device), memory_format)
    batches = open_batches(data, "train", recipe, device, memory_format)
    samples = min(SAMPLES, batches.count)
    inputs, targets = batches.take(0, samples)
    inputs, loss_of = cast(inputs, number_type(model)), Loss(recipe, data.class_weights)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    came: dict[int, float] = {}
    for number, parameter in enumerate(trained):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: came.__setitem__(number, perf_counter()))
    shares, took = [], []
    for _ in range(1 + PASSES):
        came.clear()
        begin = perf_counter()
        loss = loss_of.plain(call(model, inputs), targets)
        backward = perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        end = perf_counter()
        # A gradient that never arrives counts as arriving at the end.
        shares.append([(came.get(number, end) - backward) / (end - backward) for number in range(len(trained))])
        took.append((end - begin) / samples)
    median = torch.tensor(shares[1:]).median(0).values.clamp(0, 1).tolist()
    of_unit = {id(parameter): number for number, unit in enumerate(units(model), 1) for parameter in unit.parameters()}
    gradients = [
        Gradient(
            bytes=parameter.nbytes,
            ready=share,
            rows=len(parameter) if parameter.dim() else 1,
            columns=parameter[0].numel() if parameter.dim() else 1,
            unit=of_unit.get(id(parameter), 0),
        )
        for parameter, share in zip(trained, median, strict=True)
    ]
    ready = {id(parameter): share for parameter, share in zip(trained, median, strict=True)}
    norms = [
        Norm(channels=layer.num_features, ready=ready.get(id(layer.weight), 1.0))
        for layer in model.modules()
        if isinstance(layer, models.layers.BatchNorm2d) and layer.synchronised
    ]
    divided = placement.zero or placement.strategy == "fsdp"
    return Answer(
        gradients=gradients,
        norms=norms,
        updates=_updates(recipe, placement, trained) if divided else [],
        seconds_per_sample=sorted(took[1:])[PASSES // 2],
    )


def _updates(recipe: Recipe, placement: Placement, trained: list[Any]) -> list[tuple[int, float]]:
    """What an update of the largest of N parts takes, as a share of the whole one, in turns."""
    import torch

    from lockstep.strategies.zero import divide
    from lockstep.training import optimizers

    def part(ranks: int) -> list[Any]:
        if placement.strategy == "fsdp":
            return [one[: -(-len(one) // ranks)] if one.dim() else one for one in trained]
        owners = divide([one.numel() for one in trained], ranks)
        loads = [
            sum(one.numel() for one, whose in zip(trained, owners, strict=True) if whose == n) for n in range(ranks)
        ]
        return [one for one, whose in zip(trained, owners, strict=True) if whose == loads.index(max(loads))]

    built = {}
    for ranks in PARTS:
        parameters = [torch.nn.Parameter(one.detach().clone()) for one in part(ranks)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        built[ranks] = optimizers.build(recipe.optimizer, parameters)
    took: dict[int, list[float]] = {ranks: [] for ranks in PARTS}
    began = perf_counter()
    for _ in range(UPDATES):
        for ranks, optimizer in built.items():
            begin = perf_counter()
            optimizer.step()
            took[ranks].append(perf_counter() - begin)
        if perf_counter() - began > MOST_UPDATES_S:
            break
    whole, *_ = medians = [sorted(took[ranks][1:] or took[ranks])[(len(took[ranks]) - 1) // 2] for ranks in PARTS]
    return [(ranks, one / whole) for ranks, one in zip(PARTS, medians, strict=True)]


def main() -> None:
    path = Path(sys.argv[1])
    try:
        found = answer(msgspec.json.decode(path.read_bytes(), type=Question), path.parent)
    except LockstepError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    print(json.dumps(msgspec.to_builtins(found)))


if __name__ == "__main__":
    main()
