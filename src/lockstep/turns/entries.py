"""Contenders as people name them: key=value words, recipe files, published recipes, loops of their own, runs, any programs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.recipes import path_of
from lockstep.run import Options, Run, runs_root
from lockstep.turns import command, ranks
from lockstep.turns.command import Command
from lockstep.turns.contender import Contender
from lockstep.turns.folder import Entry
from lockstep.turns.ranks import Ranks, memory_problem
from lockstep.words import read_words, split_script

MOST_IMAGES = 1e9
# A machine that is slow needs this long, however short the race is to be.
LEAST_START_S = 60.0


def entries(contenders: Sequence[str], common: str, runs: Path | None) -> list[Entry]:
    """All of them; one that is named twice is numbered."""
    found: list[Entry] = []
    for text in contenders:
        taken = sum(entry.name == text or entry.name.startswith(f"{text} (") for entry in found)
        entry = _read(text, common, runs)
        found.append(msgspec.structs.replace(entry, name=f"{text} ({taken + 1})") if taken else entry)
    return found


def _read(text: str, common: str, runs: Path | None) -> Entry:
    """One contender. What is wrong is said with the contender that it is wrong in."""
    before, dollar, program = text.partition("$ ")
    if dollar and all(word.startswith("images=") for word in before.split()):
        return _foreign(text, before, program)
    try:
        given = shlex.split(text)
        if "--" in given:  # before the words for a script; of a whole command line, click takes it away
            given.remove("--")
        words, script, script_args = split_script(tuple(given))
        if not words and not script:
            raise InputError("it is empty")
        if len(words) == 1 and "=" not in words[0] and not words[0].endswith(".toml") and not path_of(words[0]):
            spec = Run.find(words[0], runs_root(runs)).spec()
            if spec.options.attached:
                raise InputError(
                    f"its training was attached to, so race its command: '$ {shlex.join(spec.options.attached)}'"
                )
            if common:
                raise InputError(
                    f"a run states all its settings itself, so '{common}' cannot hold for it: name its settings instead"
                )
            recipe, placement = spec.recipe, spec.placement
            script, script_args = spec.options.script, spec.options.script_args
        else:
            recipe, placement = read_words((*shlex.split(common), *words))
        if placement.launcher == "slurm" and not os.environ.get("SLURM_JOB_ID"):
            raise InputError(
                "contenders share their cores, and jobs do not: race within one allocation, salloc … lockstep race …"
            )
    except (InputError, ValueError) as error:
        raise InputError(f"race: '{text}': {error}") from None
    return Entry(name=text, recipe=recipe, placement=placement, script=script, script_args=script_args)


def _foreign(text: str, before: str, program: str) -> Entry:
    """`$ COMMAND` or `images=N $ COMMAND`. It is started as it is, by no shell."""
    try:
        argv = shlex.split(program)
        images = [float(word.removeprefix("images=")) for word in before.split()]
    except ValueError as error:
        raise InputError(f"race: '{text}': {error}") from None
    if not argv:
        raise InputError(f"race: '{text}': there is no command after '$'")
    if len(images) > 1 or not all(0 < count <= MOST_IMAGES for count in images):
        raise InputError(f"race: '{text}': write it as images=6400 $ COMMAND, a number above 0")
    return Entry(name=text, recipe=Recipe(), placement=Placement(), command=argv, images=images[0] if images else 0.0)


def contender(entry: Entry, folder: Path, data_root: str | None, budget_s: float) -> Contender:
    """What takes turns: all ranks of a placement, or a foreign program. It may not start for longer than the race has time."""
    start_s = max(LEAST_START_S, budget_s)
    if entry.command:
        return Command(entry.name, entry.command, entry.images or 1.0, min(command.START_S, start_s))
    options = Options(data_root=data_root, script=entry.script, script_args=entry.script_args)
    return Ranks(entry.name, entry.recipe, entry.placement, folder, options, start_s=min(ranks.START_S, start_s))


def check(entries: Sequence[Entry]) -> None:
    """Lines are compared with lines, and images with images; and all are alive at the same time."""
    lines = [entry.name for entry in entries if entry.command and not entry.images]
    if lines and len(lines) < len(entries):
        raise InputError(
            f"race: '{lines[0]}': how many images it trains from one line that it prints to the next is not known: write images=N $ COMMAND"
        )
    if problem := memory_problem(entry.placement for entry in entries):
        raise InputError(f"race: {problem}")
