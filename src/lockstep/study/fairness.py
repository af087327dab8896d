"""What makes a comparison unfair, found in the runs themselves, as sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.placement import changes_mathematics, unknown_mathematics
from lockstep.settings import dotted
from lockstep.study.gather import Sample
from lockstep.text import some
from lockstep.units import counted

Cells = Mapping[str, Sequence[Sample]]
"""The finished runs of each cell that has any."""


def notes(cells: Cells) -> list[str]:
    """Everything that a reader of the table has to know, the most important first."""
    cells = {name: runs for name, runs in cells.items() if runs}
    if not cells:
        return []
    checks = (_disagreement, _mathematics, _batch, _seeds, _differing)
    return [note for check in checks for note in check(cells)]


def what_differs(cell: Sequence[Sample], baseline: Sequence[Sample]) -> list[str]:
    """The recipe keys that differ, except the seed; if any do, the computation differs. Placement keys do not count."""
    ours, theirs = dotted(cell[0].spec.recipe), dotted(baseline[0].spec.recipe)
    keys = sorted(ours.keys() | theirs.keys())
    return [key for key in keys if key != "seed" and ours.get(key) != theirs.get(key)]


def _disagreement(cells: Cells) -> list[str]:
    wrong = [name for name, runs in cells.items() if any(run.summary.get("ranks_agree") is False for run in runs)]
    return [
        f"the exchange of {some([name])} did nothing, or not enough: its ranks ended with different weights, so its times and "
        "accuracies are not those of one model"
        for name in wrong
    ]


def _mathematics(cells: Cells) -> list[str]:
    found = []
    for name, runs in cells.items():
        reason = changes_mathematics(runs[0].spec.placement, runs[0].spec.recipe)
        if reason:
            found.append(
                f"'{name}' computes something else than one process would: {reason}; its accuracy is part of its price"
            )
        unknown = unknown_mathematics(runs[0].spec.placement)
        if unknown:
            found.append(f"'{name}': {unknown}")
    return found


def _batch(cells: Cells) -> list[str]:
    """The reports' mistake: batch per rank kept, so the global batch grew with the ranks and the learning rate did not."""
    by_ranks: dict[int, set[int]] = {}
    rules = set()
    for runs in cells.values():
        plan = runs[0].spec.plan
        by_ranks.setdefault(plan.ranks, set()).add(plan.global_batch)
        rules.add(runs[0].spec.recipe.lr_rule)
    batches = {batch for found in by_ranks.values() for batch in found}
    same_sets = len({frozenset(found) for found in by_ranks.values()}) == 1
    if len(by_ranks) < 2 or len(batches) < 2 or same_sets:
        return []
    first = next(iter(cells.values()))[0].spec.plan
    share = first.global_batch // first.ranks
    grown = ", ".join(
        f"{counted(ranks, 'rank')}: {'/'.join(map(str, sorted(found)))}" for ranks, found in sorted(by_ranks.items())
    )
    if "keep" not in rules:
        return [
            f"weak scaling: the global batch grows with the ranks ({grown}), and lr_rule={'/'.join(sorted(rules))} raises the rate with it"
        ]
    return [
        f"the global batch changes with the ranks ({grown}) and the learning rate does not: a difference in accuracy comes from "
        f"that, not from the ranks. Two clean designs: strong scaling, global_batch={max(batches)} in all cells; weak scaling, "
        f"batch_per_rank={share} with lr_rule=linear lr_batch={first.global_batch}"
    ]


def _seeds(cells: Cells) -> list[str]:
    seeds = {name: frozenset(run.seed for run in runs) for name, runs in cells.items()}
    if len(set(seeds.values())) < 2:
        return []
    some = "; ".join(f"'{name}': {', '.join(map(str, sorted(found)))}" for name, found in list(seeds.items())[:3])
    return [
        f"cells have different seeds ({some}): weights and order differ, and only runs with the same seed are compared"
    ]


def _data(run: Sample) -> str:
    recipe, plan = run.spec.recipe, run.spec.plan
    return f"{recipe.data}, {'shuffled' if recipe.shuffle else 'in file order'}, first {plan.train_samples:,}"


def _on(key: str) -> Callable[[Sample], Any]:
    return lambda run: run.run.environment().get(key)


# What has to be the same in all cells, and what to say where it is not: {} stands for which cell has what.
SAME: tuple[tuple[Callable[[Sample], Any], str], ...] = (
    (
        lambda run: f"{run.summary.get('test_samples')} samples",
        "accuracies are of different test sets: {}: state the same test_limit",
    ),
    (_data, "cells train on different data or in a different order: {}"),
    (
        lambda run: run.summary.get("train_images"),
        "cells trained different numbers of images ({}): compare images/s, or time to the target, not seconds",
    ),
    (
        lambda run: run.run.cores,
        "cells hold different numbers of cores ({}): speed-up is more cores at work; efficiency and core-seconds count them",
    ),
    (_on("host"), "runs come from different machines: {}"),
    (_on("cpu"), "runs come from different processors: {}"),
    (_on("torch"), "runs come from different versions of torch: {}"),
    (_on("lockstep"), "runs come from different versions of Lockstep: {}"),
)


def _differing(cells: Cells) -> list[str]:
    found = []
    for of, sentence in SAME:
        groups: dict[Any, list[str]] = {}
        for name, runs in cells.items():
            for value in dict.fromkeys(map(of, runs)):
                groups.setdefault(value, []).append(name)
        if len(groups) > 1:
            found.append(sentence.format(", ".join(f"{value} in {some(names)}" for value, names in groups.items())))
    return found
