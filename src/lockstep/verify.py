"""The proof that N ranks compute the same as one process, on the user's own machine and recipe.

A short run is made in each placement, in real processes: a few full global batches and a partial one, for two epochs.
Compared are the gradients of the first and of the partial batch at the same weights, the loss of every step, the final
evaluation, and, between two runs of one placement, every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lockstep.launch import execute, prepare
from lockstep.measure.records import read_steps
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.run import Options, Run

FULL_BATCHES = 8
# Float32 rounds each addition by at most 6e-8; sums of up to 1e5 terms taken in another order differ by about 1e-5 of
# the largest entry at worst, and 1e-6 as a rule. A mistake of the algebra is far larger: a gradient averaged over the
# wrong count is off by a factor, and one sample counted twice in a global batch of B by about 1 / B.
GRADIENT_TOLERANCE = 1e-4
NEGLIGIBLE = 1e-2
# Each step starts from weights that already differ by rounding, and Adam divides small gradients by small numbers, so
# differences grow along the curve. A wrong average shows in the first steps at the size of the loss's own change.
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Check:
    """One comparison: what, how far apart, and how far apart is still rounding."""

    what: str
    against: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return bool(self.difference <= self.tolerance)  # NaN does not pass


def short_recipe(recipe: Recipe) -> Recipe:
    """The recipe on little data: full batches and then a partial one that does not divide evenly."""
    batch = recipe.global_batch
    samples = FULL_BATCHES * batch + batch // 2 + 1
    return msgspec.structs.replace(
        recipe,
        train_limit=min(samples, recipe.train_limit or samples),
        test_limit=min(1000, recipe.test_limit or 1000),
        epochs=2,
        max_steps=None,
    )


def placements(recipe: Recipe, placement: Placement) -> dict[str, Placement]:
    """One process, N ranks, and N ranks with accumulation; the same number of threads in each rank."""
    replace = msgspec.structs.replace
    ranks = placement.ranks
    alone = replace(
        placement,
        # One process of the same kind of machine: what submits to a cluster need not be able to train.
        launcher="slurm" if placement.launcher == "slurm" else "single",
        ranks=1,
        hosts=1,
        emulated=False,
        link=None,
        rendezvous=None,
        max_restarts=0,
        backend="auto",
        strategy="single",
        micro_batch=None,
        accumulation=None,
    )
    together = replace(placement, micro_batch=None, accumulation=None)
    found = {"1 process": alone, f"{ranks} ranks": together}
    share = recipe.global_batch // ranks
    divisor = next((d for d in range(2, share + 1) if share % d == 0), None)
    # Batch norm's statistics are of a micro batch, so with accumulation it is another computation by definition.
    if divisor and recipe.regularize.batch_norm == "off":
        found[f"{ranks} ranks, accumulation {divisor}"] = replace(together, accumulation=divisor)
    return found


def verify(
    recipe: Recipe,
    placement: Placement,
    folder: Path,
    data_root: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Check]:
    """Run every placement (two of them twice) below `folder` and compare. Returns all checks, passed or not."""
    recipe, placement = resolve(recipe, placement)
    recipe = msgspec.structs.replace(short_recipe(recipe), batch_per_rank=None)
    options = Options(data_root=data_root, capture_gradients=True, save_model=False)
    chosen = placements(recipe, placement)
    names = list(chosen)
    order = [(name, name) for name in names] + [(f"{name}, again", name) for name in names[:2]]
    runs: dict[str, Run] = {}
    for number, (label, name) in enumerate(order, 1):
        tell(f"{number}/{len(order)}  {label}")
        run, spec = prepare(
            recipe,
            chosen[name],
            options,
            folder,
            name=f"{number}-{'again-' if label != name else ''}{chosen[name].ranks}r",
        )
        runs[label] = execute(run, spec)
    checks: list[Check] = []
    for name in names[1:]:
        checks += _same_mathematics(runs[names[0]], runs[name], names[0], name)
    for name in names[:2]:
        checks += _same_bits(runs[name], runs[f"{name}, again"], name)
    for name in names[1:]:
        agree = (runs[name].summary() or {}).get("ranks_agree")
        checks.append(
            Check("all ranks end with the same weights, bit for bit", name, 0.0 if agree else float("inf"), 0.0)
        )
    return checks


def _same_mathematics(one: Run, other: Run, one_name: str, other_name: str) -> Iterator[Check]:
    against = f"{other_name} against {one_name}"
    for label, text in (("first", "gradients of the first batch"), ("last", "gradients of the partial batch")):
        yield Check(text, against, gradient_difference(one.folder, other.folder, label), GRADIENT_TOLERANCE)
    yield Check("loss of every step", against, _relative(step_losses(one), step_losses(other)), LOSS_TOLERANCE)
    ours, theirs = one.epochs()[-1], other.epochs()[-1]
    difference = _relative(np.array([ours["test_loss"]]), np.array([theirs["test_loss"]]))
    yield Check("test loss at the end", against, difference, LOSS_TOLERANCE)


def _same_bits(first: Run, second: Run, name: str) -> Iterator[Check]:
    one, two = step_losses(first), step_losses(second)
    different = float(np.sum(one != two)) if one.shape == two.shape else float("inf")
    yield Check("steps whose loss differs by a bit", f"{name}, twice", different, 0.0)
    same = (first.summary() or {}).get("weights_sha256") == (second.summary() or {}).get("weights_sha256")
    yield Check("final weights differ by a bit", f"{name}, twice", 0.0 if same else float("inf"), 0.0)


def gradient_difference(one: Path, other: Path, label: str) -> float:
    """The largest difference of any entry, relative to the largest entry of its tensor.

    A tensor whose gradient is next to nothing beside the others' (a bias before batch norm has none at all, only rounding)
    is measured by theirs.
    """
    with np.load(one / f"gradients-{label}.npz") as a, np.load(other / f"gradients-{label}.npz") as b:
        assert set(a.files) == set(b.files)
        least = NEGLIGIBLE * max(float(np.abs(a[name]).max(initial=0.0)) for name in a.files)
        return max(_relative_to_largest(a[name], b[name], least) for name in a.files)


def step_losses(run: Run) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The mean loss of a sample at every step, over all ranks."""
    rows = [read_steps(run.rank_folder(rank) / "steps.bin") for rank in range(run.spec().plan.ranks)]
    loss = np.sum([r["loss_sum"] for r in rows], axis=0)
    samples = np.sum([r["samples"] for r in rows], axis=0)
    mean: np.ndarray[Any, np.dtype[np.float64]] = loss / samples
    return mean


def _relative_to_largest(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], least: float) -> float:
    largest = max(least, float(np.abs(a).max(initial=0.0)))
    difference = float(np.abs(a - b).max(initial=0.0))
    if largest == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / largest


def _relative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(a), 1e-12)))
