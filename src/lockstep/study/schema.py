"""JSON Schema of the files that people write, made from the types that read them: editors complete and check keys by it."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import Any

import msgspec

from lockstep.metrics import METRICS
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.study.definition import Study

Schema = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"
# A factor's levels, a cell's keys: [factors.NAME.LEVEL] and [cells.NAME] are tables of keys, too.
_BUNDLES = {"type": "object", "additionalProperties": {"type": "object"}}


def recipe_file() -> Schema:
    """Recipe keys at the top, placement keys in [placement]."""
    definitions = _definitions()
    properties = {**_properties(definitions, "Recipe"), "placement": _table(definitions, "Placement")}
    return _file("a recipe, and where it runs", properties, definitions)


def study_file() -> Schema:
    definitions = _definitions()
    keys = {**_properties(definitions, "Recipe"), **_properties(definitions, "Placement")}
    own = {key: value for key, value in _properties(definitions, "Study").items() if key != "base"}
    # A measure of the user's own is named as in the recipe.
    names = {"anyOf": [{"enum": sorted(METRICS)}, {"type": "string", "pattern": ":[A-Za-z_.]"}]}
    own["metrics"] = {"type": "array", "items": names}
    tables = {"recipe": _table(definitions, "Recipe"), "placement": _table(definitions, "Placement")}
    parts = {
        "factors": {
            "description": "Every combination is a cell: KEY = [values], or [factors.NAME.LEVEL] with keys.",
            "type": "object",
            "properties": {key: {"type": ["array", "object"]} for key in keys},
            "additionalProperties": _BUNDLES,
        },
        "cells": {
            "description": "Single cells: [cells.NAME] with keys.",
            "type": "object",
            "additionalProperties": {"type": "object", "properties": {**keys, **tables}, "additionalProperties": False},
        },
        "quick": {
            "description": "What --quick changes.",
            "type": "object",
            "properties": {**keys, **own, **tables},
            "additionalProperties": False,
        },
    }
    return _file("what is varied over a recipe and a placement", {**own, **tables, **parts}, definitions)


def _file(about: str, properties: Schema, definitions: Schema) -> Schema:
    return {
        "$schema": DRAFT,
        "title": f"Lockstep: {about}",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def _definitions() -> Schema:
    """Each struct by its name. A key may be left out, so nothing is required but what a published claim has to say."""
    kinds: list[type[msgspec.Struct]] = [Recipe, Placement, Study]
    _, found = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for kind in [*kinds, *(table for owner in kinds for table in _tables_of(owner))]:
        for key, text in _said(kind).items():
            found[kind.__name__]["properties"][key].setdefault("description", text)
    hosts = found["Placement"]["properties"]["hosts"]
    found["Placement"]["properties"]["hosts"] = {"anyOf": [hosts, {"type": "string", "pattern": "^emulated:[0-9]+$"}]}
    return found


def _tables_of(owner: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    kinds = (field.type for field in msgspec.structs.fields(owner))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


def _said(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What the source says of each field, in the text behind it."""
    found = {}
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    for field, behind in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(behind, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(behind.value)).split())
    return found


def _properties(definitions: Schema, name: str) -> Schema:
    properties: Schema = definitions[name]["properties"]
    return properties


def _table(definitions: Schema, name: str) -> Schema:
    return {"type": "object", "properties": _properties(definitions, name), "additionalProperties": False}
