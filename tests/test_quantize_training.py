"""Quantization-aware training: what one step computes, and two real ranks against one process.

This file is also the program that a rank runs: python test_quantize_training.py RANK RANKS FOLDER STRATEGY.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization.fake_quantize import FakeQuantize
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

from lockstep import strategies
from lockstep.backends import group
from lockstep.backends.ranks import Rank
from lockstep.data import open_data
from lockstep.data.batches import Batches
from lockstep.errors import InputError
from lockstep.models import build
from lockstep.placement import Placement
from lockstep.plan import share_of
from lockstep.quantize import training
from lockstep.quantize.fake import FakeConv2d, FakeLinear
from lockstep.recipe import Recipe, Regularize
from lockstep.training import optimizers
from lockstep.training.evaluate import Evaluation, evaluate
from lockstep.training.precision import Precision

CPU = torch.device("cpu")
RECIPE = Recipe(data="embedded", global_batch=32, seed=5, regularize=Regularize(batch_norm="synchronised"))
# The last look is at step 48; the batches after it find the ranges at rest.
STEPS, TEST = 52, 400


# the ranks


def batches(train: bool) -> Batches:
    data = open_data("embedded", quiet=True)
    images, labels = (data.train_images, data.train_labels) if train else (data.test_images, data.test_labels)
    return Batches(images, labels, data, RECIPE, CPU, torch.channels_last)


def train(rank: Rank, folder: Path, strategy: str) -> dict[str, Any]:
    """As training/loop.py does it, in as few words as possible."""
    samples, test = batches(True), batches(False)
    model = build(RECIPE).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    qat = training.prepare(model, test.take(0, 2)[0], RECIPE)
    placement = Placement(ranks=rank.world, strategy=strategy, launcher="spawn", backend="gloo")  # type: ignore[arg-type]
    if rank.world > 1:
        group.join(placement, rank, folder)
    made = strategies.build(strategy, model, placement, CPU)
    optimizer = optimizers.build(RECIPE.optimizer, model.parameters())
    own_ranges: list[Any] = []
    for step in range(1, STEPS + 1):
        start, stop = share_of(RECIPE.global_batch, rank.rank, rank.world)
        first = (step - 1) * RECIPE.global_batch
        images, labels = samples.take(first + start, first + stop)
        loss = nn.functional.cross_entropy(made.model(images), labels, reduction="sum")
        (loss * (made.gradient_scale / RECIPE.global_batch)).backward()
        if made.exchange:
            made.exchange()
        optimizer.step()
        for parameter in optimizer.parameters:
            parameter.grad = None
        if training.looks(step):
            own_ranges.append([layer.seen.tolist() for layer in qat._layers if layer.seen is not None])
        qat.after_step(step)
    precision = Precision(RECIPE, CPU)

    def tested(candidate: nn.Module) -> Evaluation:
        return evaluate(candidate, test, TEST, share_of(TEST, rank.rank, rank.world), 100, precision)

    return {
        "own_ranges": own_ranges,
        "ranges": [layer.input_range.tolist() for layer in qat._layers],
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "fake": tested(model).accuracy,
        "int8": qat.after_epoch(tested),
        "int8_weights": [layer.tolist() for name, layer in qat.int8().named_parameters() if name.endswith("weight")],
    }


def main() -> None:
    rank, ranks, folder, strategy = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    found = train(Rank(rank, ranks, rank, ranks), folder, strategy)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    group.leave()
    group.exit_now(0)


if __name__ == "__main__":
    main()


def run_ranks(folder: Path, ranks: int, strategy: str) -> list[dict[str, Any]]:
    folder.mkdir()
    words = [[sys.executable, __file__, str(rank), str(ranks), str(folder), strategy] for rank in range(ranks)]
    started = [subprocess.Popen(each, env={**os.environ, "OMP_NUM_THREADS": "1"}) for each in words]
    assert [process.wait(timeout=120) for process in started] == [0] * ranks
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def flat(values: Any) -> Tensor:
    return torch.cat([torch.tensor(value).flatten().double() for value in values])


def test_two_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path / "two", 2, "ddp")
    alone = train(Rank(0, 1, 0, 1), tmp_path, "single")
    # Each rank saw something else, and all of them made the same of it, which is what one process saw.
    assert first["own_ranges"] != second["own_ranges"]
    assert first["ranges"] == second["ranges"]
    assert first["weights"] == second["weights"]
    assert first["int8_weights"] == second["int8_weights"]
    torch.testing.assert_close(flat(first["ranges"]), flat(alone["ranges"]), rtol=0.02, atol=0.02)
    torch.testing.assert_close(flat(first["weights"]), flat(alone["weights"]), rtol=0, atol=0.01)
    # One test of all images, shared between the ranks; the int8 model answers nearly as the fake one does.
    assert first["int8"]["int8_accuracy"] == second["int8"]["int8_accuracy"]
    assert first["int8"]["int8_accuracy"] == pytest.approx(first["fake"], abs=0.02)
    assert first["int8"]["int8_accuracy"] == pytest.approx(alone["int8"]["int8_accuracy"], abs=0.05)
    assert first["fake"] > 0.3, "it does not learn"


# one step


def test_when_the_ranges_are_looked_at() -> None:
    chosen = [step for step in range(1, 100) if training.looks(step)]
    assert chosen == [1, 2, 4, 8, 16, 32, 48, 64, 80, 96]
    assert [training.looks_until(step) for step in (1, 3, 4, 15, 16, 31, 32, 99)] == [1, 2, 3, 4, 5, 5, 6, 10]


def small() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))


def test_a_step_has_the_gradients_of_pytorchs_fake_quantization() -> None:
    images, labels = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4
    ours, theirs = small(), small()
    qat = training.prepare(ours, images[:2], RECIPE)
    assert isinstance(ours[0], FakeConv2d)
    assert isinstance(ours[3], FakeLinear)
    ours(images)  # the first pass only looks
    qat.after_step(1)

    def rounded_input(values: Tensor) -> Tensor:
        found: Tensor = FakeQuantize(MinMaxObserver, 0, 127, dtype=torch.quint8)(values)
        return found

    def rounded_weight(values: Tensor) -> Tensor:
        kind = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}
        found: Tensor = FakeQuantize(PerChannelMinMaxObserver, -127, 127, **kind)(values)
        return found

    made = nn.functional.conv2d(rounded_input(images), rounded_weight(theirs[0].weight), theirs[0].bias).relu()
    # Ours took its ranges from the pass before, whose inputs were not rounded yet.
    hidden = nn.functional.conv2d(images, rounded_weight(theirs[0].weight), theirs[0].bias).relu()
    inputs = MinMaxObserver(dtype=torch.quint8, quant_min=0, quant_max=127)
    inputs(hidden)
    scale, zero = inputs.calculate_qparams()
    before = torch.fake_quantize_per_tensor_affine(made.flatten(1), scale.item(), int(zero), 0, 127)
    scores = nn.functional.linear(before, rounded_weight(theirs[3].weight), theirs[3].bias)
    nn.functional.cross_entropy(scores, labels).backward()
    answers = ours(images)
    torch.testing.assert_close(answers, scores)
    nn.functional.cross_entropy(answers, labels).backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


def test_the_range_is_the_mean_of_the_first_looks_and_then_a_moving_average() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    qat = training.prepare(model, torch.zeros(2, 1, 2, 2), RECIPE)
    highest = torch.rand(200, generator=torch.Generator().manual_seed(4)) + 1
    seen: list[float] = []
    expected = 0.0
    for step in range(1, 201):
        images = torch.zeros(2, 1, 2, 2)
        images[0, 0, 0, 0] = highest[step - 1]
        model(images)
        qat.after_step(step)
        if training.looks(step):
            seen.append(highest[step - 1].item())
            expected = sum(seen) / len(seen) if len(seen) <= 10 else 0.9 * expected + 0.1 * seen[-1]
        assert model[1].input_range[1].item() == pytest.approx(expected, rel=1e-5)
    assert len(seen) > 12


def test_weights_and_ranges_come_back_from_a_state_dict() -> None:
    images = torch.randn(6, 1, 8, 8)
    model = small()
    qat = training.prepare(model, images[:2], RECIPE)
    model(images)
    qat.after_step(1)
    other = small()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    again = training.prepare(other, images[:2], RECIPE)
    state = copy.deepcopy(model.state_dict())
    assert set(state) - set(small().state_dict()) == {"0.input_range", "3.input_range"}
    # No strategy sends them around: they are settled between all ranks.
    assert {"0.input_range", "3.input_range"} <= set(model._ddp_params_and_buffers_to_ignore)
    other.load_state_dict(state)
    torch.testing.assert_close(other(images), model(images), rtol=0, atol=0)
    torch.testing.assert_close(again.int8()(images), qat.int8()(images), rtol=0, atol=0)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(InputError, match="has no Conv2d or Linear layer that can be quantized"):
        training.prepare(nn.Sequential(nn.BatchNorm1d(3)), torch.zeros(2, 3), RECIPE)
    assert not dist.is_initialized()
