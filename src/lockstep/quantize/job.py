"""What `lockstep quantize` does: load, convert, test, write, measure. Returns one document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.machine.cpu import INSTRUCTIONS, allowed_flags
from lockstep.quantize import bench, convert, engines, files, graph, peer, published, timing
from lockstep.quantize.convert import Method, Prepared
from lockstep.quantize.layers import use_kernels
from lockstep.quantize.scheme import Scheme
from lockstep.quantize.subject import Answers, Subject, ask, load
from lockstep.quantize.training import SCHEME
from lockstep.quantize.tune import fine_tune
from lockstep.run import Run, write_atomic

CALIBRATION = 1024
# Batches of 128, as document D's test had them.
PROFILE_BATCH, PROFILE_PASSES = 128, 10


@dataclass
class Wish:
    """What the user asks for."""

    method: Method
    engine: str = engines.DEFAULT
    scheme: Scheme = SCHEME
    calibrate: int | None = None
    """Images for --method static; unstated, 1,024 or as many as the run trained on."""
    epochs: int = 1
    """--method qat of a run that was trained without: so many more."""
    sensitivity: bool = False
    measure: bool = False
    compiled: bool = True
    profile: bool = False
    onnx: bool = True
    """Write the ONNX files, where the packages for them are installed."""
    batches: list[int] = field(default_factory=lambda: [1, 32, 128, 1000])
    threads: list[int] = field(default_factory=lambda: [1, 2])
    data_root: Path | None = None


def quantize(run: Run, wish: Wish, say: Callable[[str], None]) -> dict[str, Any]:
    engines.check(wish.engine)
    subject = load(run, wish.data_root)
    if wish.method == "qat" and subject.qat and wish.scheme != SCHEME:
        raise InputError(
            "--weights, --activations, --bits: this run was trained with quantize=qat, which has chosen them: leave them out"
        )
    begin = perf_counter()
    original = bench.fp32_of(subject)
    fp32 = ask(original, subject)
    # A run's own ranges, or the training that makes them, before anything is taken apart.
    tuned = wish.method == "qat" and subject.qat is None
    if tuned:
        say(f"fine-tuning with fake quantization: {wish.epochs} epoch(s) of {subject.spec.plan.train_samples} images")
        fine_tune(subject, wish.epochs, wish.scheme)
    prepared = _prepared(subject, wish)
    int8_model = convert.convert(prepared)
    fake = ask(subject.model if wish.method == "qat" else int8_model, subject)
    where = files.folder(run, wish.method)
    program, problem = _program(int8_model, subject.example)
    call, engine = _on_engine(wish.engine, program, int8_model, subject)
    say(f"testing on {engine}")
    int8 = ask(call, subject)
    document: dict[str, Any] = {
        "run": str(run.folder),
        "method": wish.method,
        "engine": engine,
        "engines": {"available": engines.available(), "missing": engines.missing()},
        "vnni": _vnni(),
        "scheme": msgspec.to_builtins(prepared.scheme),
        "calibration": _calibration(wish, subject, tuned),
        "layers": [asdict(row) for row in prepared.rows],
        "accuracy": {"fp32": fp32.accuracy, "fake": fake.accuracy, "int8": int8.accuracy},
        "loss": {"fp32": fp32.loss, "fake": fake.loss, "int8": int8.loss},
        "agreement": {"int8 with fp32": int8.agreement(fp32), "int8 with fake": int8.agreement(fake)},
        "test_samples": int8.samples,
        "notes": [text for text in (problem, *_notes(wish, prepared, program)) if text],
        "seconds": perf_counter() - begin,
    }
    document |= _write(where, subject, original, int8_model, program, wish.onnx, document["notes"])
    if files.ONNX in document["files"]:
        answers = ask(peer.predict(where / files.ONNX, torch.get_num_threads()), subject)
        document["accuracy"]["int8 in ONNX Runtime"] = answers.accuracy
        document["agreement"]["ONNX Runtime with int8"] = answers.agreement(int8)
    if wish.sensitivity:
        document["sensitivity"] = sensitivity(prepared, subject, fp32, say)
    if wish.profile:
        document["operators"] = {"fp32": _profile(original, subject), "int8": _profile(call, subject)}
    if wish.measure:
        document |= _measure(wish, subject, program, say)
    document["published"] = published.beside(document, subject.spec.recipe)
    write_atomic(where / files.REPORT, document)
    return document


def _vnni() -> list[str]:
    """The CPU's instructions that add products of bytes in 32 bits."""
    return sorted(allowed_flags() & set(INSTRUCTIONS["int8"]))


def _notes(wish: Wish, prepared: Prepared, program: torch.export.ExportedProgram | None) -> Iterator[str]:
    """What the figures do not say by themselves."""
    left = [row for row in prepared.rows if row.parameters and not row.quantized and not row.why.startswith("folded")]
    if left and wish.method != "dynamic":
        names = ", ".join(f"{row.layer} ({row.kind})" for row in left)
        yield f"a part is quantized only; still in fp32: {names}"
    floats = graph.in_floats(program.module(check_guards=False)) if program is not None else []
    if floats:
        yield f"computed in fp32 between the layers: {', '.join(floats)}"
    if prepared.scheme.bits == 8 and not _vnni():
        yield (
            "this CPU has no VNNI: with --bits 8 the engines x86 and fbgemm and ONNX Runtime cut off sums of products "
            "(docs/quantization.md); onednn, inductor, winograd and qnnpack do not"
        )
    if wish.profile and wish.engine == "qnnpack":
        yield (
            "torch's profiler does not see qnnpack give back the memory of its tensors, so its memory column is not what was needed at once; "
            "--measure measures resident memory"
        )


def _prepared(subject: Subject, wish: Wish) -> Prepared:
    prepared = convert.prepare(subject.model, subject.example, wish.method, wish.scheme)
    if wish.method == "static":
        convert.calibrate(prepared, subject.calibration(_images(wish, subject)))
    elif wish.method == "qat":
        prepared.keep_ranged()
    convert.leave_out_broken(prepared, subject.example)
    return prepared


def _images(wish: Wish, subject: Subject) -> int:
    limit = subject.spec.plan.train_samples
    if wish.calibrate is None:
        return min(CALIBRATION, limit)
    if wish.calibrate > limit:
        raise InputError(f"--calibrate {wish.calibrate}: the run trained on {limit} images; choose at most so many")
    return wish.calibrate


def _calibration(wish: Wish, subject: Subject, tuned: bool) -> str:
    data = f"{subject.spec.recipe.data}'s training set"
    if wish.method == "static":
        return f"{_images(wish, subject)} images of {data}, in the order of the first epoch, without augmentation"
    if wish.method == "dynamic":
        return "none: the range of each batch is taken when it comes"
    return (
        f"{wish.epochs} more epoch(s) on {data}, ranges in training"
        if tuned
        else f"ranges of the run's own training on {data}"
    )


def _program(model: nn.Module, example: Tensor) -> tuple[torch.export.ExportedProgram | None, str]:
    """The exported program, or why there is none: then the layers' own kernels are what is left."""
    try:
        return graph.exported(model, example), ""
    except InputError as error:
        return None, f"no file, and kernels layer by layer only: {error}"


def _on_engine(
    name: str, program: torch.export.ExportedProgram | None, model: nn.Module, subject: Subject
) -> tuple[Callable[[Tensor], Tensor], str]:
    if program is not None:
        images = next(subject.calibration(min(512, subject.spec.plan.train_samples)))
        return engines.build(name, program.module(check_guards=False), images), name
    if name != engines.DEFAULT:
        raise InputError(
            f"--engine {name} needs a graph, and torch.export cannot follow this model: leave --engine out"
        )
    use_kernels(model)
    return model, f"{name}, layer by layer"


def _write(
    where: Path,
    subject: Subject,
    original: nn.Module,
    model: nn.Module,
    program: torch.export.ExportedProgram | None,
    onnx: bool,
    notes: list[str],
) -> dict[str, Any]:
    """The files, and how large they are against fp32 as it would be deployed: batch norm folded, without a training's ranges."""
    sizes = {"fp32": files.sizes(original.state_dict()), "int8": files.write_weights(where, model)}
    written = [files.INT8]
    if program is not None:
        files.write_program(where, program)
        written.append(files.PROGRAM)
        lacking = files.onnx_missing()
        if not onnx:
            notes.append("no ONNX file: --no-onnx")
        elif lacking:
            notes.append(f"no ONNX file: {', '.join(lacking)} not installed; pip install 'lockstep[onnx]'")
        else:
            float_program = graph.exported(original, subject.example)
            for name, each in ((files.ONNX, program), (files.ONNX_FP32, float_program)):
                try:
                    files.write_onnx(where, name, each)
                    written.append(name)
                except Exception as error:  # the exporter raises many kinds
                    notes.append(f"no {name}: {str(error).strip().splitlines()[0]}")
    return {"bytes": sizes, "folder": str(where), "files": written}


def sensitivity(
    prepared: Prepared, subject: Subject, fp32: Answers, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Accuracy with only one layer quantized, each in turn; the one that costs most first."""
    rows = []
    for name in prepared.chosen:
        say(f"only {name} quantized")
        found = ask(convert.convert(prepared, only=[name]), subject)
        rows.append(
            {
                "layer": name,
                "accuracy": found.accuracy,
                "points": 100 * (found.accuracy - fp32.accuracy),
                "loss": found.loss,
                "agreement": found.agreement(fp32),
            }
        )
    return sorted(rows, key=lambda row: float(row["agreement"]))


def _profile(call: Callable[[Tensor], Any], subject: Subject) -> list[dict[str, Any]]:
    from torch.profiler import ProfilerActivity, profile

    from lockstep.measure.profile import rows

    images = bench.images_of(subject, PROFILE_BATCH)
    with torch.no_grad():
        call(images)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(PROFILE_PASSES):
                call(images)
    return rows(profiler.key_averages())


def _measure(
    wish: Wish, subject: Subject, program: torch.export.ExportedProgram | None, say: Callable[[str], None]
) -> dict[str, Any]:
    if program is None:
        raise InputError("--measure needs the exported file, and torch.export cannot follow this model: leave it out")
    request = bench.Request(
        run=str(subject.run.folder.absolute()),
        method=wish.method,
        threads=1,
        batches=wish.batches,
        routes=[],
        data_root=str(wish.data_root) if wish.data_root else None,
    )
    return {"timing": timing.measure(request, wish.threads, wish.compiled, say), "memory": timing.memory(request, say)}
