"""What makes a comparison unfair, found in the runs themselves, as sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.placement import changes_mathematics, unknown_mathematics
from lockstep.settings import dotted
from lockstep.study.gather import Group, Sample
from lockstep.text import some
from lockstep.units import counted

Cells = Sequence[Group]
"""Those that were measured."""


def notes(groups: Sequence[Group]) -> list[str]:
    """Everything that a reader of the table has to know, the most important first."""
    cells = [group for group in groups if group.measured]
    checks = (_disagreement, _mathematics, _batch, _seeds, _differing, _raced_elsewhere)
    return [note for check in checks for note in check(cells)] if cells else []


def what_differs(cell: Group, baseline: Group) -> list[str]:
    """The recipe keys that differ, except the seed; if any do, the computation differs. Placement keys do not count."""
    ours, theirs = (dotted(each.spec.known()[0]) for each in (cell, baseline))
    keys = sorted(ours.keys() | theirs.keys())
    return [key for key in keys if key != "seed" and ours.get(key) != theirs.get(key)]


def _disagreement(cells: Cells) -> list[str]:
    wrong = [
        cell.name for cell in cells if any(each.own and each.summary.get("ranks_agree") is False for each in cell.done)
    ]
    return [
        f"the exchange of {some([name])} did nothing, or not enough: its ranks ended with different weights, so its times and "
        "accuracies are not those of one model"
        for name in wrong
    ]


def _mathematics(cells: Cells) -> list[str]:
    found = []
    for cell in cells:
        reason = changes_mathematics(cell.spec.placement, cell.spec.recipe)
        if reason:
            found.append(
                f"'{cell.name}' computes something else than one process would: {reason}; its accuracy is part of its price"
            )
        if cell.cell and cell.cell.unproven:
            found.append(
                f"'{cell.name}' does not compute what one process would, by 'lockstep verify': {cell.cell.unproven}"
            )
        unknown = unknown_mathematics(cell.spec.placement)
        if unknown:
            found.append(f"'{cell.name}': {unknown}")
    return found


def _batch(cells: Cells) -> list[str]:
    """The reports' mistake: batch per rank kept, so the global batch grew with the ranks and the learning rate did not."""
    by_ranks: dict[int, set[int]] = {}
    rules = set()
    for cell in cells:
        plan = cell.spec.plan
        if not plan.global_batch:  # an attached command's own affair
            continue
        by_ranks.setdefault(plan.ranks, set()).add(plan.global_batch)
        rules.add(cell.spec.recipe.lr_rule)
    batches = {batch for found in by_ranks.values() for batch in found}
    same_sets = len({frozenset(found) for found in by_ranks.values()}) == 1
    if len(by_ranks) < 2 or len(batches) < 2 or same_sets:
        return []
    first = next(cell.spec.plan for cell in cells if cell.spec.plan.global_batch)
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
    seeds = {cell.name: frozenset(each.seed for each in cell.done) for cell in cells if cell.done}
    # Of a study, those that are told apart are not trained with more seeds.
    shared = frozenset.intersection(*seeds.values()) if seeds else frozenset()
    if len(set(seeds.values())) < 2 or (cells[0].cell and shared):
        return []
    some = "; ".join(f"'{name}': {', '.join(map(str, sorted(found)))}" for name, found in list(seeds.items())[:3])
    return [
        f"cells have different seeds ({some}): weights and order differ, and only runs with the same seed are compared"
    ]


def _raced_elsewhere(cells: Cells) -> list[str]:
    raced = next((cell.time.race.state.machine for cell in cells if cell.time), {})
    seen = {each.run.environment().get("cpu") for cell in cells for each in cell.done} - {None, raced.get("cpu")}
    if not raced or not seen:
        return []
    return [f"times were measured on {raced['cpu']}, and trainings made on {some(sorted(map(str, seen)))}"]


def _data(run: Sample) -> str:
    recipe, plan = run.spec.recipe, run.spec.plan
    return f"{recipe.data}, {'shuffled' if recipe.shuffle else 'in file order'}, first {plan.train_samples:,}"


def _on(key: str) -> Callable[[Sample], Any]:
    return lambda run: run.run.environment().get(key)


def _of_runs(of: Callable[[Sample], Any]) -> Callable[[Group], list[Any]]:
    return lambda cell: list(dict.fromkeys(map(of, cell.done)))


# What has to be the same in all cells, and what to say where it is not: {} stands for which cell has what.
SAME: tuple[tuple[Callable[[Group], list[Any]], str], ...] = (
    (
        _of_runs(lambda run: f"{run.summary.get('test_samples')} samples"),
        "accuracies are of different test sets: {}: state the same test_limit",
    ),
    (_of_runs(_data), "cells train on different data or in a different order: {}"),
    (
        _of_runs(lambda run: run.summary.get("train_images")),
        "cells trained different numbers of samples ({}): compare samples/s, or time to the target, not seconds",
    ),
    (
        lambda cell: [cell.cores],
        "cells hold different numbers of cores ({}): speed-up is more cores at work; efficiency and core-seconds count them",
    ),
    (_of_runs(_on("host")), "runs come from different machines: {}"),
    (_of_runs(_on("cpu")), "runs come from different processors: {}"),
    (_of_runs(_on("torch")), "runs come from different versions of torch: {}"),
    (_of_runs(_on("lockstep")), "runs come from different versions of Lockstep: {}"),
)


def _differing(cells: Cells) -> list[str]:
    found = []
    for of, sentence in SAME:
        groups: dict[Any, list[str]] = {}
        for cell in cells:
            for value in of(cell):
                groups.setdefault(value, []).append(cell.name)
        if len(groups) > 1:
            found.append(sentence.format(", ".join(f"{value} in {some(names)}" for value, names in groups.items())))
    return found
