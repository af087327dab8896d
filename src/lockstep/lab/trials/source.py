"""A look at the text of a student's file, without running it: whether it is a solution, or names one that others wrote.

It finds what is written plainly, and nothing that is hidden on purpose.
"""

from __future__ import annotations

import ast
from pathlib import Path


def parsed(file: str) -> ast.Module | None:
    """None where it is not Python: running it says why."""
    try:
        return ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError):
        return None


def names(tree: ast.Module) -> set[str]:
    """Every name that is used or imported, and every attribute; of a dotted import its parts."""
    found = {part for name in imports(tree) for part in name.split(".")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def imports(tree: ast.Module) -> set[str]:
    """What is imported, by its full name: "package.module.object"."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module or ''}.{alias.name}" for alias in node.names)
    return found


def classes(tree: ast.Module) -> set[str]:
    """The names of the classes that are defined in it."""
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
