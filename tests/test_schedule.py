"""Schedules against `torch.optim.lr_scheduler`, and the learning-rate rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch.optim import lr_scheduler

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.recipe import Optimizer, Recipe, Schedule, unused_settings
from lockstep.resolve import resolve
from lockstep.schedule import factor
from lockstep.training import optimizers
from lockstep.training.schedule import Pace

PER_EPOCH, EPOCHS, LR = 7, 5, 0.02
TOTAL = PER_EPOCH * EPOCHS


def stock(build: Callable[[Any], Any], per_epoch: bool = False) -> list[tuple[float, float]]:
    """Learning rate and beta1 of every step, as PyTorch's scheduler sets them."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = build(optimizer)
    found = []
    for step in range(TOTAL):
        group = optimizer.param_groups[0]
        found.append((group["lr"], group["betas"][0]))
        optimizer.step()
        if not per_epoch or (step + 1) % PER_EPOCH == 0:
            scheduler.step()
    return found


def ours(schedule: Schedule) -> list[tuple[float, float]]:
    recipe = Recipe(global_batch=8, epochs=EPOCHS, optimizer=Optimizer(name="adamw", lr=LR), schedule=schedule)
    worked_out = plan(recipe, Placement(), PER_EPOCH * 8, 8)
    optimizer = optimizers.build(recipe.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    pace, found = Pace(recipe, worked_out, optimizer), []
    for step in range(TOTAL):
        pace.set(step)
        found.append((optimizer.lr, optimizer.momentum))
    return found


CASES = {
    "constant": (Schedule(), lambda o: lr_scheduler.ConstantLR(o, factor=1.0), False),
    "step": (
        Schedule(name="step", every_epochs=2, factor=0.5),
        lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
        True,
    ),
    "cosine": (
        Schedule(name="cosine", final=0.1),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL, eta_min=LR * 0.1),
        False,
    ),
    "onecycle": (Schedule(name="onecycle"), lambda o: lr_scheduler.OneCycleLR(o, max_lr=LR, total_steps=TOTAL), False),
    "onecycle, other turns": (
        Schedule(name="onecycle", peak_at=0.5, start_div=10, final_div=100, cycle_momentum=False),
        lambda o: lr_scheduler.OneCycleLR(
            o, max_lr=LR, total_steps=TOTAL, pct_start=0.5, div_factor=10, final_div_factor=100, cycle_momentum=False
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_pytorch_has_it(name: str) -> None:
    schedule, build, per_epoch = CASES[name]
    for step, (mine, theirs) in enumerate(zip(ours(schedule), stock(build, per_epoch), strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-9), f"step {step}"


def test_warm_up_rises_in_a_straight_line_and_then_the_schedule_begins() -> None:
    schedule = Schedule(name="cosine", warmup_steps=5)
    factors = [factor(schedule, step, TOTAL, PER_EPOCH) for step in range(TOTAL)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    plain = Schedule(name="cosine")
    assert factors[5:] == pytest.approx([factor(plain, step, TOTAL - 5, PER_EPOCH) for step in range(TOTAL - 5)])


@pytest.mark.parametrize(("rule", "lr"), [("keep", 0.001), ("linear", 0.004), ("sqrt", 0.002)])
def test_learning_rate_rules(rule: Any, lr: float) -> None:
    recipe = Recipe(global_batch=128, lr_rule=rule, lr_batch=32, optimizer=Optimizer(lr=0.001))
    worked_out = plan(recipe, Placement(), 1000, 10)
    assert worked_out.lr == pytest.approx(lr)
    assert ("meant for 32" in worked_out.lr_note) == (rule != "keep")


def test_a_batch_per_rank_says_what_the_rate_was_meant_for() -> None:
    recipe, placement, _ = resolve(Recipe(batch_per_rank=32, lr_rule="linear"), Placement(ranks=4))
    assert plan(recipe, placement, 1000, 10).lr == pytest.approx(4 * recipe.optimizer.lr)


def test_a_rule_without_its_batch_is_an_error() -> None:
    with pytest.raises(InputError, match="lr_rule=linear needs lr_batch"):
        plan(Recipe(lr_rule="linear"), Placement(), 1000, 10)


def test_settings_without_effect_are_named() -> None:
    recipe = Recipe(schedule=Schedule(final=0.5), optimizer=Optimizer(name="adamw", momentum=0.9), lr_batch=64)
    found = "; ".join(unused_settings(recipe))
    assert "schedule.final=0.5 has no effect with schedule.name=constant" in found
    assert "optimizer.momentum=0.9 has no effect with optimizer.name=adamw" in found
    assert "lr_batch=64 has no effect" in found
    assert (
        unused_settings(msgspec.structs.replace(recipe, schedule=Schedule(), optimizer=Optimizer(), lr_batch=None))
        == []
    )
