"""The proof that N ranks compute the same as one process, on the user's own machine and recipe (docs/verify.md).

A short run is made in each placement, in real processes, by the launcher and on the backend that a run would use. Before every
judged step each placement loads the state that the one process had there, so a step is compared with a step, and rounding
does not grow. `training/witness.py` writes down what happens, `judge.py` compares it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lockstep.errors import RunFailed
from lockstep.launch import execute, prepare, specify
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.run import Options, Proof, Run, Spec
from lockstep.verify.checks import Check
from lockstep.verify.judge import judge, same_bits
from lockstep.verify.records import Records
from lockstep.verify.steps import own_rounding

FULL_BATCHES, FEW_BATCHES = 15, 3
ALONE = "1 process"


@dataclass
class Verdict:
    """What was run and what came of it."""

    recipe: Recipe
    placement: Placement
    checks: list[Check] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """What was judged, and what was left out, in words."""
    steps: int = 0
    proven_specs: list[Spec] = field(default_factory=list)
    """The runs that were compared with the one process."""

    @property
    def proven(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)


def short_recipe(recipe: Recipe, batches: int = FULL_BATCHES) -> Recipe:
    """The recipe on little data: full batches and then a partial one that does not divide evenly, twice."""
    batch = recipe.global_batch
    samples = batches * batch + batch // 2 + 1
    meant = recipe.lr_batch or (recipe.batch_per_rank if recipe.lr_rule != "keep" else None)
    return msgspec.structs.replace(
        recipe,
        batch_per_rank=None,
        lr_batch=meant,
        train_limit=min(samples, recipe.train_limit or samples),
        test_limit=min(1000, recipe.test_limit or 1000),
        epochs=2,
        max_steps=None,
    )


def with_partial_batch(recipe: Recipe, samples: int) -> Recipe:
    """Leave out some samples where a small set divides evenly; a batch of one has no part."""
    batch = recipe.global_batch
    if samples % batch or batch == 1:
        return recipe
    return msgspec.structs.replace(recipe, train_limit=samples - batch + batch // 2 + 1)


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
        zero=False,
        shares=None,
        micro_batch=None,
        accumulation=None,
    )
    together = replace(placement, micro_batch=None, accumulation=None)
    if placement.shares == "auto":
        # What shares come to depends on the moment, and two runs would not have the same bits. These are as unequal as any.
        each = recipe.global_batch // ranks
        together = replace(
            together, shares=[each + each // 2 if rank % 2 == 0 else each - each // 2 for rank in range(ranks)]
        )
    found = {ALONE: alone, f"{ranks} ranks": together}
    share = recipe.global_batch // ranks
    stated = placement.accumulation or (share // placement.micro_batch if placement.micro_batch else 0)
    divisor = stated if stated > 1 else next((d for d in range(2, share + 1) if share % d == 0), None)
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
    short: bool = False,
    repeat: bool = True,
) -> Verdict:
    """Run every placement (two of them twice) below `folder` and judge. Returns all checks, passed or not.

    `short`: only the placement as it is, beside one process, on few batches. Without `repeat` no placement is run twice.
    """
    planned = plan(recipe, placement, folder, data_root, FEW_BATCHES if short else FULL_BATCHES)
    recipe, chosen = planned.recipe, placements(planned.recipe, planned.placement)
    if short:
        chosen = {ALONE: chosen[ALONE], f"{planned.placement.ranks} ranks": planned.placement}
    verdict = Verdict(recipe, planned.placement)
    if planned.placement.shares == "auto" and not short:
        verdict.lines.append(f"shares=auto was tried as shares={chosen[list(chosen)[1]].shares}")
    order = [(name, name) for name in chosen]
    order += [] if short or not repeat else [(f"{name}, again", name) for name in list(chosen)[:2]]
    records: dict[str, Records] = {}
    for number, (label, name) in enumerate(order, 1):
        if chosen[name].accumulation and records[ALONE].has_batch_norm:
            continue
        how = "" if name == ALONE else f" by {chosen[name].launcher} over {chosen[name].backend}"
        tell(f"{number}/{len(order)}  {label}{how}")
        reference = None if name == ALONE else str(records[ALONE].run.folder)
        proof = Proof(reference=reference, keep=label == name)
        again = None if label == name else str(records[name].run.folder)
        options = Options(data_root=data_root, proof=proof, save_model=False, kernels_of=again)
        run, spec = prepare(recipe, chosen[name], options, folder, name=f"{number}-{_word(label)}")
        records[label] = Records(_executed(run, spec, label))
    alone = records[ALONE]
    rounding = own_rounding(alone)
    for name in (name for name in chosen if name in records):
        verdict.checks += judge(alone, records[name], name, rounding)
        if f"{name}, again" in records:
            verdict.checks.append(same_bits(records[name], records[f"{name}, again"], name))
        if name != ALONE:
            verdict.proven_specs.append(records[name].spec)
    verdict.steps = len(alone.judged)
    if alone.has_batch_norm and not short:
        verdict.lines.append(
            "accumulation was left out: the model has batch norm, whose statistics are then of a micro batch"
        )
    verdict.lines.insert(0, _what_was_judged(alone))
    verdict.lines += [f"warning: {caution}" for caution in alone.run.model_notes("cautions")]
    return verdict


def plan(
    recipe: Recipe, placement: Placement, folder: Path, data_root: str | None, batches: int = FULL_BATCHES
) -> Spec:
    """What a run of these words would come to (launcher, backend, threads), on little data."""
    _, spec = specify(recipe, placement, Options(data_root=data_root), folder)
    short = short_recipe(spec.recipe, batches)
    samples = min(spec.plan.train_samples, short.train_limit or spec.plan.train_samples)
    return msgspec.structs.replace(spec, recipe=with_partial_batch(short, samples))


def _executed(run: Run, spec: Spec, label: str) -> Run:
    try:
        return execute(run, spec)
    except RunFailed as error:
        cause = run.recorded_status().get("cause") or str(error)
        raise RunFailed(f"verify: {label}: {cause}") from None


def _word(label: str) -> str:
    return label.replace(",", "").replace(" ", "-")


def _what_was_judged(alone: Records) -> str:
    plan, judged = alone.spec.plan, alone.judged
    partial = [
        step for step in judged if plan.last_batch != plan.global_batch and (step + 1) % plan.steps_per_epoch == 0
    ]
    of_them = (
        f"of them {len(partial)} with a partial batch of {plan.last_batch}" if partial else "there is no partial batch"
    )
    return f"{len(judged)} of {plan.total_steps} steps judged, {of_them}; {plan.test_samples} test samples, twice"
