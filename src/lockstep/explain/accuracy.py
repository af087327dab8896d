"""Did accuracy change because of the distribution, or because of the recipe? A checklist, each point with its evidence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.explain import twins
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.explain.twins import Twin
from lockstep.placement import changes_mathematics
from lockstep.run import runs_root
from lockstep.units import counted, points
from lockstep.verify import verified


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
    proof = verified.find((evidence.run.folder.parent, runs_root()), evidence.spec, evidence.run.environment())
    twin = twins.compared(evidence, float(accuracy))
    figures = {
        "checks": [asdict(check) for check in checks],
        "difference": twin.difference if twin else None,
        "interval": [twin.low, twin.high] if twin else None,
        "twin": twin.verdict if twin else None,
        "differs": bool(twin and twin.verdict == "differs"),
        "one_process_runs": twin.runs if twin else 0,
        "verified": proof["time"] if proof else None,
    }
    text = "; ".join(f"{check.name}: {check.evidence}" for check in (changed or checks))
    against = twin.text if twin else "no run of the same recipe in one process to compare with"
    verdict, step = _verdict([check.name for check in changed], proof is not None, twin)
    yield Finding(verdict=verdict, why=f"{against}; {_proven(proof)}; {text}", next=step, figures=figures)


def _verdict(changed: list[str], proven: bool, twin: Twin | None) -> tuple[str, str]:
    """The verdict and the next step. It follows from the comparison with one process where there is one; "nothing changes" is said only
    if it was proven and no evidence contradicts it."""
    if changed:
        return _changed(changed, twin)
    verify = "lockstep verify, with the same words as this run"
    differs = twin is not None and twin.verdict == "differs"
    if differs and proven:
        verdict = "verified step by step, yet the result differs from one process by more than noise"
        return verdict, "repeat both with several seeds: lockstep study"
    if differs:
        return "not verified, and the result differs from one process by more than noise", f"find out: {verify}"
    if proven:
        return "distribution does not change what is computed here: verified", ""
    if twin and twin.verdict == "the same":
        return "not verified, but the accuracy is that of one process", f"prove it: {verify}"
    known = ", and the result cannot be told from that of one process" if twin else ", but nothing has proven it"
    return f"not verified: no known cause changes what is computed{known}", f"prove it: {verify}"


def _changed(names: list[str], twin: Twin | None) -> tuple[str, str]:
    """What changed with the ranks, and what that did: one process that computes the same recipe has its global batch and learning rate."""
    head = f"the recipe changed with the ranks: {', '.join(names)}"
    by_batch = set(names) <= {"global batch", "learning rate"}
    step = (
        "keep global_batch, or state lr_rule and lr_batch"
        if "global batch" in names
        else "compare with: lockstep verify"
    )
    if twin is None:
        return f"{head}; what that does to the accuracy was not measured", step
    one = "one process with this batch and rate" if by_batch else "one process"
    if twin.verdict == "differs":
        return f"{head}, and the accuracy is {points(twin.difference)} against {one}", step
    if twin.verdict == "the same":
        return f"{head}, but {one} has the same accuracy", step if by_batch else ""
    more = "repeat both with several seeds: lockstep study"
    return f"{head}; whether the accuracy differs from {one} cannot be told from {counted(twin.runs, 'run')}", more


def _proven(proof: dict[str, Any] | None) -> str:
    if proof is None:
        return "no verify of this recipe on this kind of placement has passed here"
    day = time.strftime("%Y-%m-%d", time.localtime(proof["time"]))
    return f"verify passed {proof['checks']} checks over {proof['steps']} steps on {day}"


def checklist(evidence: Evidence) -> list[Check]:
    spec = evidence.spec
    recipe, plan, placement = spec.recipe, spec.plan, spec.placement
    seen = [epoch["samples"] for epoch in evidence.epochs if epoch.get("samples") is not None]
    whole = [count for count in seen[:-1] if count != plan.train_samples] if seen else []
    tests = {epoch["test_samples"] for epoch in evidence.epochs if epoch.get("test_samples") is not None}
    mathematics = changes_mathematics(placement, recipe)
    norm = recipe.regularize.batch_norm
    cautions = evidence.run.model_notes("cautions")
    per_rank, agree = recipe.batch_per_rank is not None, evidence.summary.get("ranks_agree")
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
            agree is False,
            "not compared between ranks"
            if agree is None
            else f"{'the same on all' if agree else 'differ between'} ranks at the end",
        ),
    ]
