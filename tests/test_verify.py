"""`lockstep verify` passes where the mathematics is right, and names what is wrong where it was broken on purpose."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from lockstep.launch import execute, mpirun, prepare
from lockstep.recipe import Optimizer, Recipe
from lockstep.run import Options, Proof, Run
from lockstep.settings import load
from lockstep.verify import judge, prove, steps, verified
from lockstep.verify.checks import Check, Worst, compare_entries
from lockstep.verify.records import Records
from lockstep.verify.steps import Rounding
from lockstep.verify.update import Rounded, update
from support import Cli

WORDS = ("data=embedded", "global_batch=24", "test_limit=400", "backend=gloo", "strategy=ddp", "threads=1", "ranks=2")
ADAM = ("optimizer.lr=0.005",)
SGD = ("optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9")
FAULTS = Path(__file__).with_name("verify_faults.py")

EXCHANGE = "exchanged gradient against the sum of the ranks' own"
GRADIENT, WEIGHTS, STATE = "gradient against float64", "weights after the update", "optimizer state after the update"
SAMPLES, SETTINGS = "samples of every step", "learning rate, clipping, penalty of every step"
RANKS, BETWEEN = "steps after which ranks differ by a bit", "weights that change between steps"
EVALUATION, HITS = "samples of every evaluation", "test samples that are right"


class Proofs:
    """Runs as verify makes them. A recipe's run in one process is made once, and other placements are judged against it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._alone: dict[tuple[str, ...], Records] = {}
        self._rounding: dict[tuple[str, ...], Rounding] = {}

    def run(self, which: str, proof: Proof, *words: str) -> Records:
        recipe, placement = load([], [*WORDS, *words])
        self._count += 1
        spec = prove.plan(recipe, placement, self._folder, None)
        chosen = prove.placements(spec.recipe, spec.placement)[which]
        options = Options(proof=proof, save_model=False)
        run, spec = prepare(spec.recipe, chosen, options, self._folder, name=f"run-{self._count}")
        return Records(execute(run, spec))

    def alone(self, *words: str) -> Records:
        if words not in self._alone:
            self._alone[words] = self.run(prove.ALONE, Proof(), *words)
            self._rounding[words] = steps.own_rounding(self._alone[words])
        return self._alone[words]

    def checks(self, *words: str, where: tuple[str, ...] = (), which: str = "2 ranks") -> list[Check]:
        """`where`: words of the placement alone."""
        one = self.alone(*words)
        two = self.run(which, Proof(reference=str(one.run.folder)), *words, *where)
        return list(judge.judge(one, two, which, self._rounding[words]))

    def wrong(self, *words: str, where: tuple[str, ...] = (), which: str = "2 ranks") -> dict[str, str]:
        """The checks that did not pass, and where they failed."""
        return {c.what: c.where for c in self.checks(*words, where=where, which=which) if not c.passed}


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Proofs:
    return Proofs(tmp_path_factory.mktemp("verify"))


def fault(name: str) -> tuple[str]:
    return (f"strategy={FAULTS}:{name}",)


def test_verify_passes_and_remembers_it(cli: Cli) -> None:
    result = cli("verify", *WORDS, *ADAM, "launcher=spawn", "--json")
    assert result.returncode == 0, result.stderr
    checks = json.loads(result.stdout)
    assert all(check["passed"] for check in checks)
    found = {check["what"]: check for check in checks if check["against"].startswith("2 ranks against")}
    for what in (EXCHANGE, GRADIENT, WEIGHTS, STATE):
        assert 0 < found[what]["difference"] < found[what]["allowed"] < 1e-3, (
            "rounding is seen, so something was compared"
        )
    assert [check["what"] for check in checks].count("steps that differ by a bit") == 2
    assert not list(cli.runs.glob(".verify-*")), "no folder is left"
    (record,) = [
        p
        for p in (cli.runs / verified.FOLDER).glob("*.json")
        if not json.loads(p.read_text())["placement"]["accumulates"]
    ]
    document = json.loads(record.read_text())
    assert document["checks"] == len(checks)
    assert document["steps"] == 32
    run = cli.run(*WORDS, *ADAM, "launcher=spawn", "train_limit=96", "epochs=1", "seed=9")
    spec, environment = Run(Path(run["run"])).spec(), Run(Path(run["run"])).environment()
    assert verified.find([cli.runs], spec, environment) == document
    assert verified.find([cli.runs], spec, {**environment, "torch": "1.0"}) is None, "proven with another torch"
    other = msgspec.structs.replace(spec, placement=msgspec.structs.replace(spec.placement, zero=True))
    assert verified.find([cli.runs], other, environment) is None


def test_a_fault_is_named_and_leaves_no_folder_behind(cli: Cli) -> None:
    result = cli("verify", *WORDS, *ADAM, *fault("one_rank_one_per_cent"), TMPDIR=str(cli.folder))
    assert result.returncode == 3
    assert "DIFFERENT" in result.stdout
    assert "do NOT compute the same" in result.stderr
    assert RANKS in result.stderr
    assert [p.name for p in cli.folder.iterdir() if p.name != "__pycache__"] == ["runs"]
    assert [p.name for p in cli.runs.iterdir()] == []


def test_a_run_that_fails_leaves_no_folder_behind(cli: Cli) -> None:
    code = "from lockstep.strategies import Strategy\n\nclass Own(Strategy):\n    def __init__(self, *given):\n        raise ValueError('no such thing')\n"
    (cli.folder / "own.py").write_text(code)
    message = cli.error("verify", *WORDS, "strategy=own.py:Own", code=3)
    assert "2 ranks: rank" in message
    assert "no such thing" in message
    assert list(cli.runs.iterdir()) == []


def test_training_that_diverges_proves_nothing(cli: Cli) -> None:
    """NaN on both sides is not a difference, and no proof either."""
    words = ("optimizer.name=sgd", "optimizer.lr=1e30")
    message = cli.error("verify", *WORDS, *words, code=3)
    assert "nothing is proven: training diverged: in one process, too" in message
    assert not (cli.runs / verified.FOLDER).exists()


def test_verify_needs_something_to_compare(cli: Cli) -> None:
    assert "ranks=1: there is nothing to compare" in cli.error("verify", *WORDS, "ranks=1", code=2)


# Which check has to find which fault, in the fast tier: one fault for each.
FOUND_BY = [
    ("fp16_exchange_from_13", ADAM, EXCHANGE),
    ("skipped_every_25th", ADAM, EXCHANGE),
    ("nan_in_the_last_from_30", ADAM, GRADIENT),
    ("lr_off", ADAM, SETTINGS),
    ("lr_off_two_per_mille_from_13", SGD, WEIGHTS),
    ("state_forgotten", ADAM, STATE),
    ("evaluation_1_twice", ADAM, EVALUATION),
    ("evaluation_hits_off", ADAM, HITS),
    ("sample_of_another_rank_from_30", SGD, SAMPLES),
    ("drifts_between_steps_from_13", ADAM, WEIGHTS),
    ("evaluation_disturbs", SGD, BETWEEN),
]


@pytest.mark.parametrize(("name", "words", "what"), FOUND_BY, ids=[row[0] for row in FOUND_BY])
def test_a_fault_is_found_where_it_is(proofs: Proofs, name: str, words: tuple[str, ...], what: str) -> None:
    wrong = proofs.wrong(*words, where=fault(name))
    assert what in wrong
    start = int(name.rpartition("_from_")[2]) if "_from_" in name else None
    if start is not None:
        assert wrong[what].startswith(f"step {start + 1}"), "where the fault began"


def test_nan_in_fp16_is_an_overflow_only_where_a_ranks_own_gradient_overflows(proofs: Proofs) -> None:
    """fp16 skips a step that overflows, and verify bears a few of them: not those that the exchange has made."""
    words = (*ADAM, "precision=fp16")
    assert proofs.wrong(*words, where=fault("Plain")) == {}
    wrong = proofs.wrong(*words, where=fault("nan_in_the_last_from_30"))
    assert wrong[GRADIENT] == "step 31: not finite, though no rank's own gradient overflowed"


def test_a_right_strategy_of_ones_own_passes(proofs: Proofs) -> None:
    assert proofs.wrong(*ADAM, where=fault("Plain")) == {}
    assert proofs.wrong(*SGD, where=(*fault("Plain"), "launcher=torchrun")) == {}


MORE = ("optimizer.clip_norm=0.05", "regularize.l2=0.01", "schedule.name=cosine")
# Everything that changes the update by more than a thousandth of it, early and late, under Adam and SGD. What needs a recipe of
# its own names it.
TABLE: list[tuple[str, tuple[str, ...]]] = [
    (f"{name}{start}", words)
    for name in (
        "sum_for_mean",
        "divided_twice",
        "no_exchange",
        "first_left_out",
        "last_left_out",
        "bf16_exchange",
        "fp16_exchange",
        "one_rank_one_per_cent",
        "two_per_mille",
        "one_share_two_per_mille",
        "stale",
        "one_entry",
        "nan_in_the_last",
        "lr_off_unseen",
        "lr_off_two_per_mille",
        "momentum_off",
        "update_lost",
        "sample_twice",
        "wrong_label",
        "images_scaled",
        "drifts_between_steps",
    )
    for start in ("", "_from_13", "_from_31")
    for words in (ADAM, SGD)
]
TABLE += [
    (f"{name}{start}", (*words, *MORE))
    for name in ("clip_by_divided_norm", "l2_per_rank", "schedule_one_step_late")
    for start in ("", "_from_13")
    for words in (ADAM, SGD)
]
TABLE += [
    (name, words)
    for name in (
        "skipped_every_25th",
        "mean_of_means",
        "lr_off",
        "state_forgotten",
        "evaluation_1_twice",
        "evaluation_10_twice",
        "evaluation_100_twice",
        "evaluation_hits_off",
        "evaluation_disturbs",
        "seed_of_rank",
        "seed_of_rank_from_1",
    )
    for words in (ADAM, SGD)
]
TABLE += [
    ("masks_of_rank", (*ADAM, "regularize.dropout=0.2")),
    ("masks_of_rank_from_13", (*SGD, "regularize.dropout=0.2")),
]
TABLE += [("norm_of_rank", (*words, "regularize.batch_norm=synchronised")) for words in (ADAM, SGD)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_of_the_table_is_found(proofs: Proofs) -> None:
    missed = []
    for name, words in TABLE:
        wrong = proofs.wrong(*words, where=fault(name))
        print(f"{name:34} {words[0]:20} {'; '.join(f'{what}: {where}' for what, where in wrong.items()) or 'MISSED'}")
        missed += [] if wrong else [(name, words)]
    print(f"{len(TABLE) - len(missed)} of {len(TABLE)} faults found")
    assert missed == []


RIGHT = (ADAM, SGD, (*ADAM, "regularize.batch_norm=synchronised"), (*SGD, *MORE), (*ADAM, "precision=bf16"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_right_is_called_wrong_in_50_repetitions(proofs: Proofs) -> None:
    """Ten seeds of five recipes: other weights, other samples, other kinks."""
    alarms = {}
    for seed in range(10):
        for words in RIGHT:
            found = proofs.wrong(*words, f"seed={seed}")
            if found:
                alarms[(seed, words)] = found
    assert alarms == {}


RESNET = """
import torch
from torch import nn
from lockstep.models.layers import BatchNorm2d

class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), BatchNorm2d(after), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1), BatchNorm2d(after))
        self.short = nn.Identity() if before == after else nn.Sequential(nn.Conv2d(before, after, 1, stride), BatchNorm2d(after))

    def forward(self, x):
        return torch.relu(self.two(self.one(x)) + self.short(x))

def ResNet18(width=64):
    blocks = [Block(width * max(1, 2 ** ((i - 1) // 2)) if i else width, width * 2 ** (i // 2), 2 if i in (2, 4, 6) else 1) for i in range(8)]
    head = [nn.Conv2d(1, width, 3, 1, 1), BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*head, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))
"""
TIED = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(784, 64), nn.Linear(64, 784), nn.Linear(784, 10)
        self.outer.weight = nn.Parameter(torch.empty(784, 64).normal_(0, 0.05))
        self.inner.weight = nn.Parameter(self.outer.weight.data.t().clone())
        self.again = self.head

    def forward(self, x):
        x = torch.relu(self.inner(x.flatten(1)))
        x = torch.relu(self.outer(x))
        return self.head(x) + self.again(torch.tanh(x))
"""


@pytest.mark.parametrize(
    "words",
    [
        ("precision=bf16",),
        ("precision=fp16",),
        ("precision=pure-bf16", "optimizer.name=sgd", "optimizer.lr=0.05"),
        ("regularize.batch_norm=synchronised", "regularize.dropout=0.2", "regularize.mixup=0.3"),
        ("strategy=fsdp", "optimizer.name=adamw", "optimizer.weight_decay=0.1"),
        ("strategy=flat", "ranks=3", "optimizer.name=rmsprop", "optimizer.momentum=0.5", "regularize.l1=0.001"),
        (*SGD, "optimizer.nesterov=true", *MORE),
        ("strategy=naive", "quantize=qat"),
    ],
    ids=" ".join,
)
def test_what_is_right_passes(proofs: Proofs, words: tuple[str, ...]) -> None:
    recipe = tuple(word for word in words if not word.startswith(("strategy", "ranks")))
    where = tuple(word for word in words if word.startswith(("strategy", "ranks")))
    assert proofs.wrong(*recipe, where=where, which="3 ranks" if "ranks=3" in words else "2 ranks") == {}


@pytest.mark.parametrize("model", ["Tied", pytest.param("ResNet18", marks=pytest.mark.slow)])
def test_nets_with_much_rounding_pass(tmp_path: Path, proofs: Proofs, model: str) -> None:
    """A residual net with synchronised batch norm, in channels-last float32; tied weights under Adam."""
    path = tmp_path / "nets.py"
    path.write_text(TIED if model == "Tied" else RESNET)
    small = ("model_args.width=8",) if model == "ResNet18" else ()
    words = (f"model={path}:{model}", *small, *ADAM)
    assert proofs.wrong(*words) == {}
    if model == "ResNet18":
        assert proofs.alone(*words).has_batch_norm, "so verify leaves accumulation out"
        assert GRADIENT in proofs.wrong(*words, where=fault("norm_of_rank"))


def test_accumulation_passes_and_a_lost_pass_is_found(proofs: Proofs) -> None:
    which = "2 ranks, accumulation 2"
    assert proofs.wrong(*ADAM, which=which) == {}
    assert proofs.wrong(*ADAM, which=which, where=fault("mean_of_means"))[EXCHANGE].startswith("step 16")


def has_shm() -> bool:
    return sys.platform == "linux" and os.uname().machine == "x86_64"


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        pytest.param(
            "spawn", "shm", marks=pytest.mark.skipif(not has_shm(), reason="the shm backend is for Linux on x86")
        ),
        pytest.param(
            "mpirun",
            "mpi",
            marks=pytest.mark.skipif(not mpirun.library_kind(), reason="needs MPI: pip install 'lockstep-bench[mpi]'"),
        ),
    ],
)
def test_the_other_backends_pass(proofs: Proofs, launcher: str, backend: str) -> None:
    for which in ("2 ranks", "2 ranks, accumulation 2"):
        assert proofs.wrong(*ADAM, where=(f"launcher={launcher}", f"backend={backend}"), which=which) == {}


def test_a_partial_batch_is_there_or_is_said_not_to_be(proofs: Proofs) -> None:
    recipe = Recipe(global_batch=24)
    assert prove.with_partial_batch(recipe, 96).train_limit == 85
    assert prove.with_partial_batch(recipe, 100).train_limit is None
    assert prove.with_partial_batch(Recipe(global_batch=1), 96).train_limit is None
    assert "of them 2 with a partial batch of 13" in prove._what_was_judged(proofs.alone(*ADAM))


def test_nan_never_passes() -> None:
    worst = Worst()
    for difference in (0.1, math.nan, 0.2):
        worst.add(difference, 1.0, f"{difference}")
    assert math.isnan(worst.difference)
    assert not worst.check("x", "y").passed
    assert not Check("x", "y", 0.0, 0.0, diverged="why").passed
    entries = Worst()
    compare_entries(entries, np.array([0.0, math.nan]), np.array([1.0, 1.0]), 1.0, "here")
    assert not entries.check("x", "y").passed


@pytest.mark.parametrize(
    "chosen",
    [
        Optimizer(name="adam", lr=0.01, weight_decay=0.1),
        Optimizer(name="adamw", lr=0.01, weight_decay=0.1),
        Optimizer(name="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        Optimizer(name="sgd", lr=0.1),
        Optimizer(name="rmsprop", lr=0.01, momentum=0.5, weight_decay=0.1),
    ],
    ids=lambda chosen: chosen.name,
)
def test_the_judges_formulas_are_torchs_own_and_its_bounds_hold(chosen: Optimizer) -> None:
    """Against torch.optim in float64 to the last digits; against our float32 optimizer within the bound, and not far within."""
    from lockstep.training import optimizers

    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4000))
    ours = optimizers.build(chosen, [parameter])
    for step in range(3):
        gradient = torch.randn(4000) * 10.0 ** torch.randint(-4, 1, (4000,))
        before = {key: [t.clone() for t in tensors] for key, tensors in ours.state().items()}
        weights = {"w": parameter.detach().double().numpy().copy()}
        settings = {"lr": ours.lr, "momentum": ours.momentum, "clip_norm": None, "l1": 0.0, "l2": 0.0}
        recipe = Recipe(optimizer=chosen)
        expected = update(recipe, settings, weights, before, {"w": gradient.double().numpy()}, 2.0**-24)["w"]
        exact = _by_torch(chosen, weights["w"], before, gradient) if step else None
        parameter.grad = gradient.clone()
        ours.step()
        error = np.abs(parameter.detach().double().numpy() - expected["weights"].value)
        ratio = float((error / (steps.SLACK * expected["weights"].error)).max())
        assert 0.02 < ratio < 1, "the bound holds, and is not a thousand times too wide"
        if exact is not None:
            assert np.abs(exact - expected["weights"].value).max() < 1e-12


def _by_torch(chosen: Optimizer, weights: Any, state: dict[str, Any], gradient: torch.Tensor) -> Any:
    """One step of torch.optim in float64, from a state of ours."""
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    common = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
    if chosen.name in ("adam", "adamw"):
        kind = torch.optim.Adam if chosen.name == "adam" else torch.optim.AdamW
        optimizer: Any = kind([parameter], betas=(chosen.beta1, chosen.beta2), eps=chosen.eps, **common)
        names = {"step": "steps", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    elif chosen.name == "sgd":
        optimizer = torch.optim.SGD([parameter], momentum=chosen.momentum, nesterov=chosen.nesterov, **common)
        names = {"momentum_buffer": "momentum_buffer"} if chosen.momentum else {}
    else:
        optimizer = torch.optim.RMSprop(
            [parameter], alpha=chosen.alpha, eps=chosen.eps, momentum=chosen.momentum, **common
        )
        names = {"square_avg": "square_avg", "momentum_buffer": "momentum_buffer"}
    optimizer.state[parameter] = {theirs: state[mine][0].double() for theirs, mine in names.items()}
    if chosen.name == "rmsprop":
        optimizer.state[parameter]["step"] = torch.tensor(1.0)
    parameter.grad = gradient.double()
    optimizer.step()
    return parameter.detach().numpy()


def test_running_error_bounds_hold() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=10000).astype(np.float32) for _ in range(2))

    def exact(values: Any) -> Rounded:
        return Rounded(values.astype(np.float64), np.zeros(len(values)), 2.0**-24)

    x, y = exact(a), exact(b)
    found = x.by(x).plus(y.by(y)).root().times(0.3).over(y)
    actual = np.sqrt(a * a + b * b) * np.float32(0.3) / b
    error = np.abs(actual.astype(np.float64) - found.value)
    assert (error <= found.error).all()
    assert float((error / found.error).max()) > 0.1
