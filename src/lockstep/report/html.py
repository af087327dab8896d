"""The page: one file with everything in it. It loads nothing, and a strict policy keeps it from doing so.

Everything that comes from a user is in the JSON block, which is no markup; the script puts it on the page as text alone.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files

import msgspec

from lockstep.report.views import Report

SCRIPTS = ("format.js", "plots.js", "shapes.js", "figure.js", "page.js")


def page(report: Report) -> str:
    style = _file("page.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_file(name) for name in SCRIPTS) + "\n})();"
    parts = {
        "policy": policy(style, script),
        "title": html.escape(f"{report.title} – Lockstep report"),
        "style": style,
        "document": safe(report),
        "script": script,
    }
    # Split once, so that what is put in is not looked through for marks: a title may hold anything.
    pieces = re.split(r"\{\{(\w+)\}\}", _file("page.html"))
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def policy(style: str, script: str) -> str:
    """Nothing from anywhere but this style and this script; pictures only as the page itself makes them (PNG of a plot)."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def safe(report: Report) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or start another."""
    text = msgspec.json.encode(report).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _file(name: str) -> str:
    return files("lockstep.report").joinpath("page", name).read_text(encoding="utf-8")
