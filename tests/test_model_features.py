"""What models of people's own have: each feature with each strategy is proven, or refused in one line. docs/strategies.md has the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import feature_rank
from lockstep import models, strategies
from lockstep.data import open_data
from lockstep.data.batches import Batches
from lockstep.errors import InputError
from lockstep.launch import execute, prepare
from lockstep.placement import Ddp, Placement
from lockstep.recipe import Recipe
from lockstep.run import Options, Proof, Run
from lockstep.settings import load
from lockstep.strategies.units import units
from lockstep.training import trial
from lockstep.training.loss import Loss
from lockstep.training.precision import Precision
from lockstep.verify import judge, prove
from lockstep.verify.records import Records
from shm_rank import Session
from support import SHORT, Cli

NETS = Path(__file__).with_name("feature_nets.py")
# By the table's row: the net, and what DDP has to be told of it: whether steps leave parameters out, and which gradients are sparse.
FEATURES: dict[str, tuple[str, bool, list[str]]] = {
    "weights that layers share": ("Tied", False, []),
    "parameters with `requires_grad=False`": ("Frozen", False, []),
    "buffers that change (a count of steps)": ("Buffers", False, []),
    "a dictionary of outputs, with a head that the loss does not use": ("Outputs", True, []),
    "LSTM and GRU": ("Recurrent", False, []),
    "float64": ("double", False, []),
    "a layer in float64, the rest in float32": ("Mixed", False, []),
    "complex weights": ("Complex", False, []),
    "`nn.Embedding(sparse=True)`": ("Sparse", False, []),
    "`functional.embedding(…, sparse=True)`": ("SparseFunction", False, ["embedding.weight"]),
    "parameters that no step uses": ("Unused", True, []),
    "other parameters in other steps": ("Steps", True, []),
    "ranks that take different branches (experts by sample)": ("Branches", True, []),
}
# By the table's column: what a run is given, and whether it computes what one process does.
COLUMNS = {
    "ddp": (("strategy=ddp",), True),
    "flat": (("strategy=flat",), True),
    "naive": (("strategy=naive",), True),
    "fsdp": (("strategy=fsdp",), True),
    "zero": (("strategy=ddp", "zero=true"), True),
    "local-sgd": (("strategy=local-sgd", "local_sgd.every=3"), False),
    "powersgd": (("strategy=ddp", "ddp.hook=powersgd"), False),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    opened = Session(tmp_path_factory.mktemp("features"), 2, hosts="aa", backend="gloo", timeout=30)
    try:
        yield opened
        assert opened.close() == [0, 0]
    finally:
        opened.kill()


def run(session: Session, function: str, **arguments: Any) -> list[Any]:
    return session.run(
        f"import feature_rank; result = feature_rank.{function}(rank, ranks, **arguments)", arguments=arguments
    )


@pytest.mark.parametrize("strategy", ["ddp", "flat"])
@pytest.mark.parametrize("feature", FEATURES)
def test_two_ranks_have_the_gradients_of_one_process_in_double(ranks: Session, feature: str, strategy: str) -> None:
    name, find, sparse = FEATURES[feature]
    expected = feature_rank.truth(name)
    arguments = {"name": name, "strategy": strategy, "find": find, "sparse": sparse}
    for mine in run(ranks, "gradients", **arguments):
        for step, (gradients, true) in enumerate(zip(mine, expected, strict=True)):
            for gradient, exact in zip(gradients, true, strict=True):
                assert (gradient is None) == (exact is None), f"step {step}: absent where one process has none"
                if gradient is not None:
                    tolerance = 1e-12 if name == "double" else 1e-5
                    assert (gradient - exact).abs().max() <= tolerance * exact.abs().max().clamp(min=1e-3)


def settled(name: str, placement: Placement, precision: str = "fp32") -> tuple[Any, Placement, list[str]]:
    recipe = Recipe(model=f"{NETS}:{name}", data="embedded", precision=precision)  # type: ignore[arg-type]
    data, device = open_data("embedded", quiet=True), torch.device("cpu")
    form = Precision(recipe, device)
    model = form.prepare(models.build(recipe, models.blank(data.shape)))
    batches = Batches(data.train_images, data.train_labels, data, recipe, device, torch.contiguous_format)
    return model, *trial.settle(recipe, placement, model, batches, form, Loss(recipe))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_trial_decides_whether_ddp_looks_for_unused_parameters(feature: str) -> None:
    name, find, sparse = FEATURES[feature]
    before = torch.get_rng_state()
    _, placement, said = settled(name, Placement(ranks=2, strategy="ddp"))
    assert torch.equal(before, torch.get_rng_state())
    assert placement.ddp.find_unused_parameters is find
    assert any("ddp.find_unused_parameters=true" in line for line in said) == find
    assert any("are dense" in line for line in said) == bool(sparse)
    stated = Placement(ranks=2, strategy="ddp", ddp=Ddp(find_unused_parameters=False))
    assert settled(name, stated)[1] == stated, "what is stated stays"


def test_the_trial_names_what_it_saw_and_a_published_net_is_not_tried() -> None:
    said = settled("Unused", Placement(ranks=2, strategy="ddp"))[2]
    assert said == [
        "ddp.find_unused_parameters=true: a trial pass gave never.weight and 1 more no gradient; "
        "DDP looks for such parameters after every forward pass"
    ]
    placement = Placement(ranks=2, strategy="ddp")
    nothing: Any = None
    assert trial.settle(Recipe(), placement, nothing, nothing, nothing, nothing) == (placement, [])
    failed = trial.try_passes(torch.nn.Linear(1, 1), lambda net, number: net(torch.ones(3)), 1)
    assert failed.failed
    assert not failed.unused


def test_a_step_that_leaves_out_what_the_trial_had_seen_is_one_line(cli: Cli, ranks: Session) -> None:
    """In the middle of a run; and in its very last step, after which no forward pass would show it."""
    words = (*SHORT, f"model={NETS}:Steps", "model_args.together=true", "ranks=2", "strategy=ddp")
    message = cli.error("run", *words, "max_steps=9", code=2)
    line = (
        "strategy=ddp: the last step did not use even.weight and 1 more, and DDP waits for the gradients of all parameters: "
        "add ddp.find_unused_parameters=true, or choose strategy=flat"
    )
    assert line in " ".join(message.split())
    assert run(ranks, "left_out_at_the_end") == [f"step 1: {line}"] * 2


def test_ranks_that_call_different_layers_are_found_before_a_result_is_taken(ranks: Session) -> None:
    for said in run(ranks, "different_layers", ddp=False):
        assert said.startswith("strategy=fsdp: ranks called different layers or got different gradients in a step")
    for said in run(ranks, "different_layers", ddp=True):
        assert said.startswith("strategy=ddp: the last step did not use layers.")


@pytest.mark.parametrize(
    ("name", "place", "precision", "said"),
    [
        ("Complex", {"ddp": Ddp(hook="fp16")}, "fp32", "ddp.hook=fp16 compresses real numbers, and turn is complex"),
        ("Complex", {}, "pure-bf16", "precision=pure-bf16: turn is complex64, which has no 16-bit form"),
        ("double", {}, "bf16", "precision=bf16: first.weight is float64, which has no 16-bit form"),
        ("SparseFunction", {"strategy": "fsdp"}, "fp32", "strategy=fsdp: the gradient of embedding.weight is sparse"),
        ("Branches", {"strategy": "fsdp"}, "fp32", "got a gradient from some samples of a trial and none from others"),
        ("Scalar", {"strategy": "fsdp"}, "fp32", "strategy=fsdp: scale has no dimension to be divided along"),
        ("Several", {"strategy": "fsdp"}, "fp32", "weights of float32 and float64 are gathered together"),
        ("Empty", {"strategy": "fsdp"}, "fp32", "has no parameters to train"),
    ],
    ids=str,
)
def test_what_a_strategy_cannot_do_is_one_line(name: str, place: dict[str, Any], precision: str, said: str) -> None:
    def start() -> None:
        model, placement, _ = settled(name, Placement(ranks=2, **{"strategy": "ddp", **place}), precision)
        strategies.build(placement.strategy, model, placement, torch.device("cpu"))

    with pytest.raises(InputError) as caught:
        start()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_of_a_layer_that_is_not_called_are_one_line(cli: Cli) -> None:
    words = (*SHORT, f"model={NETS}:Uncalled", "ranks=2", "strategy=fsdp", "max_steps=2")
    assert "uses the weights of a layer without calling the layer" in cli.error("run", *words, code=2)


def test_units_are_layers_that_are_called_and_share_nothing() -> None:
    recipe = Recipe(model=f"{NETS}:Branches")
    model: Any = models.build(recipe)
    assert units(model) == [model.first, model.head, *model.experts]
    tied: Any = models.build(Recipe(model=f"{NETS}:Tied"))
    assert units(tied) == [tied.first, tied.head], "what two share is gathered with the model"


class Cells:
    """Proves the cells of a row, as `lockstep verify` does, on few batches; the run in one process is made once."""

    def __init__(self, folder: Path, name: str) -> None:
        words = ("data=embedded", "global_batch=24", "test_limit=100", "backend=gloo", "threads=1", "ranks=2")
        self._words, self._folder = (*words, f"model={NETS}:{name}", "optimizer.lr=0.005", "timeout_s=30"), folder
        self._alone: Records | None = None

    def of(self, *words: str, proven: bool) -> str:
        try:
            found = self._run(*words, proven=proven)
        except InputError:
            return "refused"
        wrong = {c.what: c.where for c in found if not c.passed}
        assert wrong == {}, (words, wrong)
        return "yes" if proven else "trains"

    def _run(self, *words: str, proven: bool) -> list[Any]:
        recipe, placement = load([], [*self._words, *words])
        spec = prove.plan(recipe, placement, self._folder, None, prove.FEW_BATCHES)
        chosen = prove.placements(spec.recipe, spec.placement)
        if self._alone is None:
            self._alone = Records(self._execute(spec.recipe, chosen[prove.ALONE], Proof()))
        proof = Proof(reference=str(self._alone.run.folder)) if proven else None
        run = self._execute(spec.recipe, chosen["2 ranks"], proof)
        if not proven:
            assert run.summary()["ranks_agree"]
            return []
        return list(judge.judge(self._alone, Records(run), "2 ranks"))

    def _execute(self, recipe: Recipe, placement: Placement, proof: Proof | None) -> Run:
        number = len(list(self._folder.iterdir()))
        run, spec = prepare(
            recipe, placement, Options(proof=proof, save_model=False), self._folder, name=f"run-{number}"
        )
        return execute(run, spec)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_table_in_the_docs_is_what_verify_says(tmp_path: Path) -> None:
    lines = [f"| your model has | {' | '.join(f'`{name}`' for name in COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for feature, (name, *_) in FEATURES.items():
        folder = tmp_path / name
        folder.mkdir()
        cells = Cells(folder, name)
        found = [cells.of(*words, proven=proven) for words, proven in COLUMNS.values()]
        lines.append(f"| {feature} | {' | '.join(found)} |")
    table = "\n".join(lines)
    assert table in (Path(__file__).parents[1] / "docs/strategies.md").read_text(), f"the table is now\n{table}"
