"""The files of the pages. The report's own script and style draw a report; the dashboard adds the live parts."""

from __future__ import annotations

import html
import subprocess
import sys
from functools import cache
from importlib.resources import files

from lockstep.dashboard.security import Refused
from lockstep.report.html import SCRIPTS, filled, page_file, safe, script_text

# The report's last script draws the whole page at once; here it is a function, called when the report has arrived.
*_PARTS, _WHOLE = SCRIPTS
_FETCH = "import sys; from lockstep.report.vega.bundle import bundle; sys.stdout.buffer.write(bundle().script.encode())"


def scripts() -> dict[str, bytes]:
    """By name: each is one file, closed to the outside."""
    helpers = _taken(("element", "put", "fixed", "written", "themeButton"), script_text("format.js"))
    whole = f"function drawReport() {{\n{script_text(_WHOLE)}\n}}"
    drawing = _taken(
        ("element", "put", "fixed", "written", "figureFor", "drawReport"),
        *(script_text(name) for name in _PARTS),
        whole,
    )
    shell = _own("shell.js")
    return {
        "list.js": _closed(helpers, shell, _own("list.js")),
        "run.js": _closed(drawing, shell, _own("run.js")),
        "enter.js": _closed(helpers, shell, _own("enter.js")),
        "theme.js": _closed(_own("theme.js")),
        "dashboard.css": f"{page_file('page.css')}\n{_own('dashboard.css')}".encode(),
    }


@cache
def library() -> bytes:
    """The plotting library, loaded on first use by a separate process: bundling it, if it is not cached yet, takes
    seconds and a hundred megabytes."""
    done = subprocess.run([sys.executable, "-P", "-c", _FETCH], capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Refused(500, said[-1] if said else "what draws the plots could not be had")
    return done.stdout


def page(title: str, script: str, given: object) -> bytes:
    """A page's shell, with its initial data as a block of JSON, escaped so that no text can end the block."""
    parts = {"title": html.escape(title), "script": script, "given": safe(given)}
    return filled(_own("page.html"), parts).encode()


def _taken(names: tuple[str, ...], *texts: str) -> str:
    """Export these names from the report's scripts; all their other names stay private."""
    listed, inside = ", ".join(names), "\n".join(texts)
    return f"const {{ {listed} }} = (() => {{\n{inside}\nreturn {{ {listed} }};\n}})();"


def _closed(*texts: str) -> bytes:
    return ('(() => {\n"use strict";\n' + "\n".join(texts) + "\n})();\n").encode()


def _own(name: str) -> str:
    return files("lockstep.dashboard").joinpath("page", name).read_text(encoding="utf-8")
