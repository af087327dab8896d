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
from lockstep.recipe import EarlyStopping, Recipe
from lockstep.run import Run
from lockstep.training import checkpoint
from lockstep.training.stopping import Standing, Stopping
from support import LATE, SHORT, Cli, train_here, wait_for

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
    place = ("ranks=2", "threads=1", "accumulation=2", "backend=gloo", "strategy=ddp")
    again = module_cli.run("--resume", killed_in_the_middle, *place)
    assert again["placement"]["ranks"] == 2
    assert [e["train_loss"] for e in again["epochs"]] == pytest.approx(
        [e["train_loss"] for e in whole["epochs"]], rel=1e-4
    )
    assert again["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-3)


def test_after_a_kill_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(cli: Cli) -> None:
    run = killed(cli, "schedule.name=constant")
    folder = run.folder / "checkpoints"
    newest, before, *_ = checkpoint.checkpoints_in(folder)
    assert (folder / "best.pt").exists()
    path = folder / f"{newest}.pt"
    path.write_bytes(path.read_bytes()[:-100])
    said: list[str] = []
    content = checkpoint.load(run.folder, said.append)
    assert content.position.step == int(before.removeprefix("step-"))
    assert str(path) in said[0]
    epochs = content.position.step // 15 + 1
    result = cli("run", "--resume", run.id, f"epochs={epochs}", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["epochs"][-1]["epoch"] == epochs
    assert [e["epoch"] for e in document["epochs"]] == list(range(1, epochs + 1))
    whole = train_here(cli.runs, *RICH, "schedule.name=constant", f"epochs={epochs}")
    assert document["weights_sha256"] == whole["weights_sha256"]


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
    assert "seed was 7; only epochs, max_steps, early_stopping, fused and the placement may change" in message
    longer = module_cli.run("--resume", first["id"], "epochs=2")
    assert Run(Path(longer["run"])).has_checkpoint, "it may be interrupted again"
    same = module_cli.run("--resume", longer["id"])
    assert Run(Path(same["run"])).has_checkpoint
    assert same["weights_sha256"] == longer["weights_sha256"]
    assert longer["weights_sha256"] == alone["weights_sha256"]
    # Other kernels round otherwise, as another placement does; the checkpoint is the same one.
    other = module_cli.run("--resume", first["id"], "epochs=2", "fused=auto")
    assert other["epochs"][-1]["test_loss"] == pytest.approx(alone["epochs"][-1]["test_loss"], rel=2 * LATE)
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


# A recipe that gets worse after some epochs.
WORSENING = (*SHORT, "optimizer.lr=0.2", "optimizer.name=sgd", "optimizer.momentum=0.9")


def test_early_stopping_that_is_turned_on_at_resume_counts_from_there(module_cli: Cli) -> None:
    """The weights of earlier epochs were not kept: it can neither stop at once nor claim an earlier epoch's results."""
    runs = module_cli.runs
    losses = [e["test_loss"] for e in train_here(runs, *WORSENING, "epochs=12")["epochs"]]
    best = min(range(8), key=losses.__getitem__)
    first = train_here(runs, *WORSENING, f"epochs={best + 4}", checkpoint_every=1)
    assert first["best_epoch"] == best + 1, "nothing has become better for three epochs"
    found = train_here(runs, "epochs=12", "early_stopping.patience=3", resume=first["run"], checkpoint_every=1)
    assert len(found["epochs"]) > best + 4, "it did not stop at once"
    assert found["best_epoch"] > best + 4
    assert loss_on_test(torch.load(Path(found["run"]) / "model.pt", weights_only=True)) == pytest.approx(
        found["test_loss"], rel=1e-5
    )
    # Nothing is left to do: the results are those of the weights that there are.
    again = train_here(runs, "early_stopping.patience=1", resume=first["run"])
    assert again["weights_sha256"] == first["weights_sha256"]
    assert again["test_loss"] == first["test_loss"]


def test_early_stopping_goes_on_where_it_was(module_cli: Cli) -> None:
    words = (*WORSENING, "epochs=12", "early_stopping.patience=3")
    whole = train_here(module_cli.runs, *words)
    stop = 15 * (whole["best_epoch"] + 1) + 7
    cut = train_here(module_cli.runs, *words, f"max_steps={stop}", checkpoint_every=1)
    again = train_here(module_cli.runs, "max_steps=none", resume=cut["run"])
    for key in ("weights_sha256", "best_epoch", "stopped_by", "test_loss", "steps"):
        assert again[key] == whole[key], key


def test_batches_stated_per_rank_can_be_resumed_with_a_learning_rate_rule(module_cli: Cli) -> None:
    words = (*SHORT, "batch_per_rank=48", "lr_rule=sqrt")
    whole = train_here(module_cli.runs, *words)
    cut = train_here(module_cli.runs, *words, "max_steps=17", checkpoint_every=1)
    again = train_here(module_cli.runs, "max_steps=none", resume=cut["run"])
    assert again["weights_sha256"] == whole["weights_sha256"]


def rewritten(source: Path, target: Path, change: Any) -> Path:
    """A run folder whose only checkpoint is another run's newest one, with something changed in it and a right checksum."""
    folder = target / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("run.json", "epochs.jsonl"):
        (target / name).write_bytes((source / name).read_bytes())
    name = checkpoint.checkpoints_in(source / "checkpoints")[0]
    content = torch.load(source / "checkpoints" / f"{name}.pt", weights_only=True)
    digest = checkpoint.save_whole(folder / f"{name}.pt", change(content) or content)
    (folder / f"{name}.json").write_text(json.dumps({"sha256": digest}))
    return target


@pytest.fixture(scope="module")
def cut(module_cli: Cli) -> dict[str, Any]:
    """Stopped in the second epoch."""
    return train_here(module_cli.runs, *SHORT, "max_steps=17", checkpoint_every=1)


def as_version_1(content: dict[str, Any], **position: Any) -> dict[str, Any]:
    """The fields that version 0.1 wrote: torch's generator alone, and a recipe without keys that came later."""
    old = {key: content[key] for key in ("model", "optimizers", "strategy", "best_weights")}
    recipe = {key: value for key, value in content["recipe"].items() if key not in ("quantize", "fused")}
    step = content["position"]["step"]
    return old | {
        "format": 1,
        "recipe": recipe,
        "scale": {},
        "stopping": {"best": None, "epoch": 0, "waited": 0},
        "generators": [content["generators"][0][:5056]],
        "position": {"steps": step, "totals": content["position"]["totals"], **position},
    }


@pytest.mark.parametrize("how", ["checkpoint-steps", "cut"])
def test_checkpoints_of_version_0_1_go_on_from_their_step(
    module_cli: Cli, alone: dict[str, Any], cut: dict[str, Any], tmp_path: Path, how: str
) -> None:
    """A cut epoch was kept there as a complete one, without its sums; one in the middle of an epoch had them."""

    def change(content: dict[str, Any]) -> dict[str, Any]:
        if how == "cut":
            return as_version_1(content, epoch=2, visited=0, partial={})
        return as_version_1(content, epoch=1, visited=96, partial=content["position"]["sums"])

    old = rewritten(Path(cut["run"]), tmp_path / "old", change)
    found = train_here(module_cli.runs, "max_steps=none", resume=str(old))
    assert found["weights_sha256"] == alone["weights_sha256"]
    assert [e["test_loss"] for e in found["epochs"]] == [e["test_loss"] for e in alone["epochs"]]
    # What the epoch's first steps came to is not in a file of the first kind: the record says that it lacks them.
    assert [e["partial"] for e in found["epochs"]] == [False, how == "cut"]


def damage(*path: Any, value: Any = None) -> Any:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        if value is None:
            del content[path[-1]]
        else:
            content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (damage("position", "step", value="seven"), "position.step"),
        (damage("position", "step", value=-1), "position.step"),
        (damage("position", "odd", value=1), "odd"),
        (damage("position", value=[1]), "position"),
        (damage("position", "sums", "loss", value="x"), "position.sums.loss"),
        (damage("stopping", "best", value="x"), "stopping.best"),
        (damage("odd", value=1), "odd"),
        (damage("model", value=torch.ones(2)), "Tensor"),
        (damage("model", "0.weight", value=3), "model"),
        (damage("optimizers", value=[[1]]), "optimizers"),
        (damage("generators"), "generators"),
        (damage("recipe", "epochs", value=0), "recipe.epochs"),
        (damage("recipe", "odd", value=1), "odd"),
    ],
)
def test_a_damaged_checkpoint_is_one_line_that_names_the_file_and_the_field(
    cut: dict[str, Any], tmp_path: Path, change: Any, named: str
) -> None:
    folder = rewritten(Path(cut["run"]), tmp_path / "run", change)
    with pytest.raises(InputError) as error:
        checkpoint.load(folder, lambda text: None)
    text = str(error.value)
    assert "step-00000017.pt: it is damaged: " in text
    assert named in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (damage("model", "0.weight", value=torch.ones(3)), "its model"),
        (damage("model", "0.weight"), "its model"),
        (damage("optimizers", 0, "exp_avg", 0), "its optimizers"),
        (damage("optimizers", 0, "exp_avg"), "its optimizers"),
        (damage("optimizers", value=[]), "its optimizers"),
        (damage("generators", value=[torch.ones(3)]), "its generators"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_model_is_named(
    module_cli: Cli, cut: dict[str, Any], tmp_path: Path, change: Any, named: str
) -> None:
    folder = rewritten(Path(cut["run"]), tmp_path / "run", change)
    with pytest.raises(InputError, match=named) as error:
        train_here(module_cli.runs, "max_steps=none", resume=str(folder))
    assert "step-00000017.pt" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_that_came_later_does_not_make_it_another_recipe(
    module_cli: Cli, alone: dict[str, Any], cut: dict[str, Any], tmp_path: Path
) -> None:
    def change(content: Any) -> None:
        del content["recipe"]["quantize"], content["recipe"]["regularize"]["mixup"]

    folder = rewritten(Path(cut["run"]), tmp_path / "run", change)
    found = train_here(module_cli.runs, "max_steps=none", resume=str(folder))
    assert found["weights_sha256"] == alone["weights_sha256"]


ALONE = ("ranks=2", "local_sgd.every=8", "regularize.batch_norm=per-rank")


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=local-sgd", "precision=fp16"),
        pytest.param(("strategy=local-sgd", "optimizer.name=sgd", "optimizer.momentum=0.9"), marks=pytest.mark.slow),
        ("strategy=diloco",),
        pytest.param(("strategy=ddp",), marks=pytest.mark.slow),
    ],
)
def test_ranks_that_differ_go_on_each_with_its_own_bits(module_cli: Cli, words: tuple[str, ...]) -> None:
    """Stopped within a round, where each rank has weights, optimizer, statistics and loss scale of its own."""
    whole = module_cli.run(*SHORT, *ALONE, *words)
    cut = module_cli.run(*SHORT, *ALONE, *words, "max_steps=20", "--checkpoint-every", "1")
    kept = checkpoint.load(Path(cut["run"]))
    assert len(kept.ranks) == 2
    assert len(kept.scales) == (2 if "precision=fp16" in words else 0)
    again = module_cli.run("--resume", cut["id"], "max_steps=none")
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert [e["test_loss"] for e in again["epochs"]] == [e["test_loss"] for e in whole["epochs"]]


def test_ranks_that_differed_are_one_model_where_they_exchange_every_step(module_cli: Cli) -> None:
    words = ("ranks=2", "local_sgd.every=8", "strategy=local-sgd", "optimizer.name=sgd", "optimizer.momentum=0.9")
    cut = module_cli.run(*SHORT, *words, "max_steps=20", "--checkpoint-every", "1")
    assert len(checkpoint.load(Path(cut["run"])).ranks) == 2
    again = module_cli.run("--resume", cut["id"], "max_steps=none", "ranks=2", "strategy=ddp")
    assert again["ranks_agree"]


def test_diloco_goes_on_from_within_a_round_of_local_sgd(module_cli: Cli) -> None:
    """Ranks differ there, and nothing says where the round began: the outer optimizer starts from the mean, on every rank the same.

    Its plain step leads to the average whatever it starts from, so that is what an undisturbed local-sgd run computes.
    """
    words = ("ranks=2", "local_sgd.every=8", "strategy=local-sgd")
    whole = module_cli.run(*SHORT, *words)
    cut = module_cli.run(*SHORT, *words, "max_steps=20", "--checkpoint-every", "1")
    assert len(checkpoint.load(Path(cut["run"])).ranks) == 2, "within a round"
    resumed = ("--resume", cut["id"], "max_steps=none", "ranks=2", "local_sgd.every=8", "strategy=diloco")
    assert module_cli.run(*resumed)["ranks_agree"]
    plain = module_cli.run(*resumed, "local_sgd.outer_lr=1", "local_sgd.outer_momentum=0")
    assert plain["ranks_agree"]
    for mine, theirs in zip(plain["epochs"], whole["epochs"], strict=True):
        assert mine["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)


SLOW_DISK = """
import time
from lockstep.models.nets import mnist_convnet as Net
from lockstep.training import checkpoint

save = checkpoint.save_whole

def slow(path, content):
    time.sleep(9)
    return save(path, content)

checkpoint.save_whole = slow
"""


@pytest.mark.slow
def test_the_others_wait_for_what_the_first_rank_does_alone_beyond_their_timeout(cli: Cli) -> None:
    """A checkpoint within an epoch, one at the end and the weights each take longer than ranks wait for each other."""
    (cli.folder / "net.py").write_text(SLOW_DISK)
    words = ("model=net.py:Net", "ranks=2", "timeout_s=6", "epochs=1", "--checkpoint-steps", "10")
    found = cli.run(*SHORT, *words)
    assert (found["state"], found["steps"]) == ("done", 15)
    assert found["checkpoint_seconds"] > 18
    assert (Path(found["run"]) / "model.pt").exists()


def test_what_a_killed_writer_left_is_removed_by_the_next_checkpoint(tmp_path: Path) -> None:
    """Under max_restarts a run goes on in its own folder, and half a checkpoint may be gigabytes."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".tmp-0badcafe-step-00000003.pt").write_bytes(b"half")
    empty = checkpoint.Checkpoint(
        recipe=Recipe(),
        position=checkpoint.Position(step=3),
        model={},
        optimizers=[],
        scales=[],
        strategy={},
        generators=[],
        stopping=Standing(),
        best_weights={},
    )
    checkpoint.Keeper(Run(tmp_path), keep=1).save(empty, {}, best=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.json", "best.pt", "step-00000003.json", "step-00000003.pt",
    ]  # fmt: skip


@pytest.mark.parametrize(("patience", "said"), [(1, "1 epoch;"), (2, "2 epochs;")])
def test_one_epoch_without_a_better_result_is_one_epoch(patience: int, said: str) -> None:
    reason = Stopping(
        EarlyStopping(patience=patience), Standing(0.9, 1, patience), before=EarlyStopping(patience=1)
    ).reason()
    assert reason is not None
    assert f"for {said} best in epoch 1" in reason
