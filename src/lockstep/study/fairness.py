"""What makes a comparison unfair, found in the runs themselves and said in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from lockstep.placement import changes_mathematics, unknown_mathematics
from lockstep.study.file import flatten
from lockstep.study.measures import Sample

Cells = Mapping[str, Sequence[Sample]]
"""The finished runs of each cell that has any."""


def notes(cells: Cells) -> list[str]:
    """Everything that a reader of the table has to know, the weightiest first."""
    cells = {name: runs for name, runs in cells.items() if runs}
    if not cells:
        return []
    checks = (_disagreement, _mathematics, _batch, _tests, _order, _images, _threads, _machines)
    return [note for check in checks for note in check(cells)]


def what_differs(cell: Sequence[Sample], baseline: Sequence[Sample]) -> list[str]:
    """The recipe keys that differ, the seed apart: not empty means another computation. Placement keys do not count."""
    ours, theirs = (flatten(msgspec.to_builtins(runs[0].spec.recipe)) for runs in (cell, baseline))
    keys = sorted(ours.keys() | theirs.keys())
    return [key for key in keys if key != "seed" and ours.get(key) != theirs.get(key)]


def _groups(cells: Cells, of: Callable[[Sample], Any]) -> dict[Any, list[str]]:
    """Which cells have which value."""
    found: dict[Any, list[str]] = {}
    for name, runs in cells.items():
        for each in runs:
            names = found.setdefault(of(each), [])
            if name not in names:
                names.append(name)
    return found


def _said(groups: Mapping[Any, Sequence[str]], unit: str = "") -> str:
    """32 in 'a', 64 in 'b'."""
    return ", ".join(f"{value}{unit} in {_some(names)}" for value, names in groups.items())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:2])
    return shown + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _disagreement(cells: Cells) -> list[str]:
    wrong = [name for name, runs in cells.items() if any(run.summary.get("ranks_agree") is False for run in runs)]
    return [
        f"the exchange of {_some([name])} did nothing, or not enough: its ranks ended with different weights, so its times and "
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
        f"{ranks} rank{'s' if ranks > 1 else ''}: {_numbers(found)}" for ranks, found in sorted(by_ranks.items())
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


def _numbers(found: set[int]) -> str:
    return "/".join(str(number) for number in sorted(found))


def _tests(cells: Cells) -> list[str]:
    groups = _groups(cells, lambda run: run.summary.get("test_samples"))
    if len(groups) < 2:
        return []
    return [f"accuracies are of different test sets: {_said(groups, ' samples')}: state the same test_limit"]


def _order(cells: Cells) -> list[str]:
    def order(run: Sample) -> str:
        recipe, plan = run.spec.recipe, run.spec.plan
        return f"{recipe.data}, {'shuffled' if recipe.shuffle else 'in file order'}, first {plan.train_samples:,}"

    found = []
    groups = _groups(cells, order)
    if len(groups) > 1:
        found.append(f"cells train on different data or in a different order: {_said(groups)}")
    seeds = {name: frozenset(run.seed for run in runs) for name, runs in cells.items()}
    if len(set(seeds.values())) > 1:
        found.append(
            "cells have different seeds ("
            + "; ".join(f"'{name}': {', '.join(map(str, sorted(s)))}" for name, s in list(seeds.items())[:3])
            + "): weights and order differ, and only runs with the same seed are compared"
        )
    return found


def _images(cells: Cells) -> list[str]:
    groups = _groups(cells, lambda run: run.summary.get("train_images"))
    if len(groups) < 2:
        return []
    return [
        f"cells trained different numbers of images ({_said(groups)}): compare images/s, or time to the target, not seconds"
    ]


def _threads(cells: Cells) -> list[str]:
    groups = _groups(cells, lambda run: run.cores)
    if len(groups) < 2:
        return []
    return [
        f"cells hold different numbers of cores ({_said(groups)}): speed-up is more cores at work; efficiency and core-seconds count them"
    ]


def _machines(cells: Cells) -> list[str]:
    found = []
    for key, what in (
        ("host", "machines"),
        ("cpu", "processors"),
        ("torch", "versions of torch"),
        ("lockstep", "versions of Lockstep"),
    ):
        groups = _groups(cells, lambda run, key=key: run.environment.get(key))  # type: ignore[misc]
        if len(groups) > 1:
            found.append(f"runs come from different {what}: {_said(groups)}")
    return found
