"""Writes docs/map.md from the source: `.venv/bin/python docs/code_map.py`. `--check` only says whether the page is up to date.

What a room is for, what it may import and what its door is stand in its `__init__.py`; what it does import is read from the source. The
questions and the path of a run are written here, and every function that they name has to exist.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import house  # noqa: E402

PAGE = ROOT / "docs/map.md"
HEAD = """# The map

What is where in `src/lockstep`. Written by `docs/code_map.py` from the source; a test holds that it is
up to date. [design.md](design.md) has the ideas, [CONTRIBUTING.md](../CONTRIBUTING.md) the recipes
for adding things.
"""

QUESTIONS = {
    "Where is the learning rate set?": ("training/schedule.py", "Pace.set"),
    "What happens when a rank dies?": ("launch/cause.py", "first_cause"),
    "How is exposed communication measured?": ("measure/clock.py", "CpuClock.lap_backward"),
    "Where does `backend=auto` decide?": ("backends/costs/choose.py", "best"),
    "How do I add a metric?": ("metrics.py", "METRICS"),
}

# `lockstep run ranks=2`, hop by hop.
PATH = [
    ("cli/__init__.py", "main", "catches Ctrl-C from the first moment on"),
    ("cli/commands.py", "LazyGroup.get_command", "imports the file of the one command that was asked for"),
    ("cli/run.py", "command", "the command from top to bottom"),
    ("settings.py", "load", "makes a recipe and a placement of files and `key=value`"),
    ("launch/preparation.py", "prepare", "checks all that can be checked, and makes the run folder"),
    ("resolve", "resolve", 'decides what "auto" means on this machine'),
    ("plan.py", "plan", "works out the batch algebra"),
    ("launch/execution.py", "execute", "runs what was prepared"),
    ("launch/spawn.py", "starts", "says which processes to start: `python -m lockstep.worker RUN_DIR`, once per rank"),
    ("launch/supervise.py", "supervise", "starts them, watches them, ends them"),
    ("worker.py", "main", "in each rank: finds its rank, pins itself to its cores"),
    ("worker.py", "work", "imports torch, trains, writes results"),
    ("training/assemble.py", "assemble", "puts data, model, strategy and optimizer together"),
    ("training/member.py", "Member.join", "opens the rank's records, and joins the others"),
    ("backends/group.py", "join", "meets the other ranks"),
    ("training/loop.py", "Trainer.fit", "epochs, evaluation, checkpoints"),
    ("training/recipe_step.py", "RecipeStep.run", "one step: batch, forward, backward, update"),
    ("training/step.py", "Step.backward", "backward and the exchange of gradients, timed"),
    ("measure/records.py", "StepLog", "keeps what the step took"),
    ("cli/show.py", "print_run", "prints the run from its folder"),
]


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print("docs/map.md is not up to date: .venv/bin/python docs/code_map.py", file=sys.stderr)
    return 1


def page() -> str:
    lines = [HEAD, "## Five questions", "", "| question | file | begin at |", "|---|---|---|"]
    lines += [f"| {text} | {link(path)} | `{found(path, name)}` |" for text, (path, name) in QUESTIONS.items()]
    lines += ["", "## What `lockstep run ranks=2` does", "", "| file | function | what it does |", "|---|---|---|"]
    lines += [f"| {link(path)} | `{found(path, name)}` | {text} |" for path, name, text in PATH]
    lines += ["", "## Rooms", "", "Top to bottom: a room imports only rooms below it (`tests/house.py`)."]
    order = [room for row in house.rows() for room in row]
    for room in (room for room in order if room.endswith("/")):
        lines += ["", *section(room)]
    lines += ["", "## Files at the top", "", "| file | lines | what it is for | imports |", "|---|---|---|---|"]
    for room in (room for room in order if not room.endswith("/")):
        path = house.SOURCE / ("__init__.py" if room == "lockstep" else f"{room}.py")
        lines.append(f"| {link(path.name)} | {hundreds([path])} | {purpose(path)} | {imports(room)} |")
    return "\n".join(lines) + "\n"


def section(room: str) -> list[str]:
    folder = house.SOURCE / room
    files = sorted(folder.rglob("*.py"))
    names = [str(path.relative_to(folder)) for path in files if path.name != "__init__.py"]
    return [
        f"### {room}",
        "",
        wrapped(purpose(folder / "__init__.py")),
        "",
        wrapped(f"- Door: {door(folder / '__init__.py')}", "  "),
        wrapped(f"- {hundreds(files)} lines in {len(files)} files: {', '.join(names)}", "  "),
        wrapped(f"- Imports: {imports(room)}", "  "),
    ]


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def purpose(path: Path) -> str:
    """The first sentences of a docstring: its first paragraph."""
    return " ".join(docstring(path).split("\n\n")[0].split())


def door(path: Path) -> str:
    told = re.search(r"Its doors? (?:is|are) (.+?)\.(?:\s|$)", docstring(path), flags=re.DOTALL)
    return " ".join(told[1].split()) if told else "not named"


def hundreds(paths: list[Path]) -> str:
    """Lines, rounded up to hundreds, so that the page does not change with every commit."""
    lines = sum(len(path.read_text().splitlines()) for path in paths)
    return f"{-(-lines // 100) * 100:,}"


def imports(room: str) -> str:
    order = [room for row in house.rows() for room in row]
    targets = {each.target for each in house.imports() if each.source == room}
    return ", ".join(sorted(targets, key=order.index)) or "nothing"


def place(path: str) -> str:
    """The file of a room that may be a file or a folder; other paths as they are."""
    return path if "." in path else f"{path}.py" if (house.SOURCE / f"{path}.py").exists() else f"{path}/__init__.py"


def link(path: str) -> str:
    return f"[{place(path)}](../src/lockstep/{place(path)})"


def found(path: str, name: str) -> str:
    """The name, if the file defines it."""
    body: list[ast.stmt] = ast.parse((house.SOURCE / place(path)).read_text()).body
    for part in name.split("."):
        defined = {getattr(each, "name", ""): each for each in body}
        for each in body:
            targets = (
                each.targets
                if isinstance(each, ast.Assign)
                else [each.target]
                if isinstance(each, ast.AnnAssign)
                else []
            )
            defined |= {target.id: each for target in targets if isinstance(target, ast.Name)}
        if part not in defined:
            raise SystemExit(f"docs/code_map.py names {name} in {path}, which is not there: correct it")
        body = getattr(defined[part], "body", [])
    return name


if __name__ == "__main__":
    sys.exit(main())
