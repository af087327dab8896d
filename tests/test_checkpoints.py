"""Going on where a run was: bit for bit on the same placement, rightly on another; and checkpoints that are no good."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import models
from lockstep.data import open_data
from lockstep.errors import InputError
from lockstep.measure.records import read_steps
from lockstep.recipe import Recipe
from lockstep.run import Run
from lockstep.training import checkpoint
from support import SHORT, Cli, train_here, wait_for

# 703 samples at 48: 15 steps an epoch. Every kind of state there is: momentum, schedule, augmentation, dropout, mid-epoch.
RICH = (
    *SHORT,
    "threads=1",
    "epochs=3",
    "optimizer.name=adamw",
    "schedule.name=cosine",
    "augment.crop=2",
    "regularize.dropout=0.2",
)


@pytest.fixture(scope="module")
def whole(module_cli: Cli) -> dict[str, Any]:
    return train_here(module_cli.runs, *RICH)


def killed(cli: Cli, *words: str) -> Run:
    """A run that was killed with SIGKILL, supervisor and rank, after some checkpoint."""
    process = cli.start("run", *RICH, "epochs=100000", "--checkpoint-every", "1", "--keep", "3", *words)
    run = wait_for(lambda: next((Run(p.parent) for p in cli.runs.glob("*/run.json")), None), what="the run folder")
    wait_for(lambda: len(checkpoint.checkpoints_in(run.folder / "checkpoints")) == 3, what="three checkpoints")
    rank = wait_for(run.rank_statuses, what="the rank's sign of life")[0]
    os.kill(int(rank["pid"]), signal.SIGKILL)
    process.kill()
    process.communicate(timeout=20)
    return run


@pytest.fixture(scope="module")
def killed_in_the_middle(module_cli: Cli, whole: dict[str, Any]) -> str:
    """A run as if it had been killed after step 20, in the middle of the second epoch."""
    first = module_cli.run(*RICH, "--checkpoint-steps", "10", "--checkpoint-every", "1", "--keep", "9")
    assert first["weights_sha256"] == whole["weights_sha256"], "checkpoints change nothing"
    folder = Path(first["run"]) / "checkpoints"
    names = checkpoint.checkpoints_in(folder)
    assert [int(name.removeprefix("step-")) for name in names] == [45, 40, 30, 20, 15, 10]
    for name in names[:3]:
        (folder / f"{name}.json").unlink()
    return str(first["id"])


def test_resumed_in_the_middle_of_an_epoch_it_ends_bit_for_bit_as_if_nothing_had_happened(
    module_cli: Cli, whole: dict[str, Any], killed_in_the_middle: str
) -> None:
    again = module_cli.run("--resume", killed_in_the_middle)
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert [e["train_loss"] for e in again["epochs"]] == pytest.approx(
        [e["train_loss"] for e in whole["epochs"]], rel=1e-12
    )
    assert [e["test_loss"] for e in again["epochs"]] == [e["test_loss"] for e in whole["epochs"]]
    assert again["steps"] == 45
    rows = read_steps(Path(again["run"]) / "ranks" / "0000" / "steps.bin")
    assert rows["step"].tolist() == list(range(21, 46)), "what was measured there stays there"


def test_resumed_on_another_placement_it_computes_the_same(
    module_cli: Cli, whole: dict[str, Any], killed_in_the_middle: str
) -> None:
    again = module_cli.run("--resume", killed_in_the_middle, "ranks=2", "threads=1", "accumulation=2", "backend=gloo")
    assert again["placement"]["ranks"] == 2
    assert [e["train_loss"] for e in again["epochs"]] == pytest.approx(
        [e["train_loss"] for e in whole["epochs"]], rel=1e-4
    )
    assert again["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-3)


def test_after_a_kill_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(cli: Cli) -> None:
    run = killed(cli)
    folder = run.folder / "checkpoints"
    newest, before, *_ = checkpoint.checkpoints_in(folder)
    assert (folder / "best.pt").exists()
    path = folder / f"{newest}.pt"
    path.write_bytes(path.read_bytes()[:-100])
    said: list[str] = []
    content = checkpoint.load(run.folder, said.append)
    assert content["position"].steps == int(before.removeprefix("step-"))
    assert str(path) in said[0]
    epochs = content["position"].epoch + 1
    result = cli("run", "--resume", run.id, f"epochs={epochs}", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["epochs"][-1]["epoch"] == epochs
    assert [e["epoch"] for e in document["epochs"]] == list(range(1, epochs + 1))


def test_what_is_not_ours_is_refused_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    digest = checkpoint.save_whole(folder / "step-00000001.pt", {"weights": torch.ones(2)})
    (folder / "step-00000001.json").write_text(json.dumps({"sha256": digest}))
    with pytest.raises(InputError, match=r"step-00000001.pt: it was not written by this version"):
        checkpoint.load(tmp_path, lambda text: None)

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "touched",))

    digest = checkpoint.save_whole(folder / "step-00000002.pt", {"format": 1, "position": Evil()})
    (folder / "step-00000002.json").write_text(json.dumps({"sha256": digest}))
    with pytest.raises(InputError, match="no checkpoint that can be used"):
        checkpoint.load(tmp_path, lambda text: None)
    assert not (tmp_path / "touched").exists(), "nothing in it was called"


def test_only_how_long_and_where_may_change(module_cli: Cli, alone: dict[str, Any]) -> None:
    first = module_cli.run(*SHORT, "threads=1", "epochs=1", "--checkpoint-every", "1")
    message = module_cli.error("run", "--resume", first["id"], "seed=8", code=2)
    assert "seed was 7; only epochs, max_steps, early_stopping and the placement may change" in message
    longer = module_cli.run("--resume", first["id"], "epochs=2")
    assert longer["weights_sha256"] == alone["weights_sha256"]
    assert "it has no checkpoint" in module_cli.error("run", "--resume", alone["run"], code=2)


def test_early_stopping_stops_and_goes_back_to_the_best(module_cli: Cli) -> None:
    words = (*SHORT, "threads=1", "optimizer.lr=0.2", "optimizer.name=sgd", "optimizer.momentum=0.9", "epochs=12")
    losses = [e["test_loss"] for e in train_here(module_cli.runs, *words)["epochs"]]
    best = last = 0
    for last, loss in enumerate(losses):  # the rule, written down once more
        best = last if loss < losses[best] else best
        if last - best == 2:
            break
    assert last - best == 2, "this recipe must be one that gets worse, or nothing is tested"
    for ranks in (1, 2):
        found = module_cli.run(*words, "early_stopping.patience=2", f"ranks={ranks}")
        stopped_at, best_epoch = len(found["epochs"]), found["best_epoch"]
        assert stopped_at - best_epoch == 2
        assert found["stopped_by"].startswith("early stopping: no better test loss for 2 epochs")
        assert (
            found["test_loss"]
            == found["epochs"][best_epoch - 1]["test_loss"]
            == min(e["test_loss"] for e in found["epochs"])
        )
        assert found["ranks_agree"]
        if ranks == 1:
            assert (stopped_at, best_epoch) == (last + 1, best + 1)
        weights = torch.load(Path(found["run"]) / "model.pt", weights_only=True)
        assert loss_on_test(weights) == pytest.approx(found["test_loss"], rel=1e-5), "the weights are the best epoch's"


def loss_on_test(weights: dict[str, torch.Tensor]) -> float:
    """The mean loss over the test images, computed once more with nothing of ours but the data and the model."""
    data = open_data("embedded", quiet=True)
    model = models.build(Recipe())
    model.load_state_dict(weights)
    images = torch.from_numpy(np.array(data.test_images[:501])).float() / 127.5 - 1
    labels = torch.from_numpy(np.array(data.test_labels[:501], dtype=np.int64))
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(images), labels))
