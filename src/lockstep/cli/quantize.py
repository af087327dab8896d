"""`lockstep quantize`: a finished run's model in 8-bit integers, tested on the whole test set, and measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from lockstep.cli.importing import import_torch
from lockstep.cli.options import complete_run, data_root_option, json_option, runs_option, whole
from lockstep.cli.output import console, next_step, note, print_json, print_table, styled
from lockstep.deploy import tables
from lockstep.run import Run, runs_root

EPILOG = """\b
Examples:
  lockstep quantize last                              static, calibrated on 1,024 training images
  lockstep quantize last --method dynamic             linear layers only, ranges of each batch
  lockstep quantize last --method qat                 ranges of training (quantize=qat), or one more epoch with it
  lockstep quantize last --sensitivity                which layer costs the accuracy
  lockstep quantize last --weights per-tensor --activations symmetric
  lockstep quantize last --ranges mse                 outliers left out as far as that rounds better
  lockstep quantize last --measure                    times and memory against fp32, compiled fp32, ONNX Runtime
  lockstep quantize last --engine qnnpack --profile --json

The files are in RUN/quantized/METHOD. docs/quantization.md says how to read the tables.
"""


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Numbers with commas between them."""
    try:
        found = [int(part) for part in value.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise click.BadParameter(f"'{value}' is not a list of numbers, for example 1,32,128", ctx, param)
    return found


@click.command("quantize", epilog=EPILOG)
@click.argument("run", default="last", shell_complete=complete_run)
@click.option("--method", type=click.Choice(["dynamic", "static", "qat"]), default="static")
@click.option("--engine", default="onednn", help="Whose integer kernels to test on.")
@click.option(
    "--weights",
    type=click.Choice(["per-channel", "per-tensor"]),
    default="per-channel",
    help="One scale a channel, or one for a layer.",
)
@click.option(
    "--activations",
    type=click.Choice(["affine", "symmetric"]),
    default="affine",
    help="Whether the range of a layer's inputs has its own zero.",
)
@click.option(
    "--bits",
    type=click.Choice(["7", "8"]),
    default="7",
    help="Of inputs; with 8, ONNX Runtime needs a CPU with VNNI.",
)
@click.option(
    "--ranges",
    type=click.Choice(["min-max", "percentile", "mse"]),
    default="min-max",
    help="static: cover all inputs that were seen, all but 1 in 10,000, or what rounds best.",
)
@click.option("--calibrate", type=whole(1), help="static: calibrate on N images (1,024, or all there are).")
@click.option("--epochs", type=click.IntRange(1, 100), default=1, help="qat of a run trained without it.")
@click.option("--sensitivity", is_flag=True, help="Also test with each layer alone quantized.")
@click.option("--measure", is_flag=True, help="Also measure latency, throughput and memory (minutes).")
@click.option("--compile/--no-compile", "compiled", default=True, help="--measure: with or without compiled routes.")
@click.option(
    "--batches",
    callback=_numbers,
    metavar="N,N,…",
    default="1,32,128,1000",
    help="--measure: sizes of batch.",
)
@click.option(
    "--threads",
    callback=_numbers,
    metavar="N,N,…",
    default="1,2",
    help="--measure: numbers of threads.",
)
@click.option("--onnx/--no-onnx", default=True, help="Write ONNX files too, where the extra 'onnx' is installed.")
@click.option("--profile", is_flag=True, help="Also torch's table of operators, for fp32 and int8.")
@runs_option
@data_root_option
@json_option
def command(
    run: str,
    weights: Any,
    activations: Any,
    bits: str,
    ranges: Any,
    runs: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Turn a finished run's model into 8-bit integers, test it, write it, measure it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports its own start and stop
    from lockstep.machine import facts, formats

    chosen = Run.find(run, runs_root(runs))
    formats.check("lockstep quantize", "int8", "this model can be used in fp32 only")
    os.environ.update(facts.rank_environment())  # before torch reads it
    if formats.cap_line(facts.known()):
        note(str(formats.cap_line(facts.known())))

    import_torch()
    from lockstep.deploy.command import Job, quantize
    from lockstep.quantize.scheme import Scheme

    scheme = Scheme(weights=weights, activations=activations, bits=7 if bits == "7" else 8, ranges=ranges)
    job = Job(scheme=scheme, **options)
    document = quantize(chosen, job, note)
    if as_json:
        print_json(document)
    else:
        show(document)


def show(document: dict[str, Any]) -> None:
    """The document as tables."""
    out = console()
    scheme = document["scheme"]
    out.print(
        styled(
            (document["method"], "bold"),
            f" on {document['engine']}: weights 8 bits {scheme['weights']} symmetric, "
            f"inputs {scheme['bits']} bits {scheme['activations']}",
        ),
        soft_wrap=True,
    )
    out.print(f"calibration: {document['calibration']}", soft_wrap=True)
    missing = "; ".join(f"{name}: {why}" for name, why in document["engines"]["missing"].items())
    out.print(
        f"engines here: {', '.join(document['engines']['available'])}{f' (not here: {missing})' if missing else ''}",
        soft_wrap=True,
    )
    _show(tables.layers(document["layers"]))
    accuracy, agreement = document["accuracy"], document["agreement"]
    out.print(
        f"accuracy on {document['test_samples']:,} test images: fp32 {accuracy['fp32']:.2%}, fake {accuracy['fake']:.2%}, "
        f"int8 {accuracy['int8']:.2%} ({100 * (accuracy['int8'] - accuracy['fp32']):+.2f} points); "
        f"int8 answers as fp32 for {agreement['int8 with fp32']:.2%}, as fake for {agreement['int8 with fake']:.2%}",
        soft_wrap=True,
    )
    if "int8 in ONNX Runtime" in accuracy:
        out.print(
            f"the ONNX file in ONNX Runtime: {accuracy['int8 in ONNX Runtime']:.2%}; "
            f"answers as int8 for {agreement['ONNX Runtime with int8']:.2%}"
        )
    fp32, int8 = document["bytes"]["fp32"], document["bytes"]["int8"]
    out.print(
        f"file {fp32['file']:,} → {int8['file']:,} bytes ({fp32['file'] / int8['file']:.2f}x smaller); "
        f"weights alone {fp32['weights']:,} → {int8['weights']:,} ({fp32['weights'] / int8['weights']:.2f}x)",
        soft_wrap=True,
    )
    for table in tables.tables(document):
        _show(table)
    for text in document["notes"]:
        out.print(styled(("note", "yellow"), f"  {text}"), soft_wrap=True)
    out.print(styled((f"{document['folder']}: {', '.join(document['files'])}", "dim")), soft_wrap=True)
    if "timing" not in document:
        next_step("the same with --measure (latency, throughput and memory beside fp32)")


def _show(table: tables.Table) -> None:
    if table.title:
        console().print(table.title, soft_wrap=True)
    print_table(table.headers, table.rows, table.right)
