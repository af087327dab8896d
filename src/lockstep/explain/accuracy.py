"""Did accuracy change because of the distribution, or because of the recipe? A checklist, each point with its evidence."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.measure.view import RunView
from lockstep.metrics import value
from lockstep.placement import changes_mathematics
from lockstep.run import Spec, runs_root
from lockstep.settings import dotted
from lockstep.units import counted, points
from lockstep.verify import verified

# Keys of a recipe that set its length and its randomness, not what is computed.
FREE = ("seed", "batch_per_rank")


@dataclass(frozen=True)
class Check:
    """One way in which distribution could change the result: whether it did, and how that is known."""

    name: str
    changed: bool
    evidence: str


def answer(evidence: Evidence) -> Iterator[Finding]:
    accuracy = evidence.summary.get("test_accuracy")
    if evidence.spec.plan.ranks == 1 or accuracy is None:
        return
    checks = checklist(evidence)
    changed = [check for check in checks if check.changed]
    alone = one_process(evidence)
    spread = seed_spread(evidence)
    against = [accuracy - value for value in alone]
    proof = verified.find((evidence.run.folder.parent, runs_root()), evidence.spec, evidence.run.environment())
    difference = statistics.fmean(against) if against else None
    noise = _noise(accuracy, spread, evidence.spec.plan.test_samples, len(alone))
    differs = difference is not None and abs(difference) > 2 * noise
    figures = {
        "checks": [asdict(check) for check in checks],
        "difference": difference,
        "differs": differs,
        "noise": noise,
        "one_process_runs": len(alone),
        "seed_spread": spread,
        "verified": proof["time"] if proof else None,
    }
    text = "; ".join(f"{check.name}: {check.evidence}" for check in (changed or checks))
    compared = (
        f"{points(difference)} against {counted(len(alone), 'run')} of the same recipe in one process"
        if difference is not None
        else "no run of the same recipe in one process to compare with"
    )
    luck = "" if spread is None else f"; seeds alone differ by {100 * spread:.2f} points (standard deviation)"
    proven = _proven(proof)
    verdict, step = _verdict(changed, proof is not None, differs)
    why = f"{compared}{luck}; {proven}; {text}"
    yield Finding(verdict=verdict, why=why, next=step, figures=figures)


def _verdict(changed: list[Check], proven: bool, differs: bool) -> tuple[str, str]:
    """The verdict and the next step. "Nothing changes" is said only if it was proven and no evidence contradicts it."""
    verify = "lockstep verify, with the same words as this run"
    if changed:
        step = (
            "keep global_batch, or state lr_rule and lr_batch"
            if any(check.name == "global batch" for check in changed)
            else "compare with: lockstep verify"
        )
        return f"the recipe changed with the ranks: {', '.join(check.name for check in changed)}", step
    if differs and proven:
        verdict = "verified step by step, yet the result differs from one process by more than noise"
        return verdict, "repeat both with several seeds: lockstep study"
    if differs:
        return "not verified, and the result differs from one process by more than noise", f"find out: {verify}"
    if proven:
        return "distribution does not change what is computed here: verified", ""
    return "not verified: no known cause changes what is computed, but nothing has proven it", f"prove it: {verify}"


def _proven(proof: dict[str, Any] | None) -> str:
    if proof is None:
        return "no verify of this recipe on this kind of placement has passed here"
    day = time.strftime("%Y-%m-%d", time.localtime(proof["time"]))
    return f"verify passed {proof['checks']} checks over {proof['steps']} steps on {day}"


def _noise(accuracy: float, spread: float | None, samples: int, runs: int) -> float:
    """The standard deviation of a difference by chance alone: over seeds if known, else from sampling the test set."""
    one = spread if spread is not None else math.sqrt(max(accuracy * (1 - accuracy), 0.0) / max(1, samples))
    return float(one * math.sqrt(1 + 1 / max(1, runs)))


def checklist(evidence: Evidence) -> list[Check]:
    spec = evidence.spec
    recipe, plan, placement = spec.recipe, spec.plan, spec.placement
    seen = [epoch["samples"] for epoch in evidence.epochs if epoch.get("samples") is not None]
    whole = [count for count in seen[:-1] if count != plan.train_samples] if seen else []
    tests = {epoch["test_samples"] for epoch in evidence.epochs if epoch.get("test_samples") is not None}
    mathematics = changes_mathematics(placement, recipe)
    norm = recipe.regularize.batch_norm
    cautions = evidence.run.model_notes("cautions")
    per_rank = recipe.batch_per_rank is not None
    return [
        Check(
            "global batch",
            per_rank,
            f"stated per rank, so it is {plan.global_batch} with {plan.ranks} ranks and {recipe.batch_per_rank} with one"
            if per_rank
            else f"{plan.global_batch}, whatever the number of ranks",
        ),
        Check(
            "learning rate",
            per_rank and recipe.lr_rule == "keep",
            plan.lr_note or f"{plan.lr:g}, kept" + (" though the global batch grew" if per_rank else ""),
        ),
        Check(
            "samples",
            bool(whole),
            f"every epoch took {plan.train_samples:,} samples once, in an order of (seed, epoch) alone"
            if not whole
            else f"an epoch took {whole[0]:,} samples instead of {plan.train_samples:,}",
        ),
        Check(
            "batch norm",
            norm == "per-rank",
            {"off": "none in the recipe", "synchronised": "its statistics are of the global batch"}.get(
                norm, "its statistics are of each rank's own share"
            ),
        ),
        Check(
            "strategy",
            mathematics is not None and norm != "per-rank",
            mathematics or f"{placement.strategy} gives the gradient of the global batch",
        ),
        Check("model", bool(cautions), "; ".join(cautions) or "nothing in it is known to depend on the rank"),
        Check("evaluation", bool(tests - {plan.test_samples}), f"{plan.test_samples:,} test samples, each once"),
        Check(
            "weights",
            evidence.summary.get("ranks_agree") is False,
            "the same on all ranks at the end"
            if evidence.summary.get("ranks_agree")
            else "differ between ranks at the end",
        ),
    ]


def same_recipe(one: Spec, other: Spec, free: tuple[str, ...] = FREE) -> bool:
    """Whether two runs compute the same apart from randomness: the global batch counts, not how it was stated."""
    return _key(one, free) == _key(other, free)


def _key(spec: Spec, free: tuple[str, ...]) -> dict[str, object]:
    found = dotted(spec.recipe)
    return {key: value for key, value in found.items() if key not in free}


def one_process(evidence: Evidence) -> list[float]:
    """Accuracies of one process with the same recipe: with the same seed if there are such runs."""
    same = [run for run in evidence.peers if run.spec().plan.ranks == 1 and same_recipe(run.spec(), evidence.spec)]
    twins = [run for run in same if run.spec().recipe.seed == evidence.spec.recipe.seed]
    return [value for run in (twins or same) if (value := _accuracy(run)) is not None]


def seed_spread(evidence: Evidence) -> float | None:
    """The standard deviation of accuracy over seeds, of this recipe and placement."""
    placement = evidence.spec.placement
    found = {evidence.spec.recipe.seed: evidence.summary.get("test_accuracy")}
    for run in evidence.peers:
        spec = run.spec()
        if spec.placement.ranks == placement.ranks and same_recipe(spec, evidence.spec):
            found.setdefault(spec.recipe.seed, _accuracy(run))
    values = [value for value in found.values() if value is not None]
    return statistics.stdev(values) if len(values) >= 3 else None


def _accuracy(run: RunView) -> float | None:
    return value(run, "accuracy", None)
