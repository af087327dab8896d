"""A user's own model: ranks compute what one process does where that can be made so, and what cannot is named."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from lockstep import keyed, models, seeding
from lockstep.errors import InputError
from lockstep.models import layers
from lockstep.models.cautions import cautions, remarks
from lockstep.recipe import Recipe
from lockstep.run import Run
from support import SHORT, Cli, train_here

OWN = """
import random
import numpy
import torch
from torch import nn
from torch.nn import functional

DRAWN = (random.random(), numpy.random.rand(), torch.rand(1).item())  # while it is imported

class Drawn(nn.Module):
    '''Weights from all three generators, and a lazy layer.'''
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([random.random(), numpy.random.rand(), *DRAWN]))
        self.lazy = nn.LazyLinear(10)

    def forward(self, x):
        return self.lazy(x.flatten(1)) * self.scale.sum()

def dropped():
    '''One layer that is used twice, and one of channels.'''
    drop = nn.Dropout(0.3)
    return nn.Sequential(nn.Conv2d(1, 6, 3, 2), nn.Dropout2d(0.2), nn.ReLU(), drop, nn.Conv2d(6, 6, 3, 2), drop, nn.Flatten(), nn.Linear(216, 10))

def answers(kind="tuple"):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(784, 10)

        def forward(self, x):
            scores = self.head(x.flatten(1))
            if kind == "plain":
                return scores
            if kind == "train-only":
                return (scores, x) if self.training else scores
            if kind == "features":
                return {"features": x, "more": scores}
            return {"tuple": (scores, x), "list": [scores], "dict": {"logits": scores, "x": x}, "one": {"out": scores}}[kind]
    return Net()
"""


@pytest.fixture(scope="module")
def own(module_cli: Cli) -> str:
    file = module_cli.folder / "own.py"
    file.write_text(OWN)
    return str(file)


def test_all_three_generators_are_seeded_before_the_module_is_imported(own: str) -> None:
    """In two processes whose own generators stand elsewhere, the same weights come out; and those of another seed do not."""
    code = (
        "import random, sys, numpy, torch; from lockstep import models; from lockstep.recipe import Recipe\n"
        "random.seed(sys.argv[1]); numpy.random.seed(int(sys.argv[1])); torch.manual_seed(int(sys.argv[1]))\n"
        f"state = models.build(Recipe(model='{own}:Drawn', seed=int(sys.argv[2])), torch.zeros(2, 1, 28, 28)).state_dict()\n"
        "print([float(t.double().sum()) for t in state.values()], state['scale'].tolist())"
    )
    start = [sys.executable, "-c", code]
    first, second, third = (
        subprocess.run([*start, *seeds], capture_output=True, text=True, check=True).stdout
        for seeds in (("1", "5"), ("2", "5"), ("1", "6"))
    )
    assert first == second
    assert first != third


def test_building_leaves_the_generators_as_they_were(own: str) -> None:
    seeding.seed_all(3)
    before = seeding.state()
    one = models.build(Recipe(model=f"{own}:Drawn"), torch.zeros(2, 1, 28, 28)).state_dict()
    assert torch.equal(before, seeding.state())
    two = models.build(Recipe(model=f"{own}:Drawn"), torch.zeros(2, 1, 28, 28)).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one), "imported before or not"
    numbers = (random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(1).item())
    seeding.load_state(before)
    assert (random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(1).item()) == numbers


def test_ranks_drop_what_one_process_drops(module_cli: Cli, own: str) -> None:
    words = (*SHORT, f"model={own}:dropped", "epochs=1")
    one = train_here(module_cli.runs, *words)
    result = module_cli("run", *words, "ranks=2", "accumulation=2", "--json")
    assert result.returncode == 0, result.stderr
    two = Run(next(p for p in module_cli.runs.iterdir() if "2r" in p.name))
    assert "draws from (seed, epoch, sample)" in result.stderr, "it is said in a line"
    assert two.model_notes("cautions") == []
    losses = [run.epochs()[0]["train_loss"] for run in (Run(Path(one["run"])), two)]
    # Rounding alone; masks of other samples would change the loss in its second digit.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_another_mask_for_each_use_layer_sample_and_epoch() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    layers.prepare(model)
    ones = torch.ones(6, 200)

    def mask(number: int, epoch: int = 1) -> list[torch.Tensor]:
        layers.bind(keyed.sample_keys(1, epoch, torch.arange(6)), None)
        return [model[number](ones), model[number](ones)]

    found = [*mask(0), *mask(1), *mask(0, epoch=2)]
    for one in range(len(found)):
        for other in range(one):
            assert 0.4 < (found[one] == found[other]).float().mean() < 0.6
    assert torch.equal(torch.stack(mask(0)), torch.stack(found[:2])), "the next pass begins anew"


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout, (6, 40)),
        (nn.Dropout1d, (6, 40, 3)),
        (nn.Dropout2d, (6, 40, 3, 3)),
        (nn.Dropout3d, (6, 40, 2, 2, 2)),
        (nn.AlphaDropout, (6, 40)),
        (nn.FeatureAlphaDropout, (6, 40, 3)),
    ],
)
def test_each_kind_of_dropout_is_torchs_with_masks_by_the_sample(kind: Any, shape: tuple[int, ...]) -> None:
    layer = kind(0.3)
    layers.prepare(layer)
    images, keys = torch.randn(shape), keyed.sample_keys(3, 1, torch.arange(6))

    def apply(low: int, high: int) -> torch.Tensor:
        layers.bind(keys[low:high], None)
        return layer(images[low:high])  # type: ignore[no-any-return]

    whole = apply(0, 6)
    assert torch.equal(whole, torch.cat([apply(0, 1), apply(1, 6)]))
    # torch's own answer has the same two values for each input: what it is if kept, and if dropped.
    plain, kept, dropped = kind(0.3), torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    gone = plain(torch.zeros(shape)).min()  # zero, or SELU's least value with mean and variance put right
    for seed in range(60):
        torch.manual_seed(seed)
        answer = plain(images)
        lost = (answer - gone).abs() < 1e-5
        kept, dropped = torch.where(lost, kept, answer), torch.where(lost, answer, dropped)
    torch.testing.assert_close(torch.where((whole - kept).abs() < 1e-5, kept, dropped), whole)
    assert 0 < (whole - dropped).abs().lt(1e-5).float().mean() < 0.6
    layer.eval()
    assert torch.equal(layer(images), images)


def test_a_layer_that_is_computed_anew_in_backward_has_the_same_mask_or_says_that_it_cannot() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5))
    layers.prepare(model)
    images, keys = torch.randn(6, 20, requires_grad=True), keyed.sample_keys(3, 1, torch.arange(6))

    def gradient(call: Any) -> torch.Tensor:
        layers.bind(keys, None)
        return torch.autograd.grad(call(images).sum(), images)[0]

    anew = gradient(lambda x: checkpoint(model, x, use_reentrant=False))
    assert torch.equal(anew, gradient(model))
    with pytest.raises(InputError, match="used 2 times"):
        gradient(lambda x: checkpoint(lambda y: model(model(y)), x, use_reentrant=False))


class Noisy(nn.Module):
    """All that ranks cannot share."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.head = what, nn.Linear(16, 10)
        self.norm = nn.BatchNorm1d(16) if what == "norm" else nn.Identity()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.what == "functional":
            x = functional.dropout(x, 0.5, self.training)
        if self.what == "numpy":
            x = x * float(np.random.rand())
        if self.what == "buffer":
            self.seen += x.detach().mean()
        if self.what == "transposed":
            x = self.drop(x.t()).t()
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("nothing", None),
        ("norm", r"batch norm \(norm\)"),
        ("functional", "forward draws from torch's generator"),
        ("numpy", "forward draws from numpy.random"),
        ("buffer", r"forward writes buffers \(seen\)"),
        ("transposed", r"dropout \(drop\) has inputs"),
    ],
)
def test_what_ranks_cannot_share_is_named(what: str, named: str | None) -> None:
    model = Noisy(what)
    layers.prepare(model)
    images = torch.randn(11, 16)
    state, drawn = {name: t.clone() for name, t in model.state_dict().items()}, seeding.state()
    found = cautions(model, images)
    if named is None:
        assert found == []
    else:
        (text,) = found
        assert re.search(named, text), text
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items()), "it was tried on a copy"
    assert torch.equal(drawn, seeding.state())
    assert remarks(model) == [
        "dropout (drop) draws from (seed, epoch, sample), so that ranks drop what one process would"
    ]


def test_cautions_are_said_and_kept(module_cli: Cli) -> None:
    file = module_cli.folder / "noisy.py"
    file.write_text(
        "from torch import nn\n"
        "def net():\n    return nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(676, 10))\n"
    )
    result = module_cli("run", *SHORT, f"model={file}:net", "max_steps=2", "ranks=2", "--name", "noisy", "--quiet")
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "warning: batch norm (1) takes its statistics from each rank's own samples" in said
    (caution,) = Run(module_cli.runs / "noisy").model_notes("cautions")
    assert caution in said
    assert caution in " ".join(module_cli("show", "noisy").stdout.split())
    findings = json.loads(module_cli("explain", "noisy", "--json").stdout)["findings"]
    (accuracy,) = (finding for finding in findings if finding["question"] == "accuracy")
    assert "changed with the ranks: model" in accuracy["verdict"]
    assert caution in accuracy["why"]


@pytest.mark.slow
def test_verify_says_why_a_model_cannot_be_proven(module_cli: Cli) -> None:
    file = module_cli.folder / "drawn.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(784, 10)\n"
        "    def forward(self, x):\n        return self.head(nn.functional.dropout(x.flatten(1), 0.5, self.training))\n"
    )
    result = module_cli("verify", "data=embedded", "global_batch=16", f"model={file}:Net", "backend=gloo", "threads=1")
    assert result.returncode == 3, result.stderr
    assert "warning: forward draws from torch's generator" in " ".join(result.stdout.split())


def test_models_that_answer_more_than_scores(module_cli: Cli, own: str) -> None:
    words = (*SHORT, f"model={own}:answers", "max_steps=3")
    kinds = ("plain", "tuple", "list", "dict", "one", "train-only")
    found = [train_here(module_cli.runs, *words, f"model_args.kind={kind}")["weights_sha256"] for kind in kinds]
    assert len(set(found)) == 1


def test_an_answer_that_is_not_clear_is_one_line(own: str) -> None:
    recipe = Recipe(model=f"{own}:answers", model_args={"kind": "features"})
    with pytest.raises(InputError, match="dict with the keys features, more, and which part of it are the scores"):
        models.check_fits(models.build(recipe), recipe, torch.zeros(2, 1, 28, 28), 10)


def test_the_size_of_a_lazy_model_is_that_of_its_data(own: str) -> None:
    size = models.trained_size(Recipe(model=f"{own}:Drawn", data="embedded"))
    assert size == (7855, 4 * 7855)
    assert models.trained_size(Recipe(model=f"{own}:Drawn", data=f"{own}:load")) is None
