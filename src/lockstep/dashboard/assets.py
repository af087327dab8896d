"""The files of the pages. What draws a report is the report's own script and style; the dashboard adds what is live."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from functools import cache
from importlib.resources import files

import msgspec

from lockstep.dashboard.security import Refused
from lockstep.report.html import SCRIPTS

# The report's last script draws the whole page at once; here it is a function, called when the report has come.
*_PARTS, _WHOLE = SCRIPTS
_FETCH = "import sys; from lockstep.report.vega.bundle import bundle; sys.stdout.buffer.write(bundle().script.encode())"


def scripts() -> dict[str, bytes]:
    """By name: each is one file, closed to the outside."""
    helpers = _taken(("element", "put", "fixed", "written"), _report("format.js"))
    whole = f"function drawReport() {{\n{_report(_WHOLE)}\n}}"
    drawing = _taken(
        ("element", "put", "fixed", "written", "figureFor", "drawReport"), *(_report(name) for name in _PARTS), whole
    )
    shell, style = _own("shell.js"), _report("page.css") + "\n" + _own("dashboard.css")
    return {
        "list.js": _closed(helpers, shell, _own("list.js")),
        "run.js": _closed(drawing, shell, _own("run.js")),
        "enter.js": _closed(helpers, shell, _own("enter.js")),
        "theme.js": _closed(_own("theme.js")),
        "dashboard.css": style.encode(),
    }


@cache
def library() -> bytes:
    """What draws the plots, fetched when it is first asked for, by a process of its own: where it is not kept yet, putting it together
    takes seconds and a hundred megabytes."""
    done = subprocess.run([sys.executable, "-P", "-c", _FETCH], capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Refused(500, said[-1] if said else "what draws the plots could not be had")
    return done.stdout


def page(title: str, script: str, given: object) -> bytes:
    """A page's shell, with what it starts from as a block of JSON, in which nothing can end the block."""
    parts = {"title": html.escape(title), "script": script, "given": safe(given)}
    pieces = re.split(r"\{\{(\w+)\}\}", _own("page.html"))
    # Split once: what is put in is not looked through for marks.
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces)).encode()


def safe(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _taken(names: tuple[str, ...], *texts: str) -> str:
    """What the report's scripts are used for, by name; all their other names stay their own."""
    listed, inside = ", ".join(names), "\n".join(texts)
    return f"const {{ {listed} }} = (() => {{\n{inside}\nreturn {{ {listed} }};\n}})();"


def _closed(*texts: str) -> bytes:
    return ('(() => {\n"use strict";\n' + "\n".join(texts) + "\n})();\n").encode()


def _report(name: str) -> str:
    return files("lockstep.report").joinpath("page", name).read_text(encoding="utf-8")


def _own(name: str) -> str:
    return files("lockstep.dashboard").joinpath("page", name).read_text(encoding="utf-8")
