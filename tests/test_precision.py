"""Number formats: the loss scale against GradScaler, what 16 bits lose, and that a run counts it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.recipe import Recipe
from lockstep.training import precision as formats
from lockstep.training.precision import LossScale, NumberWatch, Precision
from support import SHORT, Cli, train_here

CPU = torch.device("cpu")


def test_the_loss_scale_follows_gradscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scales, the same skipped steps and the same unscaled gradients, with overflows in between."""
    monkeypatch.setattr(formats, "GROWTH_STEPS", 3)
    weight = nn.Parameter(torch.ones(5))
    theirs = torch.amp.GradScaler("cpu", init_scale=formats.FIRST_SCALE, growth_interval=3)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    ours = LossScale(CPU)
    for gradient in (1.0, float("inf"), 2.0, 3.0, 4.0, float("nan"), 5.0, 6.0, 7.0):
        given = torch.full((5,), gradient) * ours.value
        theirs.scale(torch.zeros(()))  # it makes its tensors when they are first needed
        weight.grad = given.clone()
        theirs.unscale_(optimizer)
        mine = given.clone()
        taken = ours.unscale([mine])
        assert taken == bool(torch.isfinite(torch.tensor(gradient)))
        assert torch.equal(mine, weight.grad) or not taken
        theirs.step(optimizer)
        theirs.update()
        assert float(ours.value) == theirs.get_scale()
    assert ours.skipped == 2


def test_a_kept_scale_goes_on() -> None:
    first, second = LossScale(CPU), LossScale(CPU)
    first.unscale([torch.tensor([float("inf")])])
    second.load_state(copy.deepcopy(first.state()))
    assert float(second.value) == formats.FIRST_SCALE / 2
    assert second.skipped == 1


def test_what_16_bits_lose_is_counted() -> None:
    watch = NumberWatch(torch.float16)
    weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float16))
    # A zero, a subnormal of fp16, an overflow, and one that is all right.
    weight.grad = torch.tensor([0.0, 1e-6, 1e9, 0.5]).half()
    watch.before([weight], [weight.grad])
    with torch.no_grad():
        # fp16 has 11 digits: 1 - 0.0001 is 1 again, 1 - 0.5 is not.
        weight -= torch.tensor([0.0, 0.0001, 0.0001, 0.5]).half()
    watch.after([weight], [weight.grad])
    found = watch.summary()
    assert found["gradient_zero_share"] == 0.25
    assert found["gradient_subnormal_share"] == 0.25
    assert found["gradient_not_finite_share"] == 0.25
    assert found["lost_update_share"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("name", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_keeps_weights_in_fp32_and_computes_in_16_bits(name: str, kind: torch.dtype) -> None:
    mixed = Precision(Recipe(precision=name), CPU)  # type: ignore[arg-type]
    model = mixed.prepare(nn.Linear(4, 3))
    with mixed.context():
        raw = model(mixed.images(torch.ones(2, 4)))
        assert raw.dtype == kind
        assert mixed.scores(raw).dtype == torch.float32
    assert model.weight.dtype == torch.float32
    pure = Precision(Recipe(precision=f"pure-{name}"), CPU)  # type: ignore[arg-type]
    assert pure.prepare(nn.Linear(4, 3)).weight.dtype == kind


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_runs_are_near_fp32_and_equal_on_two_ranks(
    module_cli: Cli, alone: dict[str, Any], precision: str
) -> None:
    one = train_here(module_cli.runs, *SHORT, f"precision={precision}")
    two = module_cli.run(*SHORT, "threads=1", f"precision={precision}", "ranks=2", "strategy=ddp")
    assert two["ranks_agree"]
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=0.02)
    assert one["train_loss"] == pytest.approx(alone["train_loss"], rel=0.05)
    assert one["train_loss"] != alone["train_loss"], "it really computed in another format"
    assert one["numbers"]["lost_update_share"] < 0.01, "weights are fp32, so updates arrive"


def test_pure_bf16_loses_updates_and_says_so(module_cli: Cli) -> None:
    found = train_here(module_cli.runs, *SHORT, "precision=pure-bf16", "optimizer.lr=0.0001")
    assert found["numbers"]["lost_update_share"] > 0.3
    shown = module_cli("show", found["id"]).stdout
    assert "of updates lost to rounding" in shown


def test_the_hardware_is_named_before_the_run(module_cli: Cli) -> None:
    """Tried first, then what the CPU has for it or lacks; broken machines are in test_machine.py."""
    plan = module_cli("run", *SHORT, "precision=bf16", "--dry-run").stdout
    assert "# precision bf16: works here (tried); " in plan
