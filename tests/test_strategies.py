"""Every strategy in real processes, against plain loops in this one (strategy_rank.py)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional

import strategy_rank as reference
from lockstep import models, strategies
from lockstep.data import open_data
from lockstep.data.batches import sample_order
from lockstep.errors import InputError
from lockstep.launch.remarks import remarks
from lockstep.measure.clock import EXCHANGE, OPTIMIZER
from lockstep.placement import STRATEGIES, Placement, changes_mathematics, unknown_mathematics
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.resolve.checks import check_placement
from lockstep.settings import load
from lockstep.strategies import zero
from lockstep.strategies.optimizer import Optimizer, State
from lockstep.training.step import Steps
from shm_rank import Session
from support import SHORT, Cli

# Of the largest entry: float32 sums in another order differ by about 1e-6 of it, a wrong average by 1 / global batch at least.
GRADIENT_TOLERANCE = 1e-4
# The same of weights after BATCHES, in float64: a gradient here is a sum of at most 200 terms below 1, and so off by 200 eps = 4e-14 at most.
# Adam divides a gradient by its size plus 1e-8, and so makes at most 1e-2 / 1e-8 times as much of it in each of six steps: 3e-7, where the
# largest weight of a tensor is at least 0.1. In float32 such a bound would bound nothing.
DOUBLE_TOLERANCE = 3e-6

ADAM: dict[str, Any] = {"name": "adam", "lr": 0.01, "weight_decay": 0.01}
SGD: dict[str, Any] = {"name": "sgd", "lr": 0.1}
MOMENTUM: dict[str, Any] = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True}
TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
}
EXACT: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp, small buckets": {"strategy": "ddp", "ddp": {"bucket_mb": 0.001}},
    "ddp, static graph": {"strategy": "ddp", "ddp": {"static_graph": True}},
    "ddp, gradients copied": {"strategy": "ddp", "ddp": {"bucket_view": False}},
    "flat": {"strategy": "flat"},
    "naive": {"strategy": "naive"},
    "fsdp": {"strategy": "fsdp"},
}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Two and three ranks that stay for all tests of this file."""
    count: int = request.param
    opened = Session(tmp_path_factory.mktemp("strategies"), count, hosts="a" * count, backend="gloo", timeout=60)
    try:
        yield opened
        assert opened.close() == [0] * count, "every rank leaves in order"
    finally:
        opened.kill()


def run(session: Session, function: str, **arguments: Any) -> list[Any]:
    code = f"import strategy_rank; result = strategy_rank.{function}(rank, ranks, **arguments)"
    return session.run(code, arguments=arguments)


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference of any entry, relative to the largest entry of its tensor."""
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def weights(result: dict[str, Any]) -> list[torch.Tensor]:
    return list(result["weights"].values())


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The one result of ranks that must agree bit for bit."""
    first = results[0]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(other), strict=True)), "ranks differ"
    return first


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("name", EXACT)
def test_equal_to_one_process(ranks: Session, name: str, passes: int) -> None:
    """Gradients of every batch, partial ones and one with empty shares among them, and the weights at the end."""
    assert changes_mathematics(Placement(ranks=2, strategy=EXACT[name]["strategy"])) is None
    found = together(run(ranks, "train", settings=ADAM, passes=passes, **EXACT[name]))
    expected = reference.alone(TORCH["adam"])
    for number, (mine, theirs) in enumerate(zip(found["gradients"], expected["gradients"], strict=True)):
        # Later steps start from weights that differ by rounding already.
        assert distance(mine, theirs) < GRADIENT_TOLERANCE * (1 if number == 0 else 10), f"step {number + 1}"
    assert distance(weights(found), list(expected["weights"].values())) < 1e-3


@pytest.mark.parametrize(
    ("name", "messages"), [("ddp", 1), ("ddp, small buckets", None), ("flat", 1), ("naive", 7)], ids=str
)
def test_accumulation_sends_nothing_on_the_way(ranks: Session, name: str, messages: int | None) -> None:
    """Counted by PyTorch's profiler: four passes send what one does. DDP settles its buckets before the second step."""
    one, four = (run(ranks, "count_messages", passes=passes, **EXACT[name])[0] for passes in (1, 4))
    assert one == four
    assert one[-1] == messages if messages else one[-1] > 1


def test_a_static_graph_exchanges_once_more_and_never_again(ranks: Session) -> None:
    """DDP cannot learn the graph from a backward that exchanges nothing."""
    static = EXACT["ddp, static graph"]
    one, four = (run(ranks, "count_messages", passes=passes, **static)[0] for passes in (1, 4))
    assert four[0] == one[0] + 1
    assert four[-1] == one[-1] == 1


def test_fsdp_gathers_weights_once_for_all_passes_of_a_step(ranks: Session) -> None:
    """Four units (layers with weights): gathered for forward and again for backward, gradients reduced once; with
    accumulation gathered once."""
    one, four = (run(ranks, "count_messages", passes=passes, strategy="fsdp")[0] for passes in (1, 4))
    assert (one[-1], four[-1]) == (4 * 3, 4 * 2)


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-3), ("bf16", 1.6e-2)])
def test_compressing_hooks_round_and_nothing_else(ranks: Session, hook: str, tolerance: float) -> None:
    """Within the rounding of the format (2^-11, 2^-8 for each of a few operations), and not equal: it was really used."""
    assert changes_mathematics(Placement(ranks=2, strategy="ddp", ddp=reference.Ddp(hook=hook))) is not None  # type: ignore[arg-type]
    found = together(run(ranks, "train", settings=SGD, strategy="ddp", ddp={"hook": hook}))
    exact = reference.alone(TORCH["sgd"])
    assert 1e-5 < distance(found["gradients"][0], exact["gradients"][0]) < tolerance


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-3), ("bf16", 1.6e-2), ("powersgd", 1e-6)])
def test_a_hook_exchanges_in_the_group_that_it_was_given(ranks: Session, hook: str, tolerance: float) -> None:
    """A probe puts each rank into a group of its own, and the first rank steps alone in it: nobody would answer it elsewhere."""
    for steps in run(ranks, "in_own_group", hook=hook):
        for found in steps:
            half = len(found) // 2
            assert distance(found[:half], found[half:]) < tolerance


@pytest.mark.parametrize("own", [False, True])
def test_parameters_that_a_step_does_not_use(ranks: Session, own: bool) -> None:
    found = run(ranks, "unused_parameters", find=True, own=own)
    for step in range(3):
        model = reference.Branches()
        images = torch.randn(4 * len(found), 4, generator=torch.Generator().manual_seed(step))
        for rank, part in enumerate(images.split(4)):
            model(part, own and rank == 0).square().sum().backward()
        for mine in found:
            for gradient, parameter in zip(mine[step], model.parameters(), strict=True):
                if parameter.grad is None:  # as with one process: the optimizer passes it over
                    assert gradient is None
                else:
                    assert distance([gradient], [parameter.grad]) < 1e-5


def test_unused_parameters_without_the_option_are_one_line_that_names_them(ranks: Session) -> None:
    for said in run(ranks, "unused_parameters", find=False, own=False):
        assert said == (
            "strategy=ddp: the last step did not use second.weight and 1 more, and DDP waits for the gradients of all parameters: "
            "add ddp.find_unused_parameters=true, or choose strategy=flat"
        )


def test_powersgd_of_high_rank_is_exact(ranks: Session) -> None:
    """Where compressing would save nothing, PyTorch's hook sends the gradient as it is."""
    found = together(run(ranks, "train", settings=SGD, strategy="ddp", ddp={"hook": "powersgd", "powersgd_rank": 64}))
    exact = reference.alone(TORCH["sgd"])
    assert distance(found["gradients"][-1], exact["gradients"][-1]) < 10 * GRADIENT_TOLERANCE


def test_powersgd_sends_a_matrix_of_that_rank_and_keeps_the_rest_for_later(ranks: Session) -> None:
    """The linear layer's gradient has the stated rank from the third step on. What is left out is not lost: the sum of what was
    applied comes closer to the true sum than the best matrices of that rank could, if each step forgot what it left out."""
    steps = 30
    arguments: dict[str, Any] = {"settings": {"name": "sgd", "lr": 1e-6}, "batches": [12] * steps}
    found = together(run(ranks, "train", strategy="ddp", ddp={"hook": "powersgd", "powersgd_rank": 2}, **arguments))
    exact = reference.alone(partial(torch.optim.SGD, lr=1e-6), [12] * steps)
    layer = next(i for i, g in enumerate(exact["gradients"][0]) if g.shape == (16, 64))
    mine, theirs = ([step[layer].double() for step in source["gradients"]] for source in (found, exact))
    assert all(distance([mine[step]], [theirs[step]]) < GRADIENT_TOLERANCE for step in (0, 1))
    mine, theirs = mine[2:], theirs[2:]
    assert {int((torch.linalg.svdvals(matrix) > 1e-6 * matrix.norm()).sum()) for matrix in mine} == {2}
    applied, wanted, forgetful = (
        torch.stack(matrices).sum(0) for matrices in (mine, theirs, [best_of_rank(matrix, 2) for matrix in theirs])
    )
    assert (applied - wanted).norm() < 0.6 * (forgetful - wanted).norm()


def best_of_rank(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ v[:rank]


@pytest.mark.parametrize(("settings", "name"), [(SGD, "sgd"), (ADAM, "adam"), (MOMENTUM, "momentum")], ids=str)
@pytest.mark.parametrize("local", [{"every": 2}, {"every": 3, "warm_start": 2}, {"every": 100}], ids=str)
def test_local_sgd_equals_models_in_one_process(
    ranks: Session, settings: dict[str, Any], name: str, local: dict[str, int]
) -> None:
    arguments: dict[str, Any] = {"settings": settings, "local": local, "settle_after": [5], "double": True}
    found = together(run(ranks, "train", strategy="local-sgd", **arguments))
    expected = reference.local_reference(TORCH[name], len(ranks.ranks), settle_after=[5], **local)
    assert distance(weights(found), list(expected.values())) < DOUBLE_TOLERANCE


@pytest.mark.parametrize(
    "local", [{"every": 2}, {"every": 2, "warm_start": 1, "outer_lr": 0.5, "outer_momentum": 0.6}], ids=str
)
def test_diloco_equals_models_and_an_outer_optimizer_in_one_process(ranks: Session, local: dict[str, Any]) -> None:
    found = together(run(ranks, "train", settings=ADAM, strategy="diloco", local=local, double=True))
    outer = (local.get("outer_lr", 0.7), local.get("outer_momentum", 0.9))
    expected = reference.local_reference(
        TORCH["adam"], len(ranks.ranks), local["every"], local.get("warm_start", 0), outer
    )
    assert distance(weights(found), list(expected.values())) < DOUBLE_TOLERANCE


def test_local_sgd_that_averages_every_step_is_ddp(ranks: Session) -> None:
    """With plain SGD, partial batches and empty shares included; so it is one process, too."""
    found = together(run(ranks, "train", settings=SGD, strategy="local-sgd", local={"every": 1}))
    ddp = together(run(ranks, "train", settings=SGD, strategy="ddp"))
    assert distance(weights(found), weights(ddp)) < 1e-5
    assert distance(weights(found), list(reference.alone(TORCH["sgd"])["weights"].values())) < 1e-5


def test_diloco_with_a_plain_outer_step_is_local_sgd(ranks: Session) -> None:
    local = {"every": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    one = together(run(ranks, "train", settings=ADAM, strategy="diloco", local=local))
    other = together(run(ranks, "train", settings=ADAM, strategy="local-sgd", local={"every": 2}))
    assert distance(weights(one), weights(other)) < 1e-5
    really = together(run(ranks, "train", settings=ADAM, strategy="diloco", local={"every": 2}))
    assert distance(weights(really), weights(other)) > 1e-3, "the outer optimizer does something otherwise"


def test_local_steps_send_nothing(ranks: Session) -> None:
    assert run(ranks, "count_messages", strategy="local-sgd", passes=1)[0] == [0] * 4
    assert run(ranks, "count_messages", strategy="local-sgd", passes=1, local={"warm_start": 5})[0] == [1] * 4


def test_statistics_are_averaged_with_the_weights(ranks: Session) -> None:
    """Batch norm's running means: the mean of the ranks' own, after rounds of two steps of even batches."""
    arguments: dict[str, Any] = {"settings": SGD, "batches": [12, 12], "statistics": True}
    found = together(run(ranks, "train", strategy="local-sgd", local={"every": 2}, **arguments))
    count = len(ranks.ranks)
    means = []
    for rank in range(count):
        model = reference.build_model(statistics=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in (1, 2):
            images, labels = (part[reference.share(12, rank, count)] for part in reference.samples(step, 12))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        means.append(model.state_dict()["1.running_mean"])
    assert distance([found["weights"]["1.running_mean"]], [torch.stack(means).mean(0)]) < 1e-4
    assert int(found["weights"]["1.num_batches_tracked"]) == 2


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_what_they_keep_is_enough_to_go_on(ranks: Session, strategy: str) -> None:
    found = run(ranks, "interrupted", strategy=strategy, local={"every": 2, "warm_start": 1}, settings=SGD)
    whole = run(
        ranks,
        "train",
        strategy=strategy,
        local={"every": 2, "warm_start": 1},
        settings=SGD,
        settle_after=[4],
    )
    assert all(torch.equal(a, b) for a, b in zip(weights(together(found)), weights(together(whole)), strict=True))


@pytest.mark.parametrize("bucket_mb", [25, 0.004])
def test_powersgd_goes_on_with_what_it_had_left_out(ranks: Session, bucket_mb: float) -> None:
    """Also though a DDP that is built anew has other buckets in its first step; with one bucket and with several."""
    knobs = {"hook": "powersgd", "powersgd_rank": 1, "bucket_mb": bucket_mb}
    found = run(ranks, "interrupted", strategy="ddp", ddp=knobs, settings=SGD)
    whole = run(ranks, "train", strategy="ddp", ddp=knobs, settings=SGD)
    # Other buckets add up the same numbers in another order, and an approximation of rank one answers to that.
    assert distance(weights(together(found)), weights(together(whole))) < 1e-4
    kept = whole[0]["state"]
    assert int(kept["powersgd.step"]) == len(reference.BATCHES)
    errors = {key: tensor for key, tensor in kept.items() if key.startswith("powersgd.error.")}
    assert errors["powersgd.error.4.weight"].shape == (len(ranks.ranks), 64 * 16)
    assert errors["powersgd.error.4.weight"].abs().sum() > 0
    assert not all(torch.equal(e[0], e[1]) for e in errors.values()), "each rank has left out something else"


def test_powersgd_lays_out_its_memory_anew_only_when_no_bucket_is_under_way(ranks: Session) -> None:
    """A bucket under way writes its part of the memory when it is done: taken away before that, it is lost."""
    for kept in run(ranks, "rebuilt_buckets"):
        weights = {f"{layer}.weight" for layer in range(3)}
        assert {key for key in kept if ".start." in key} == {f"powersgd.start.{name}" for name in weights}
        names = weights | {f"{layer}.bias" for layer in range(3)}
        assert {key for key in kept if ".error." in key} == {f"powersgd.error.{name}" for name in names}


@pytest.mark.parametrize(
    "settings",
    [ADAM, {**ADAM, "name": "adamw"}, SGD, MOMENTUM, {"name": "rmsprop", "lr": 0.01, "momentum": 0.5}],
    ids=lambda settings: f"{settings['name']}{settings.get('momentum', '')}",
)
def test_zero_has_the_bits_of_the_undivided_optimizer(ranks: Session, settings: dict[str, Any]) -> None:
    results = run(ranks, "zero_and_whole", settings=settings)
    for result in results:
        same_tensors(result["zero"]["weights"], result["whole"]["weights"])
        same_state(result["zero"]["state"], result["whole"]["state"])
    total = sum(tensor.numel() for key, values in results[0]["whole"]["state"].items() for tensor in values)
    assert sum(result["own"] for result in results) == total, "all parts together are the whole state"
    assert max(result["own"] for result in results) < 0.75 * total or total == 0


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("settings", [ADAM, {**ADAM, "name": "adamw"}, SGD, MOMENTUM], ids=lambda s: s["name"])
def test_zero_whatever_the_order_of_the_weights_in_memory(
    ranks: Session, settings: dict[str, Any], channels_last: bool
) -> None:
    arguments: dict[str, Any] = {"settings": settings, "thin": True, "channels_last": channels_last}
    start = reference.zero_and_whole(0, 1, **arguments)["whole"]["state"]
    for result in run(ranks, "zero_and_whole", start=start, **arguments):
        same_tensors(result["zero"]["weights"], result["whole"]["weights"])
        same_state(result["zero"]["state"], result["whole"]["state"])


def test_zeros_messages_are_exchange_and_not_optimizer(module_cli: Cli) -> None:
    """ZeRO's broadcast of the updated weights is the only thing between the update and the end of the step that takes long."""
    seen: list[Any] = []
    nothing = {name: lambda *given: None for name in ("start", "finish", "skip", "lap_backward", "gradients_ready")}
    records = SimpleNamespace(clock=SimpleNamespace(lap=seen.append, **nothing), log=SimpleNamespace(count=0))
    parameter = torch.nn.Parameter(torch.ones(2))

    class Sends(Optimizer):
        parameters: ClassVar = [parameter]

        def step(self) -> None:
            """Nothing."""

        def state(self) -> State:
            return {}

        def exchange(self) -> None:
            seen.append("send")

    class After(strategies.Strategy):
        def after_step(self, number: int) -> None:
            seen.append(number)

    model = torch.nn.ParameterList([parameter])
    for strategy, optimizer, expected in (
        (After, Sends, [OPTIMIZER, "send", EXCHANGE, 7, EXCHANGE]),
        (strategies.Strategy, Sends, [OPTIMIZER, "send", EXCHANGE]),
        (strategies.Strategy, None, [OPTIMIZER]),
    ):
        built = strategy(model, Placement(ranks=2), torch.device("cpu"))
        steps = Steps(built, records, 2, optimizer() if optimizer else None, taken=6)  # type: ignore[arg-type]
        steps.open(0, 8).backward(parameter.sum())
        seen.clear()
        steps.finish(1)
        assert seen == expected


OWN = """
from lockstep.strategies import Strategy

class Right(Strategy):
    def _helper(self):
        pass

class Typo(Strategy):
    def after_stp(self, number):
        pass
"""


def test_a_typo_in_a_hooks_name_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    with pytest.raises(InputError, match="'after_stp' is not a hook, did you mean 'after_step'"):
        strategies.kind_of(f"{file}:Typo")
    file.write_text(OWN.replace("after_stp", "compress"))
    with pytest.raises(InputError, match=r"'compress' is not a hook.*starts with an underscore"):
        strategies.kind_of(f"{file}:Typo")
    file.write_text(OWN.replace("after_stp", "_after"))
    assert issubclass(strategies.kind_of(f"{file}:Right"), strategies.Strategy)
    file = tmp_path / "other.py"
    file.write_text("class Own:\n    pass\n")
    with pytest.raises(InputError, match="not a subclass"):
        strategies.kind_of(f"{file}:Own")


def test_the_example_of_a_strategy_in_the_docs_computes_what_flat_computes(module_cli: Cli, tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs/strategies.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "mine.py").write_text(code[0])
    words = ("data=embedded", "train_limit=64", "global_batch=32", "epochs=1", "ranks=2", "threads=1", "backend=gloo")
    mine, flat = (module_cli.run(*words, f"strategy={name}") for name in (f"{tmp_path}/mine.py:AllReduceEach", "flat"))
    assert mine["weights_sha256"] == flat["weights_sha256"]


def test_zero_goes_on_from_any_number_of_ranks(ranks: Session) -> None:
    """A state that one undivided optimizer made, taken over by each rank's part."""
    start = reference.zero_and_whole(0, 1, MOMENTUM)["whole"]["state"]
    for result in run(ranks, "zero_and_whole", settings=MOMENTUM, start=start):
        same_tensors(result["zero"]["weights"], result["whole"]["weights"])
        same_state(result["zero"]["state"], result["whole"]["state"])


def test_zero_equals_torchs_own(ranks: Session) -> None:
    theirs = run(ranks, "torch_zero", lr=0.01, decay=0.01)
    ours = run(ranks, "zero_and_whole", settings=ADAM, change_lr=False)
    for one, other in zip(ours, theirs, strict=True):
        assert distance(one["zero"]["weights"], other) < 1e-5


def test_zero_divides_as_torch_does() -> None:
    """The largest first, to whoever has least: by hand for seven sizes and three ranks."""
    assert zero.divide([10, 50, 20, 40, 5, 30, 1], 3) == [1, 0, 2, 1, 0, 2, 1]
    assert zero.divide([3], 2) == [0]


def same_tensors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def same_state(found: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]]) -> None:
    assert set(found) == set(expected)
    for key in expected:
        same_tensors(found[key], expected[key])


def test_fsdp_keeps_a_part_and_gives_back_the_whole(ranks: Session) -> None:
    count = len(ranks.ranks)
    results = run(ranks, "fsdp_parts", settings=ADAM)
    whole = sum(parameter.numel() for parameter in reference.build_model().parameters())
    assert sum(result["kept"] for result in results) == whole
    assert max(result["kept"] for result in results) < 1.5 * whole / count
    for result in results:
        assert result["evaluated"] == pytest.approx(results[0]["evaluated"], abs=0), "ranks evaluate alone, alike"
        same_state(result["state"], results[0]["state"])
        same_state(result["reloaded"], results[0]["state"])
        expected = reference.build_model(seed=6).state_dict()
        same_tensors(list(result["loaded"].values()), list(expected.values()))
    means = results[0]["state"]["exp_avg"]
    assert [tuple(mean.shape) for mean in means] == [tuple(p.shape) for p in reference.build_model().parameters()]


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco", "flat", "naive"])
def test_one_rank_is_one_process(strategy: str) -> None:
    """Nothing to exchange, and DiLoCo's outer optimizer does not come between: `changes_mathematics` says so."""
    found = reference.train(0, 1, strategy, SGD)
    expected = reference.alone(TORCH["sgd"])
    assert distance(weights(found), list(expected["weights"].values())) < 1e-6
    assert changes_mathematics(Placement(ranks=1, strategy=strategy)) is None


@pytest.mark.parametrize(
    ("strategy", "settings", "words"),
    [
        ("dp", {}, ("strategy=dp", "CPU", "strategy=ddp")),
        ("fsdp", {}, ("strategy=fsdp", "ranks=2")),
        ("ddp", {}, ("strategy=ddp", "ranks=2")),
        ("local-sgd", {"ranks": 2, "zero": True}, ("zero=true", "strategy=local-sgd", "strategy=ddp")),
        ("diloco", {"ranks": 2, "zero": True}, ("zero=true", "strategy=diloco")),
        ("fsdp", {"ranks": 2, "zero": True}, ("zero=true", "strategy=fsdp")),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    strategy: str, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        resolve(Recipe(), Placement(strategy=strategy, **settings))
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("local-sgd", ("zero=true", "strategy=local-sgd", "of its own", "strategy=ddp")),
        ("fsdp", ("zero=true", "strategy=fsdp", "already")),
    ],
)
def test_a_strategy_without_zero_says_why(strategy: str, words: tuple[str, ...]) -> None:
    """A strategy of the user's own is not known to resolve/, so the ranks look again."""
    with pytest.raises(InputError) as caught:
        strategies.build(
            strategy, reference.build_model(), Placement(strategy=strategy, ranks=2, zero=True), torch.device("cpu")
        )
    assert all(word in str(caught.value) for word in words)


def test_dp_is_one_process_with_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="ranks=2"):
        check_placement(Placement(strategy="dp", device="cuda", ranks=2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="several GPUs"):
        strategies.build("dp", reference.build_model(), Placement(strategy="dp"), torch.device("cpu"))


def test_every_name_is_a_strategy() -> None:
    assert set(strategies.STRATEGIES) == set(STRATEGIES)


LOCAL_RUN = ("strategy=local-sgd", "local_sgd.every=4", "local_sgd.warm_start=3")
TWO = ("ranks=2", "threads=1")


def weights_of(document: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(Path(document["run"]) / "model.pt", weights_only=True)
    return found


def test_a_whole_run_with_local_sgd_equals_a_plain_loop(module_cli: Cli) -> None:
    """Two models that go over the recipe's own batches; every epoch of 15 steps ends a round, since it is evaluated."""
    document = module_cli.run(*SHORT, *TWO, *LOCAL_RUN, "optimizer.name=sgd", "optimizer.lr=0.1")
    assert document["ranks_agree"]
    recipe = load([], SHORT)[0]
    data = open_data("embedded", quiet=True)
    pair = [models.build(recipe), models.build(recipe)]
    taken = since = 0
    for epoch in (1, 2):
        order = sample_order(recipe, epoch, 703).tolist()
        for first in range(0, 703, 48):
            chosen = order[first : first + 48]
            shares = [chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]]
            taken += 1
            for model, share in zip(pair, shares if taken > 3 else [chosen, chosen], strict=True):
                images = torch.stack([(torch.tensor(data.train_images[i]).float() / 255 - 0.5) / 0.5 for i in share])
                labels = torch.tensor([int(data.train_labels[i]) for i in share])
                loss = functional.cross_entropy(model(images), labels, reduction="sum")
                loss = loss * (2 if taken > 3 else 1) / len(chosen)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter -= 0.1 * gradient
            since += taken > 3
            if since == 4 or len(chosen) < 48:
                since = 0
                with torch.no_grad():
                    for one, other in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
                        one.copy_((one + other) / 2)
                        other.copy_(one)
    expected = pair[0].state_dict()
    found = weights_of(document)
    assert distance([found[name] for name in expected], list(expected.values())) < 1e-3


def test_a_whole_run_with_zero_ends_with_the_same_bits(module_cli: Cli) -> None:
    with_zero, without = (module_cli.run(*SHORT, *TWO, "strategy=ddp", f"zero={word}") for word in ("true", "false"))
    assert with_zero["weights_sha256"] == without["weights_sha256"]
    assert with_zero["ranks_agree"]


@pytest.mark.slow
def test_a_run_with_zero_is_kept_and_goes_on_with_another_number_of_ranks(module_cli: Cli) -> None:
    words = ["data=embedded", "train_limit=96", "global_batch=24", "zero=true", "threads=1", "strategy=ddp"]
    whole = module_cli.run(*words, "ranks=2", "epochs=2")
    first = module_cli.run(*words, "ranks=2", "epochs=1", "--checkpoint-every", "1")
    assert first["ranks_agree"]
    same, other = (module_cli.run(*words, f"ranks={ranks}", "epochs=2", "--resume", first["run"]) for ranks in (2, 3))
    assert same["weights_sha256"] == whole["weights_sha256"]
    found, expected = weights_of(other), weights_of(whole)
    # Three ranks add up gradients in another order; Adam makes full steps also of gradients that are nearly nothing.
    assert distance([found[name] for name in expected], list(expected.values())) < 1e-3


def test_a_strategy_of_ones_own_is_said_to_be_unverified() -> None:
    assert unknown_mathematics(Placement(ranks=1, strategy="own.py:Own")) is None
    assert all(unknown_mathematics(Placement(ranks=2, strategy=name)) is None for name in (*STRATEGIES, "auto"))
    said = unknown_mathematics(Placement(ranks=2, strategy="own.py:Own"))
    assert said == "strategy=own.py:Own is your own: lockstep verify shows whether it computes what one process would"
    words: dict[str, Any] = {"plan": SimpleNamespace(lr_note=""), "recipe": Recipe()}
    options = SimpleNamespace(resume_from=None)
    own = Placement(ranks=2, strategy="own.py:Own")
    assert remarks(SimpleNamespace(placement=own, options=options, **words)) == [said]


@pytest.mark.slow
def test_a_whole_run_with_fsdp_learns_what_one_process_does(module_cli: Cli, alone: dict[str, Any]) -> None:
    divided = module_cli.run(*SHORT, *TWO, "strategy=fsdp", "accumulation=2")
    assert divided["ranks_agree"]
    assert divided["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)
    found, expected = weights_of(divided), weights_of(alone)
    assert distance([found[name] for name in expected], list(expected.values())) < 1e-2


def test_dp_on_a_cpu_is_one_line(module_cli: Cli) -> None:
    assert "a CPU is one device" in module_cli.error("run", *SHORT, "strategy=dp", code=2)


def test_ddp_does_not_import_the_compiler() -> None:
    """It would take as long as torch itself, in every rank of every run."""
    script = """
import os, sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from lockstep.strategies import Ddp
from lockstep.placement import Placement
dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
ddp = Ddp(torch.nn.Linear(4, 2), Placement(ranks=2), torch.device("cpu"))
ddp.model(torch.ones(3, 4)).sum().backward()
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
import torch._dynamo
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer", "what stood in for it is gone"
ddp.model(torch.ones(3, 4)).sum().backward()
del ddp
dist.destroy_process_group()
os._exit(0)  # as a worker ends: what torch's threads do while an interpreter is taken down (rarely, they abort) is not ours
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
