"""Draws the picture of the README from a real demo: `.venv/bin/python docs/pictures.py` writes docs/demo.svg."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lockstep.cli.demo import render

HERE = Path(__file__).parent

# As rich's own, without the web font that it would fetch.
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect fill="#161b22" x="1" y="1" width="{terminal_width}" height="{terminal_height}" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def main() -> None:
    lockstep = Path(sys.executable).with_name("lockstep")
    finished = subprocess.run([lockstep, "demo", "--json"], stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(finished.stdout)
    out = Console(record=True, width=112, force_terminal=True, highlight=False)
    out.print(Text("$ lockstep demo", style="bold"))
    render(report, "mnist", out)
    out.save_svg(str(HERE / "demo.svg"), code_format=FORMAT, title="lockstep demo")


if __name__ == "__main__":
    main()
