"""The page: one file with everything in it. It loads nothing, and a strict policy keeps it from doing so.

Everything that comes from a user is in the JSON block, which is no markup; the script puts it on the page as text alone.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec

from lockstep import units
from lockstep.report.vega.bundle import bundle
from lockstep.report.vega.spec import for_page
from lockstep.report.views import Report

SCRIPTS = ("format.js", "values.js", "choose.js", "plot.js", "figure.js", "page.js")


def page(report: Report) -> str:
    style = page_file("page.css")
    script = '(() => {\n"use strict";\n' + "\n".join(script_text(name) for name in SCRIPTS) + "\n})();"
    library = bundle()
    parts = {
        "policy": policy(style, script, library.digest),
        "title": html.escape(f"{report.title} – Lockstep report"),
        "style": style,
        "document": safe(document(report)),
        "library": library.text,
        "script": script,
    }
    return filled(page_file("page.html"), parts)


def filled(template: str, parts: Mapping[str, str]) -> str:
    """A template with its marks replaced. Split once, so that what is put in is not looked through for marks: a title may hold anything."""
    pieces = re.split(r"\{\{(\w+)\}\}", template)
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def document(report: Report) -> dict[str, Any]:
    """The report with a spec beside every chart."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    for part, drawn in zip(report.parts, found["parts"], strict=True):
        drawn["charts"] = [for_page(chart) for chart in part.charts]
    return found


def policy(style: str, script: str, library: str) -> str:
    """Nothing from anywhere but this style, this script, and the library that it unpacks; no eval."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}' '{library}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def safe(found: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or start another."""
    text = msgspec.json.encode(found).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def script_text(name: str) -> str:
    """A script of the page, with the table of units in it."""
    return page_file(name).replace("{{units}}", safe(units.for_page()))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def page_file(name: str) -> str:
    return files("lockstep.report").joinpath("page", name).read_text(encoding="utf-8")
