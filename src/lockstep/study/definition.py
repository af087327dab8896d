"""What a study is: cells to be compared, each a base with some keys changed, and how often each is run."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lockstep import toml
from lockstep.errors import InputError
from lockstep.metrics import USUAL, fitting, known_metrics
from lockstep.placement import Placement
from lockstep.recipe import Positive, PositiveFloat, Recipe
from lockstep.run import check_name
from lockstep.settings import load
from lockstep.shapes import Number
from lockstep.task import name_of

Share = Annotated[float, Meta(ge=0, le=1)]
Keys = dict[str, Any]
"""Settings as people write them: dotted recipe and placement keys."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published finding about two cells, in a form that can be checked: which of them has more of a metric."""

    text: str
    metric: str
    more: str
    less: str
    same: bool = False
    """The finding is that the two do not differ."""
    ratio: float | None = None
    """Published value of `more` over that of `less`."""
    why: str = ""
    """The explanation if ours differs."""


class PublishedEpoch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One epoch of a published learning curve: [7, 0.79132, 0.7417, 0.74]."""

    epoch: Positive
    train_accuracy: Share
    test_accuracy: Share
    test_loss: Number | None = None
    """Of a sample."""


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a report found, shown beside our figures."""

    source: str
    figures: dict[str, str] = {}
    """Cell -> its published figures, as text."""
    curves: dict[str, list[PublishedEpoch]] = {}
    """Cell -> its published learning curve."""
    claims: list[Claim] = []


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cells to be compared, each a base with some keys changed, and how often each is run."""

    name: str
    about: str = ""
    base: Keys = {}
    files: list[str] = []
    """Recipe files below the base."""
    factors: dict[str, dict[str, Keys]] = {}
    """Factor -> level -> the keys that this level sets."""
    cells: dict[str, Keys] = {}
    repeats: Annotated[int, Meta(ge=1, le=10_000)] = 5
    """How many seeds each recipe is trained with at first; those that are not told apart go on to twice and four times as many."""
    seeds: list[Annotated[int, Meta(ge=0, le=(1 << 62))]] = []
    """One per repeat, taken in turn, the same in every cell; by default the recipe's seed and those after it."""
    metrics: list[str] = msgspec.field(default_factory=lambda: list(USUAL))
    baseline: str | None = None
    race_minutes: PositiveFloat | None = None
    """How long the cells may race; by default it depends on how many ranks they have."""
    budget_minutes: PositiveFloat | None = None
    target_accuracy: Annotated[float, Meta(gt=0, le=1)] | None = None
    published: list[Published] = []
    quick: Keys = {}

    def all_cells(self) -> dict[str, Keys]:
        """The grid of the factors, then the single cells: name -> keys over the base."""
        found: dict[str, Keys] = {}
        if self.factors:
            for levels in itertools.product(*(table.items() for table in self.factors.values())):
                keys: Keys = {}
                for _, changed in levels:
                    keys |= changed
                found[", ".join(name for name, _ in levels)] = keys
        return {**found, **self.cells} or {"base": {}}

    def settings(self, cell: str, seed: int | None = None) -> tuple[Recipe, Placement]:
        """The recipe and placement of one cell, not yet resolved."""
        keys = {**self.base, **self.all_cells()[cell]}
        if seed is not None:
            keys["seed"] = seed
        try:
            return load([Path(file) for file in self.files], [_word(key, value) for key, value in keys.items()])
        except InputError as error:
            raise InputError(f"study '{self.name}', cell '{cell}': {error}") from None

    def seed_of(self, cell: str, repeat: int) -> int:
        """Repeat 0 and the others of every cell have the same seeds, so that they can be compared pair by pair."""
        if self.seeds:
            return self.seeds[repeat % len(self.seeds)]
        return self.settings(cell)[0].seed + repeat


def _word(key: str, value: Any) -> str:
    return f"{key}={'none' if value is None else toml.written(value)}"


def check(study: Study) -> Study:
    """Check everything that does not depend on a machine: names, metrics, the baseline, and every cell's keys.

    Where the cells have no accuracy, what their models are judged by stands in its place.
    """
    check_name("name=", study.name, "study")
    cells = study.all_cells()

    def known(key: str, what: str, name: str, names: Iterable[str]) -> None:
        if name not in names:
            raise InputError(f"{key}: no such {what} '{name}'; {nearest(name, names)}")

    if study.baseline is not None:
        known("baseline", "cell", study.baseline, cells)
    recipes = [study.settings(cell)[0] for cell in cells]
    metrics = known_metrics(recipes)
    study = msgspec.structs.replace(study, metrics=[name_of(metric) for metric in study.metrics])
    for metric in study.metrics:
        known("metrics", "metric", metric, metrics)
    for claim in [claim for published in study.published for claim in published.claims]:
        known("published.claims", "cell", claim.more, cells)
        known("published.claims", "cell", claim.less, cells)
        known("published.claims", "metric", claim.metric, metrics)
    for cell in [cell for published in study.published for cell in published.curves]:
        known("published.curves", "cell", cell, cells)
    for cell, keys in cells.items():
        if "seed" in keys:
            raise InputError(
                f"cell '{cell}' sets seed: seeds are the same in all cells; state seeds = [1, 2, …] instead"
            )
    return msgspec.structs.replace(study, metrics=fitting(study.metrics, recipes))


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint where there is no such name: the nearest one; if none is near, `otherwise`, or what there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean '{near[0]}'?" if near else otherwise or f"there are: {'; '.join(names[:12])}"
