"""Every task: what is divided by what, on one rank and on several; and what does not go together is one line."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional

from house import ROOT
from lockstep import models, task
from lockstep.data import DataSet, fit, open_data
from lockstep.data.arrays import open_batches
from lockstep.data.batches import Batch, sample_order
from lockstep.errors import InputError
from lockstep.kernels import FastConv, fuse
from lockstep.metrics import METRICS, fitting, learned_keys
from lockstep.predict import layers
from lockstep.recipe import EarlyStopping, Recipe, Regularize
from lockstep.run import Run
from lockstep.settings import load
from lockstep.study.definition import Study, check
from lockstep.training import measures
from lockstep.training.loss import Loss
from lockstep.verify.records import step_losses
from support import Cli, train_here

OWN = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional

G = np.random.default_rng(3)
X = G.normal(size=(203, 6))
Y = (X @ G.normal(size=(6, 2))).astype("float32")
# Classes 0 to 4 of sequences with padding: how many tokens count differs from sequence to sequence.
TOKENS = G.integers(0, 20, (203, 9))
PADDED = np.where(np.arange(8) < G.integers(1, 9, (203, 1)), TOKENS[:, 1:], -100)


def regression():
    return X, Y, X[:50], Y[:50]

def classes():
    return dict(train_inputs=X.astype("float32"), train_targets=(Y[:, 0] > 0).astype(int) + (Y[:, 1] > 1), test_inputs=X[:50].astype("float32"),
                test_targets=(Y[:50, 0] > 0).astype(int), classes=3, class_weights=[0.5, 2.0, 5.0])

def binary():
    return X, (Y > 0), X[:50], (Y[:50] > 0)

def padded():
    return dict(train=(TOKENS[:, :-1], PADDED), test=(TOKENS[:50, :-1], PADDED[:50]), classes=20)

def named():
    return {"train": {"left": X[:, :2], "right": X[:, 2:], "labels": Y}, "test": {"left": X[:50, :2], "right": X[:50, 2:], "labels": Y[:50]}}


def linear(out=2):
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, out))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

class Sides(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = linear()

    def forward(self, right, left):
        return {"answer": self.net(torch.cat((left, right), 1)), "features": left}


def huber(output, targets):
    return functional.huber_loss(output["answer"], targets, reduction="none").mean(1)

def total(output, targets):
    return functional.huber_loss(output, targets, reduction="none").mean(1).sum()

def mean(output, targets):
    return functional.huber_loss(output, targets)

def wide(output, targets):
    return (output - targets) ** 2

def odd(output, targets):
    return (output - targets).norm()

def centred(output, targets):
    return ((output - output.mean(0)) ** 2).sum(1)

def broken(output, targets):
    return output.nothing

def nothing(output, targets):
    return None

def farthest(output, targets):
    return (output["answer"] - targets).abs().amax(1)

def one_number(output, targets):
    return (output - targets).abs().mean()
"""

COMMON = ("global_batch=48", "epochs=2", "optimizer.lr=0.01", "backend=gloo", "threads=1", "seed=5", "fused=false")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return str(file)


def words_of(own: str, kind: str) -> list[str]:
    """The task as people would type it."""
    return {
        "mse": [f"model={own}:linear", f"data={own}:regression", "loss=mse"],
        "weighted": [f"model={own}:linear", "model_args.out=3", f"data={own}:classes"],
        "bce": [f"model={own}:linear", f"data={own}:binary", "loss=bce"],
        "padded": [f"model={own}:Words", f"data={own}:padded", "loss=next-token"],
        "own": [f"model={own}:Sides", f"data={own}:named", f"loss={own}:huber", f"metrics={own}:farthest"],
    }[kind] + list(COMMON)


KINDS = ("mse", "weighted", "bce", "padded", "own")


def naive(kind: str, recipe: Recipe, data: DataSet) -> list[float]:
    """The training of one process, as plainly as PyTorch's own losses have it: a mean over the batch."""
    inputs = {
        key: torch.tensor(np.array(one))
        for key, one in zip(data.keys or ("",), (data.train_images, *data.train_more), strict=True)
    }
    inputs = {key: one.float() if one.is_floating_point() else one for key, one in inputs.items()}
    targets = torch.tensor(np.array(data.train_labels))
    model = models.build(recipe)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.optimizer.lr)
    losses: list[float] = []
    for epoch in (1, 2):
        order = sample_order(recipe, epoch, len(targets))
        for first in range(0, len(order), recipe.global_batch):
            chosen = order[first : first + recipe.global_batch]
            part = {key: one[chosen] for key, one in inputs.items()}
            output: Any = model(**part) if data.keys else model(part[""])
            wanted = targets[chosen]
            if kind == "mse":
                loss = functional.mse_loss(output, wanted)
            elif kind == "bce":
                loss = functional.binary_cross_entropy_with_logits(output, wanted.float())
            elif kind == "weighted":
                loss = functional.cross_entropy(output, wanted.long(), torch.tensor(data.class_weights))
            elif kind == "padded":
                loss = functional.cross_entropy(output.flatten(0, 1), wanted.long().flatten())
            else:
                loss = functional.huber_loss(output["answer"], wanted)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_trains_what_a_plain_loop_trains(own: str, tmp_path: Path, kind: str) -> None:
    """A partial batch, accumulation that does not divide it, and samples that count differently: still the mean over the global batch."""
    words = words_of(own, kind)
    recipe, _ = load([], words)
    summary = train_here(tmp_path, *words, "accumulation=4")
    run = Run(Path(summary["run"]))
    data = open_data(recipe.data, scratch=tmp_path / "again")
    np.testing.assert_allclose(step_losses(run), naive(kind, recipe, data), rtol=2e-4)
    (main, *_) = task.measures(recipe)
    assert math.isfinite(summary[f"test_{main.name}"])
    assert summary["test_accuracy" if kind in ("weighted", "bce", "padded") else "test_loss"] is not None


@pytest.mark.parametrize("kind", ["mse", "padded", "own"])
def test_an_evaluation_is_exact(own: str, tmp_path: Path, kind: str) -> None:
    words = words_of(own, kind)
    recipe, _ = load([], words)
    summary = train_here(tmp_path, *words, "eval_batch=7", "epochs=1")
    data = open_data(recipe.data, scratch=tmp_path / "again")
    model = models.build(recipe)
    model.load_state_dict(torch.load(Path(summary["run"]) / "model.pt", weights_only=True))
    model.double().eval()
    inputs, targets = open_batches(data, "test", recipe, torch.device("cpu"), torch.contiguous_format).take(0, 50)
    with torch.no_grad():
        if kind == "mse":
            assert isinstance(inputs, torch.Tensor)
            output = model(inputs.double())
            expected = {
                "loss": functional.mse_loss(output, targets.double()),
                "mae": functional.l1_loss(output, targets.double()),
            }
        elif kind == "padded":
            output, flat = model(inputs).flatten(0, 1), targets.long().flatten()
            loss = functional.cross_entropy(output, flat)
            hits = (output.argmax(1) == flat).sum() / (flat != task.IGNORED).sum()
            expected = {"loss": loss, "perplexity": loss.exp(), "accuracy": hits}
        else:
            assert isinstance(inputs, dict)
            output = model(**{key: one.double() for key, one in inputs.items()})["answer"]
            expected = {
                "loss": functional.huber_loss(output, targets.double()),
                "farthest": (output - targets).abs().amax(1).mean(),
            }
    for name, value in expected.items():
        assert summary[f"test_{name}"] == pytest.approx(float(value), rel=1e-5), name


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["loss=crossentropy"], r"loss=crossentropy: no such loss; did you mean 'cross-entropy'\?"),
        (["loss=hinge"], "loss=hinge: no such loss; known: cross-entropy, mse, bce, next-token, or your own"),
        (["metrics=acuracy"], r"metrics=acuracy: no such metric; did you mean 'accuracy'\?"),
        (["metrics=mae"], "metrics=mae does not go with loss=cross-entropy: choose accuracy"),
        (["loss=mse", "metrics=accuracy"], "metrics=accuracy does not go with loss=mse: choose mae"),
        (["loss=mse", "metrics=mae,mae"], "two of them have the same name"),
        (["metrics=own.py:loss"], "records have a test_loss already"),
        (["loss=mse", "regularize.label_smoothing=0.1"], "label_smoothing is for classes, not for loss=mse"),
        (["loss=next-token", "regularize.mixup=0.2"], "mixup blends images and their classes, not loss=next-token"),
        (["loss=mse", "early_stopping.patience=2", "early_stopping.on=test_accuracy"], "loss=mse has no accuracy"),
        (["loss=mse", "early_stopping.on=test_accuracy"], "loss=mse has no accuracy"),
        (["loss=bce", "quantize=qat"], "quantize=qat is for image classifiers"),
    ],
)
def test_what_means_nothing_for_a_loss_is_one_line(words: list[str], reason: str) -> None:
    recipe, _ = load([], words)
    with pytest.raises(InputError, match=reason) as caught:
        task.check(recipe)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words", "reason"),
    [
        (
            "regression",
            [],
            r"loss=cross-entropy needs classes, whole numbers from 0 on; .* float32 of shape \(N, 2\): choose loss=mse",
        ),
        ("regression", ["loss=next-token"], "needs classes"),
        ("classes", ["loss=next-token"], "loss=next-token needs sequences of tokens"),
        ("regression", ["loss=bce"], "loss=bce needs targets from 0 to 1"),
        ("classes", ["loss=mse"], "class_weights of .* are for classes, not for loss=mse"),
        (
            "classes",
            ["augment.crop=2"],
            r"augment.crop changes images in bytes; .* float32 of shape \(N, 6\): leave it out",
        ),
        ("classes", ["normalize=standard"], "normalize=standard is for images in bytes"),
        ("classes", ["regularize.mixup=0.2"], "mixup blends images in bytes"),
        ("classes", ["quantize=qat"], "quantize=qat is for images in bytes"),
        ("padded", [], "has tokens, and a token that follows each: choose loss=next-token"),
    ],
)
def test_data_that_a_recipe_cannot_use_are_one_line(
    own: str, tmp_path: Path, data: str, words: list[str], reason: str
) -> None:
    recipe, _ = load([], [f"data={own}:{data}", *words])
    with pytest.raises(InputError, match=reason) as caught:
        fit.check(recipe, open_data(recipe.data, scratch=tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["loss={own}:mean"],
            "loss=.*:mean is a mean over the samples, and ranks have different numbers of them: return one number",
        ),
        (["loss={own}:wide"], r"loss=.*:wide returned shape \(8, 2\) for 8 samples"),
        (["loss={own}:odd"], "loss=.*:odd is no sum over samples"),
        (["loss={own}:centred"], "of a sample depends on the other samples of its batch"),
        (["loss={own}:broken"], r"loss=.*:broken raised AttributeError: .*own.py line \d+"),
        (["loss={own}:nothing"], "loss=.*:nothing returned NoneType, not a tensor"),
        (["loss={own}:totl"], r"has no 'totl'; did you mean 'total'\?"),
        (["loss=mse", "metrics={own}:one_number"], r"metrics=.*:one_number returned \(\) for \d+ samples"),
        (["loss=mse", "model_args.out=3"], r"answers \(2, 3\) for 2 samples, but the targets .* are \(2, 2\)"),
        (["loss=mse", "model=mnist-convnet"], r"cannot take the inputs \(float64 6\)"),
    ],
)
def test_a_loss_that_cannot_be_summed_is_refused_before_training(
    own: str, tmp_path: Path, words: list[str], reason: str
) -> None:
    words = [f"model={own}:linear", f"data={own}:regression", *COMMON, *(word.format(own=own) for word in words)]
    with pytest.raises(InputError, match=reason) as caught:
        train_here(tmp_path, *words)
    assert "\n" not in str(caught.value)


def test_a_sum_is_as_good_as_the_losses_of_the_samples(own: str, tmp_path: Path) -> None:
    base = [f"model={own}:linear", f"data={own}:regression", *COMMON]
    summary = train_here(tmp_path, *base, f"loss={own}:total")
    assert "test_accuracy" not in summary or summary["test_accuracy"] is None
    assert summary["test_loss"] < 1


def test_vocabularies_that_do_not_fit(own: str, tmp_path: Path) -> None:
    words = ["model=gpt", "model_args.vocabulary=12", f"data={own}:padded", "loss=next-token", *COMMON]
    with pytest.raises(InputError, match=r"cannot take the inputs|answers 12 classes, but .* has labels 0 to 19"):
        train_here(tmp_path, *words)
    with pytest.raises(InputError, match=r"has tokens, and a token that follows each: choose loss=next-token"):
        train_here(tmp_path, "model=gpt", "data=embedded-text@64+16", *COMMON)


def test_known_sizes_of_the_new_nets() -> None:
    """He et al. give 0.27 million parameters for ResNet-20."""
    counts = {
        name: sum(p.numel() for p in models.build(Recipe(model=name)).parameters()) for name in ("resnet20", "gpt")
    }
    assert counts == {"resnet20": 269_722, "gpt": 366_432}


def test_a_gpt_looks_back_and_never_ahead() -> None:
    model = models.build(Recipe(model="gpt", seed=3)).eval()
    tokens = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 128
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 63], after[:, 63], rtol=0, atol=1e-7)


def test_the_embedded_text_is_the_same_everywhere_and_has_something_to_learn() -> None:
    data = open_data("embedded-text", quiet=True)
    text = "".join(map(chr, np.concatenate((data.train_images[0], data.train_labels[0, -1:]))))
    assert (data.train_images.shape, data.test_images.shape, data.classes) == ((8_000, 64), (1_000, 64), 128)
    assert np.array_equal(data.train_images[:, 1:], data.train_labels[:, :-1])
    assert np.array_equal(open_data("embedded-text@600+100", quiet=True).train_images, data.train_images[:600])
    share = np.bincount(data.train_images.ravel(), minlength=128) / data.train_images.size
    entropy = -sum(p * math.log(p) for p in share if p)
    assert 2.5 < entropy < 3.2
    assert text.isascii()
    assert not np.array_equal(data.train_images[:100], data.test_images[:100])


def test_views_read_what_the_task_has() -> None:
    regression, words = Recipe(loss="mse"), Recipe(loss="next-token")
    assert learned_keys(Recipe()) == ["train_loss", "train_accuracy", "test_loss", "test_accuracy"]
    assert learned_keys(regression) == ["train_loss", "test_loss", "test_mae"]
    assert fitting(("seconds", "accuracy"), [regression]) == ["seconds", "mae"]
    assert fitting(("seconds", "accuracy"), [words]) == ["seconds", "accuracy"], "it has both"
    assert fitting(("accuracy",), [Recipe(loss="own.py:loss")]) == ["loss"]
    assert METRICS["mae"].learned
    assert METRICS["mae"].better == "less"
    assert METRICS["mae"].effect(0.9, 0.8, 0.95) == "0.90× (0.80–0.95)"
    study = check(Study(name="x", base={"loss": "mse"}, cells={"a": {}, "b": {"optimizer.lr": 0.1}}))
    assert study.metrics == ["seconds", "images_per_second", "mae", "memory"]
    assert task.own_functions(Recipe(loss="a.py:loss", metrics="top5,b.py:f1")) == ["a.py:loss", "b.py:f1"]
    assert task.measures(Recipe(metrics="top5, own.py:f1")) == [task.Measure("top5"), task.Measure("f1", "own.py:f1")]
    task.check(
        Recipe(
            loss="next-token",
            regularize=Regularize(label_smoothing=0.1),
            early_stopping=EarlyStopping(patience=1, on="test_accuracy"),
        )
    )


@pytest.mark.parametrize("kind", ["padded", "own"])
def test_layers_of_any_task_can_be_predicted(own: str, tmp_path: Path, kind: str) -> None:
    recipe, placement = load([], [*words_of(own, kind), "device=cpu"])
    found = layers.answer(layers.Question(recipe=recipe, placement=placement), tmp_path)
    parameters = list(models.build(recipe).parameters())
    assert [gradient.bytes for gradient in found.gradients] == [parameter.nbytes for parameter in parameters]
    assert found.seconds_per_sample > 0


NEW_NETS = {
    "gpt": ("model=gpt", "data=embedded-text@96+16", "loss=next-token", "global_batch=8", "threads=1"),
    "resnet20": ("model=resnet20", "data=embedded-color@96+16", "global_batch=8", "threads=1"),
}


@pytest.mark.parametrize("net", NEW_NETS)
def test_the_table_of_the_page_says_what_works_for_the_new_nets(tmp_path: Path, net: str) -> None:
    """Its columns predict, fused and quantize; race has a test of its own, verify and explain too."""
    text = (ROOT / "docs/tasks.md").read_text()
    heading, row = (
        next(line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(start))
        for start in ("| | run", f"| `{net}`")
    )
    page = dict(zip(heading, row[1:], strict=True))
    recipe, placement = load([], [*NEW_NETS[net], "device=cpu"])
    assert page["predict"] == "yes"
    found = layers.answer(layers.Question(recipe=recipe, placement=placement), tmp_path)
    assert sum(gradient.bytes for gradient in found.gradients) > 1e6
    convolutions = sum(isinstance(module, FastConv) for module in fuse(models.build(recipe)).modules())
    assert page["fused"] == (f"yes: {convolutions} convolutions, without ReLU" if convolutions else "nothing to fuse")
    refused = (
        pytest.raises(InputError, match="is for image classifiers") if page["quantize"] == "refuses" else nullcontext()
    )
    with refused:
        task.check(replace(recipe, quantize="qat"))


@pytest.mark.slow
@pytest.mark.parametrize("net", NEW_NETS)
def test_the_new_nets_race(cli: Cli, net: str) -> None:
    found = cli(
        "race", "ranks=1", "ranks=2", "--all", " ".join(NEW_NETS[net]), "--budget", "30s", "--json", timeout=240
    )
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert (document["failures"], len(document["ratios"])) == ({}, 1)


def test_a_loss_of_padding_alone_counts_nothing() -> None:
    loss = Loss(Recipe(loss="next-token"))
    scores = torch.randn(2, 3, 5, requires_grad=True)
    total = loss(scores, Batch(torch.empty(0), torch.full((2, 3), task.IGNORED)))
    assert total.item() == 0


@pytest.mark.slow
def test_every_view_of_a_regression(own: str, cli: Cli) -> None:
    """Nothing breaks, and nothing speaks of an accuracy that is not there."""
    words = [*words_of(own, "mse"), "ranks=2", "launcher=spawn"]
    first, second = cli.run(*words), cli.run(*words, "optimizer.lr=0.02")
    assert first["ranks_agree"]
    told = ""
    for command in (
        ["show", "last", "--ranks"],
        ["runs"],
        ["explain", "last"],
        ["compare", first["id"], second["id"]],
        ["report", "last", "--format", "md", "-o", "report.md"],
    ):
        result = cli(*command)
        assert result.returncode == 0, result.stderr
        told += result.stdout
    told += (cli.folder / "report.md").read_text()
    assert "test mean absolute error" in told
    assert "test loss" in told
    assert "accuracy" not in told.lower()
    for form in ("csv", "json"):
        assert cli("export", "last", "-o", f"out.{form}").returncode == 0
    assert "test_mae" in (cli.folder / "out.csv").read_text()
    assert cli("export", "last", "--format", "tensorboard", "-o", "board").returncode == 0
    (stopped,) = [cli.run(*words, "epochs=9", "early_stopping.patience=1", "early_stopping.min_delta=100")]
    assert stopped["stopped_by"].startswith("early stopping: no better test loss")
    error = cli.error("run", *words_of(own, "mse"), f"loss={own}:mean", code=2)
    assert "is a mean over the samples" in error


@pytest.mark.slow
def test_tools_that_start_ranks_take_a_language_model(cli: Cli) -> None:
    words = ["model=gpt", "data=embedded-text@96+16", "loss=next-token", "global_batch=16", "epochs=1", "threads=1"]
    cli.run(*words, "ranks=2", "--name", "two")
    explained = cli("explain", "two", "--measure", "--seconds", "2")
    assert explained.returncode == 0, explained.stderr
    assert "quantize is for image classifiers" in cli.error("quantize", "two", code=2)
    cli.run(*words, "precision=bf16", "--name", "mixed")
    told = cli("show", "mixed").stdout
    assert "test perplexity" in told
    assert "bf16, of" in told


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_verify_proves_every_task(own: str, cli: Cli, kind: str) -> None:
    result = cli("verify", *words_of(own, kind), "ranks=2", "--json", timeout=600)
    checks = json.loads(result.stdout)
    assert result.returncode == 0, [check for check in checks if not check["passed"]]
    assert any("accumulation" in check["against"] for check in checks)


def test_labels_that_are_pictures_are_not_left_behind(tmp_path: Path) -> None:
    file = tmp_path / "masks.py"
    file.write_text(
        "import numpy as np\ndef load():\n    x, y = np.zeros((4, 1, 8, 8), 'uint8'), np.ones((4, 8, 8), 'uint8')\n    return x, y, x, y\n"
    )
    for setting in ("augment.flip=true", "regularize.mixup=0.2"):
        recipe, _ = load([], [f"data={file}:load", setting])
        with pytest.raises(InputError, match=r"would leave the labels of .* of shape \(N, 8, 8\), as they are"):
            fit.check(recipe, open_data(recipe.data, scratch=tmp_path / "scratch"))


def test_the_class_156_of_bytes_counts() -> None:
    labels = torch.tensor([156, 0], dtype=torch.uint8)
    scores = torch.zeros(2, 200).index_put((torch.arange(2), labels.long()), torch.ones(()))
    assert [float(value) for value in measures.summed(Recipe())["accuracy"](scores, labels)] == [2.0, 2.0]


def test_inputs_may_be_changed_in_place(own: str, tmp_path: Path) -> None:
    """The files are mapped for reading: to write there would end the process."""
    recipe, _ = load([], [f"data={own}:regression", "loss=mse"])
    data = open_data(recipe.data, scratch=tmp_path)
    batches = open_batches(data, "test", recipe, torch.device("cpu"), torch.contiguous_format)
    inputs, targets = batches.take(0, 4)
    assert isinstance(inputs, torch.Tensor)
    before = inputs.clone()
    inputs += 1
    targets += 1
    again, _ = batches.take(0, 4)
    assert torch.equal(before, again)


@pytest.mark.slow
def test_a_gpt_is_divided_by_fsdp(cli: Cli) -> None:
    small = ("data=embedded-text@64+16", "loss=next-token", "global_batch=8", "max_steps=2", "test_limit=16")
    found = cli("run", "model=gpt", *small, "strategy=fsdp", "ranks=2", timeout=240)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [
            "model=gpt",
            "data=embedded-text@600+100",
            "loss=next-token",
            "metrics=perplexity,accuracy,top5",
            "regularize.dropout=0.1",
        ],
        ["model=resnet20", "data=embedded-color@600+100"],
    ],
)
def test_verify_proves_the_new_nets(cli: Cli, words: list[str]) -> None:
    result = cli(
        "verify", *words, "ranks=2", "global_batch=16", "optimizer.lr=0.001", "test_limit=100", "--json", timeout=900
    )
    checks = json.loads(result.stdout)
    assert result.returncode == 0, [check for check in checks if not check["passed"]]
