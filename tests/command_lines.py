"""Command lines that are printed or written somewhere: whether Lockstep accepts them, and which of them a command prints as its next ones."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click

from lockstep.cli.commands import cli as cli_group
from lockstep.errors import InputError
from lockstep.words import read_words

Words = list[str]
# Commands whose key=value words are those of a recipe and a placement.
TRAINS = ("run", "verify", "tune", "race")
# `lockstep.cli.output.next_step` begins the first line so, and the lines of further commands with as many spaces. A remark may follow.
NEXT = re.compile(r"^(?:next: | {6})(?:cd \S+ && )?lockstep (.*?)(?: \([^()]*\))?$", re.MULTILINE)


def next_ones(printed: str) -> list[Words]:
    """The commands of Lockstep that a command says to type next."""
    first = re.search(r"^next: ", printed, re.MULTILINE)
    return [shlex.split(line) for line in NEXT.findall(printed[first.start() :])] if first else []


def refused(words: Words) -> str:
    """Why this line is not accepted, with its options, keys and values; empty where it is."""
    command, rest = cli_group.get_command(click.Context(cli_group), words[0]), words[1:]
    while isinstance(command, click.Group) and rest and (inner := command.get_command(click.Context(command), rest[0])):
        command, rest = inner, rest[1:]
    if command is None:
        return f"no such command: {words[0]}"
    try:
        context = command.make_context(words[0], list(rest))
        if words[0] in TRAINS:
            for settings in _settings(context):
                read_words(settings)
    except click.ClickException as error:
        return error.format_message()
    except InputError as error:
        return str(error)
    return ""


def _settings(context: click.Context) -> Iterator[Words]:
    """Of a race each contender's, else those of the line. What is left for the reader to fill in (`data=…`) has no value yet."""
    given = context.params
    if "contenders" in given:
        lines = [shlex.split(f"{given['common'] or ''} {one}") for one in given["contenders"] if "$" not in one]
    else:
        lines = [list(given.get("words") or ())]
    for whole in lines:
        line = whole[: whole.index("--")] if "--" in whole else whole
        yield [word for word in line if "=" in word and not word.startswith("-") and "…" not in word]
