"""The training loop against independent versions of itself: a naive loop, a hand count, and real ranks."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from lockstep import models
from lockstep.data import open_data
from lockstep.data.batches import Batches, sample_order
from lockstep.measure.memory import MemoryMeter, TensorMeter, bytes_of
from lockstep.measure.records import read_steps
from lockstep.recipe import Recipe
from lockstep.run import Run
from lockstep.verify.records import step_losses
from support import SHORT, Cli, assert_follows, train_here

# The first losses of the short recipe in float64; the file says what they depend on. A change that should not alter the
# mathematics must give them again.
GOLDEN = Path(__file__).with_name("golden_losses.json")


@pytest.fixture(scope="module")
def alone(alone: dict[str, Any]) -> Run:
    return Run(Path(alone["run"]))


@pytest.fixture(scope="module")
def three(module_cli: Cli) -> Run:
    """Three ranks on whatever cores there are; 31, the last batch, does not divide by three."""
    return Run(Path(module_cli.run(*SHORT, "ranks=3", "strategy=ddp", "accumulation=2", "threads=1")["run"]))


def naive_losses(recipe: Recipe, steps: int) -> list[float]:
    """The same training written as plainly as possible, sample by sample where it can be. Shares no code with ours
    beyond the data, the model and the order of samples."""
    data = open_data(recipe.data, quiet=True)
    model = models.build(recipe)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.optimizer.lr)
    losses: list[float] = []
    assert recipe.train_limit
    for epoch in range(1, recipe.epochs + 1):
        order = sample_order(recipe, epoch, recipe.train_limit).tolist()
        for first in range(0, len(order), recipe.global_batch):
            chosen = order[first : first + recipe.global_batch]
            images = torch.stack([(torch.tensor(data.train_images[i]).float() / 255 - 0.5) / 0.5 for i in chosen])
            labels = torch.tensor([int(data.train_labels[i]) for i in chosen])
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps:
                return losses
    return losses


def short_recipe() -> Recipe:
    from lockstep.settings import load

    return load([], SHORT)[0]


def test_losses_equal_a_naive_loop(alone: Run) -> None:
    ours = step_losses(alone)
    assert len(ours) == 30, "two epochs of fourteen full batches and a partial one"
    assert_follows(ours, naive_losses(short_recipe(), 30), both_rounded=True)


def test_golden_losses(alone: Run) -> None:
    assert_follows(step_losses(alone), json.loads(GOLDEN.read_text())["losses"])


def test_three_ranks_with_accumulation_follow_the_same_curve(alone: Run, three: Run) -> None:
    assert_follows(step_losses(three), step_losses(alone), both_rounded=True)
    assert three.summary()["ranks_agree"]  # type: ignore[index]


def test_every_sample_is_visited_once_by_one_rank(three: Run) -> None:
    rows = [read_steps(three.rank_folder(rank) / "steps.bin") for rank in range(3)]
    assert sum(int(r["samples"].sum()) for r in rows) == 2 * 703
    assert [int(r["samples"][14]) for r in rows] == [10, 10, 11], (
        "the last batch of 31 is shared out as evenly as it goes"
    )


def test_evaluation_equals_a_hand_count(alone: Run, three: Run) -> None:
    """The accuracy that three ranks report, against a loop over the test set that looks at one image at a time."""
    data = open_data("embedded", quiet=True)
    for run in (alone, three):
        model = models.build(short_recipe())
        model.load_state_dict(torch.load(run.folder / "model.pt", weights_only=True))
        model.eval()
        hits, loss = 0, 0.0
        with torch.no_grad():
            for i in range(501):
                scores = model(((torch.tensor(data.test_images[i]).float() / 255 - 0.5) / 0.5)[None])
                hits += int(scores.argmax().item() == int(data.test_labels[i]))
                loss += functional.cross_entropy(scores, torch.tensor([int(data.test_labels[i])])).item()
        last = run.epochs()[-1]
        assert last["test_samples"] == 501
        assert last["test_accuracy"] == pytest.approx(hits / 501, abs=1e-12)
        assert last["test_loss"] == pytest.approx(loss / 501, rel=1e-4)


def test_phases_add_up_and_warm_up_is_marked(alone: Run, three: Run) -> None:
    for run, ranks in ((alone, 1), (three, 3)):
        for rank in range(ranks):
            rows = read_steps(run.rank_folder(rank) / "steps.bin")
            parts = sum(rows[f"{name}_ns"] for name in ("data", "forward", "backward", "exchange", "optimizer"))
            assert (parts <= rows["total_ns"]).all()
            # Of most steps: a busy machine may stop a rank anywhere, also between two phases.
            assert np.median(parts / rows["total_ns"]) > 0.5, "most of a step is attributed"
            assert rows["warmup"].tolist() == [1] * 10 + [0] * 20
            assert (np.diff(rows["start_ns"]) > 0).all()
            exchanged = rows["exchange_ns"] > 0
            assert exchanged.all() if ranks > 1 else not exchanged.any()


def test_tensors_are_counted_to_the_byte() -> None:
    weights = torch.zeros(1000)
    meter = TensorMeter(torch.device("cpu"), bytes_of([weights, weights.view(10, 100)]))
    first, second = torch.empty(250_000), torch.empty(250_000)
    del first
    third = torch.empty(100_000)
    del second, third
    assert meter.close() == 4 * (1000 + 500_000)


def test_memory_is_measured_not_zero(three: Run) -> None:
    growth = three.summary()["memory_growth_bytes"]  # type: ignore[index]
    assert len(growth) == 3
    assert all(value and value > 100_000 for value in growth)
    for rank, most in enumerate(growth):
        peaks = [epoch["memory_growth_bytes"] for epoch in three.epochs(rank)]
        assert 0 < max(peaks) <= most, "each epoch has its own peak, and the run's is the largest of them"


def test_the_peak_of_a_lap_is_its_own_and_that_of_all_is_kept() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    block = mmap.mmap(-1, 80_000_000)  # what is given back is the system's at once
    for _ in range(80):
        block.write(bytes(1_000_000))
    block.close()
    first, second = meter.lap_bytes(), meter.lap_bytes()
    assert first is not None
    assert second is not None
    assert first > 75_000_000 > second + 60_000_000, "the system counts pages in batches"
    assert meter.growth_bytes() == first


def test_tensorboard_reads_our_event_files(three: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rank in range(3):
        events = EventAccumulator(str(three.folder / "tensorboard" / f"rank{rank:04d}"))
        events.Reload()
        points = events.Scalars("test/accuracy")
        assert [point.step for point in points] == [15, 30]
        assert points[-1].value == pytest.approx(three.epochs()[-1]["test_accuracy"], rel=1e-6)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    recipe = short_recipe()
    one = sample_order(recipe, 1, 703)
    assert torch.equal(one, sample_order(recipe, 1, 703))
    assert sorted(one.tolist()) == list(range(703))
    assert not torch.equal(one, sample_order(recipe, 2, 703))


@pytest.mark.parametrize("normalize", ["half", "standard", "none"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batches_equal_a_naive_reader(normalize: Any, memory_format: torch.memory_format) -> None:
    data = open_data("embedded-color", quiet=True)
    recipe = Recipe(data="embedded-color", normalize=normalize)
    batches = Batches(data.train_images, data.train_labels, data, recipe, torch.device("cpu"), memory_format)
    order = sample_order(recipe, 3, 200)
    batches.visit(order)
    images, labels = batches.take(50, 60)
    for position in range(10):
        sample = int(order[50 + position])
        assert labels[position] == int(data.train_labels[sample])
        plain = data.train_images[sample].astype(np.float64) / 255
        if normalize == "half":
            plain = (plain - 0.5) / 0.5
        elif normalize == "standard":
            plain = (plain - np.reshape(data.mean, (3, 1, 1))) / np.reshape(data.std, (3, 1, 1))
        np.testing.assert_allclose(images[position].numpy(), plain, atol=2e-6)
    before = data.train_images[:5].copy()
    batches.visit(None)
    batches.take(0, 5)
    assert np.array_equal(before, data.train_images[:5]), "the resident data are never written to"


def test_max_steps_stops_in_the_middle_of_an_epoch(module_cli: Cli) -> None:
    document = train_here(module_cli.runs, *SHORT, "max_steps=17")
    assert document["steps"] == 17
    assert [epoch["samples"] for epoch in document["epochs"]] == [703, 96]


def test_a_time_limit_stops_all_ranks_together(module_cli: Cli) -> None:
    result = module_cli("run", *SHORT, "epochs=100000", "ranks=2", "threads=1", "--time-limit", "2", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["stopped_by"] == "time limit of 2 s"
    assert document["state"] == "done"
    assert document["ranks_agree"]
    counts = {len(read_steps(Path(document["run"]) / "ranks" / f"{rank:04d}" / "steps.bin")) for rank in range(2)}
    assert counts == {document["steps"]}


def test_a_rank_without_samples_takes_part(module_cli: Cli) -> None:
    """Nine samples over two ranks with batches of eight: the last batch has one sample, and rank 0 has none of it."""
    words = ("data=embedded", "train_limit=9", "test_limit=3", "global_batch=8", "epochs=3", "seed=1")
    place = ("ranks=2", "threads=1", "backend=gloo", "strategy=ddp")
    two = Run(Path(module_cli.run(*words, *place)["run"]))
    one = Run(Path(train_here(module_cli.runs, *words, "threads=1")["run"]))
    assert read_steps(two.rank_folder(0) / "steps.bin")["samples"].tolist() == [4, 0] * 3
    np.testing.assert_allclose(step_losses(two), step_losses(one), rtol=1e-5)


def test_sgd_with_momentum_equals_the_textbook(module_cli: Cli) -> None:
    words = (
        "data=embedded",
        "train_limit=64",
        "test_limit=3",
        "global_batch=32",
        "epochs=3",
        "shuffle=false",
        "seed=1",
    )
    optimizer = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01")
    document = train_here(module_cli.runs, *words, *optimizer, "threads=1")
    ours = torch.load(Path(document["run"]) / "model.pt", weights_only=True)
    data = open_data("embedded", quiet=True)
    model = models.build(Recipe(seed=1))
    speed = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(6):
        chosen = slice(32 * (step % 2), 32 * (step % 2) + 32)
        images = (torch.tensor(data.train_images[chosen]).float() / 255 - 0.5) / 0.5
        loss = functional.cross_entropy(model(images), torch.tensor(data.train_labels[chosen].astype(np.int64)))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, v, g in zip(model.parameters(), speed, gradients, strict=True):
                v.mul_(0.9).add_(g + 0.01 * p)
                p.sub_(0.1 * v)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.network
@pytest.mark.slow
def test_mnist_reaches_97_per_cent_after_three_epochs(module_cli: Cli) -> None:
    """Accuracy-gated smoke run of document D's recipe on the real data."""
    fetched = module_cli("data", "fetch", "mnist")
    if fetched.returncode == 4:
        pytest.skip(f"MNIST cannot be had here: {fetched.stderr.splitlines()[-1]}")
    document = module_cli.run("data=mnist", "global_batch=32", "epochs=3", "optimizer.lr=0.001", "threads=1")
    assert document["test_samples"] == 10_000
    assert document["test_accuracy"] >= 0.97


def test_a_run_that_ends_in_nan_says_so_and_since_when(module_cli: Cli) -> None:
    result = module_cli("run", *SHORT, "optimizer.name=sgd", "optimizer.lr=1e6", "epochs=1", "ranks=2", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"a bare {name} in --json"))
    rows = read_steps(Path(document["run"]) / "ranks" / "0000" / "steps.bin")
    since = min(int(step) for step in rows["step"][~np.isfinite(rows["loss_sum"])])
    assert document["state"] == "done"
    assert document["train_loss"] is None
    assert document["cause"].startswith("it ended with a loss that is not finite, since step ")
    assert int(document["cause"].rpartition(" ")[2]) <= since
    assert "not finite, since step" in module_cli("show", document["id"]).stdout
