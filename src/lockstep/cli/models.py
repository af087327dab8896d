"""`lockstep models`: what can be trained, and how big it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from lockstep.cli.importing import import_torch
from lockstep.cli.options import json_option
from lockstep.cli.output import next_step, note, print_json, print_records
from lockstep.errors import InputError
from lockstep.offered import offers
from lockstep.recipes import REPORTS

EPILOG = """\b
Examples:
  lockstep models
  lockstep models nets.py:Net --shape 3x32x32
"""


@click.command("models", epilog=EPILOG)
@click.argument("own", nargs=-1, metavar="[FILE.py:CALLABLE]...")
@click.option("--shape", help="Input shape CxHxW of your own models, for FLOPs.")
@json_option
def command(own: tuple[str, ...], shape: str | None, as_json: bool) -> None:
    """List the models with parameters, FLOPs and input shape."""
    from lockstep.models import CATALOGUE, check_name

    for name in own:
        check_name(name)
    size = _shape(shape) if shape else None
    if not as_json:
        note("counting parameters and FLOPs (torch takes two seconds to start) …")
    import_torch()
    rows = [_facts(name, size, "your own") for name in own]
    if not own:
        rows += [_facts(name, info.shape, info.about) for name, info in CATALOGUE.items()]
        rows += list(_offered(size))
    if as_json:
        print_json(rows)
        return
    shown = [
        {
            "model": row["name"],
            "parameters": f"{row['parameters']:,}",
            "gradient bytes": f"{row['gradient_bytes']:,}",
            "MFLOP a sample, forward": "–" if row["flops"] is None else f"{row['flops'] / 1e6:,.2f}",
            "input": "x".join(map(str, row["shape"])) if row["shape"] else "by the data",
            "what": row["about"],
        }
        for row in rows
    ]
    print_records(shown, right=(1, 2, 3), spare=(2,))
    if not own:
        note(f"{REPORTS}.")
    next_step(
        f"lockstep run model={rows[-1]['name']} data=…"
        if own
        else "lockstep run model=cifar-vgg data=cifar10 max_steps=50"
    )


def _offered(shape: tuple[int, ...] | None) -> Iterator[dict[str, Any]]:
    """Models that other packages offer; one that cannot be built is told, and the others are listed."""
    for offer in offers("model"):
        try:
            yield {**_facts(offer.spec, shape, f"of the package {offer.package}"), "name": offer.name}
        except InputError as error:
            note(f"{offer.why}: {error}")


def _facts(name: str, shape: tuple[int, ...] | None, about: str) -> dict[str, Any]:
    """Counted on the model itself, not from a table; a multiply-add is two FLOPs."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from lockstep.models import blank, build
    from lockstep.recipe import Recipe

    model = build(Recipe(model=name)).eval()
    flops = None
    if shape is not None:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(blank(shape)[:1])
        flops = counter.get_total_flops()
    trained = [p for p in model.parameters() if p.requires_grad]
    return {
        "name": name,
        "parameters": sum(p.numel() for p in trained),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
        "flops": flops,
        "shape": list(shape) if shape else None,
        "about": about,
    }


def _shape(text: str) -> tuple[int, int, int]:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"--shape {text}: write it as CxHxW, for example 3x32x32")
    channels, height, width = map(int, parts)
    return channels, height, width
