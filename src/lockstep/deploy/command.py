"""What `lockstep quantize` does: load, convert, test, write, measure. Returns one document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lockstep.deploy import bench, engines, files, graph, onnx_runtime, published, timing
from lockstep.deploy.subject import Answers, Subject, ask, load
from lockstep.deploy.tune import fine_tune
from lockstep.errors import InputError, first_line
from lockstep.machine.cpu import INSTRUCTIONS, allowed_flags
from lockstep.quantize import convert
from lockstep.quantize.calibrate import calibrate
from lockstep.quantize.convert import Method, Prepared
from lockstep.quantize.layers import use_kernels
from lockstep.quantize.scheme import Scheme
from lockstep.quantize.training import SCHEME
from lockstep.run import Run, write_atomic
from lockstep.units import counted

CALIBRATION = 1024
# Batches of 128, as document D's test had them.
PROFILE_BATCH, PROFILE_PASSES = 128, 10


@dataclass
class Job:
    """What the user asks for."""

    method: Method
    engine: str = engines.DEFAULT
    scheme: Scheme = SCHEME
    calibrate: int | None = None
    """Images for --method static; unstated, 1,024 or as many as the run trained on."""
    epochs: int = 1
    """--method qat of a run that was trained without it: N more epochs."""
    sensitivity: bool = False
    measure: bool = False
    compiled: bool = True
    profile: bool = False
    onnx: bool = True
    """Write the ONNX files, where the packages for them are installed."""
    batches: list[int] = field(default_factory=lambda: [1, 32, 128, 1000])
    threads: list[int] = field(default_factory=lambda: [1, 2])
    data_root: str | None = None


def quantize(run: Run, job: Job, say: Callable[[str], None]) -> dict[str, Any]:
    engines.check(job.engine)
    if job.method != "static" and job.scheme.ranges != "min-max":
        raise InputError(f"--ranges is about calibration images, and --method {job.method} has none: leave it out")
    subject = load(run, job.data_root)
    if job.method == "qat" and subject.qat and job.scheme != SCHEME:
        raise InputError(
            "--weights, --activations, --bits: this run was trained with quantize=qat, which has chosen them: leave them out"
        )
    begin = perf_counter()
    original = bench.fp32_of(subject)
    fp32 = ask(original, subject)
    # A run's own ranges, or the training that makes them, before anything is taken apart.
    tuned = job.method == "qat" and subject.qat is None
    if tuned:
        say(
            f"fine-tuning with fake quantization: {counted(job.epochs, 'epoch')} of {subject.spec.plan.train_samples} images"
        )
        fine_tune(subject, job.epochs, job.scheme)
    prepared = _prepared(subject, job)
    int8_model = convert.convert(prepared)
    fake = ask(subject.model if job.method == "qat" else int8_model, subject)
    where = files.folder(run, job.method)
    program, problem = _program(int8_model, subject.example)
    call, engine = _on_engine(job.engine, program, int8_model, subject)
    say(f"testing on {engine}")
    int8 = ask(call, subject)
    document: dict[str, Any] = {
        "run": str(run.folder),
        "method": job.method,
        "engine": engine,
        "engines": {"available": engines.available(), "missing": engines.missing()},
        "vnni": _vnni(),
        "scheme": msgspec.to_builtins(prepared.scheme),
        "calibration": _calibration(job, subject, tuned),
        "layers": [asdict(row) for row in prepared.rows],
        "accuracy": {"fp32": fp32.accuracy, "fake": fake.accuracy, "int8": int8.accuracy},
        "loss": {"fp32": fp32.loss, "fake": fake.loss, "int8": int8.loss},
        "agreement": {"int8 with fp32": int8.agreement(fp32), "int8 with fake": int8.agreement(fake)},
        "test_samples": int8.samples,
        "notes": [text for text in (problem, *_notes(job, prepared, program)) if text],
        "seconds": perf_counter() - begin,
    }
    document |= _write(where, subject, original, int8_model, program, job.onnx, document["notes"])
    if files.ONNX in document["files"]:
        answers = ask(onnx_runtime.predict(where / files.ONNX, torch.get_num_threads()), subject)
        document["accuracy"]["int8 in ONNX Runtime"] = answers.accuracy
        document["agreement"]["ONNX Runtime with int8"] = answers.agreement(int8)
    if job.sensitivity:
        document["sensitivity"] = sensitivity(prepared, subject, fp32, say)
    if job.profile:
        document["operators"] = {"fp32": _profile(original, subject), "int8": _profile(call, subject)}
    if job.measure:
        document |= _measure(job, subject, program, say)
    document["published"] = published.beside(document, subject.spec.recipe)
    write_atomic(where / files.REPORT, document)
    return document


def _vnni() -> list[str]:
    """The CPU's instructions that add products of bytes in 32 bits."""
    return sorted(allowed_flags() & set(INSTRUCTIONS["int8"]))


def _notes(job: Job, prepared: Prepared, program: torch.export.ExportedProgram | None) -> Iterator[str]:
    """What the figures do not say by themselves."""
    left = [row for row in prepared.rows if row.parameters and not row.quantized and not row.why.startswith("folded")]
    if left and job.method != "dynamic":
        names = ", ".join(f"{row.layer} ({row.kind})" for row in left)
        yield f"a part is quantized only; still in fp32: {names}"
    floats = graph.in_floats(program.module(check_guards=False)) if program is not None else []
    if floats:
        yield f"computed in fp32 between the layers: {', '.join(floats)}"
    if prepared.scheme.bits == 8 and not _vnni():
        yield "this CPU has no VNNI: with --bits 8, ONNX Runtime cuts off sums of products (docs/quantization.md); the engines here do not"
    if job.profile and job.engine == "qnnpack":
        yield (
            "torch's profiler does not see qnnpack give back the memory of its tensors, so its memory column is not what was needed at once; "
            "--measure measures resident memory"
        )


def _prepared(subject: Subject, job: Job) -> Prepared:
    prepared = convert.prepare(subject.model, subject.example, job.method, job.scheme)
    if job.method == "static":
        calibrate(prepared, partial(subject.calibration, _images(job, subject)))
    elif job.method == "qat":
        prepared.keep_ranged()
    convert.leave_out_broken(prepared, subject.example)
    return prepared


def _images(job: Job, subject: Subject) -> int:
    limit = subject.spec.plan.train_samples
    if job.calibrate is None:
        return min(CALIBRATION, limit)
    if job.calibrate > limit:
        raise InputError(f"--calibrate {job.calibrate}: the run trained on {limit} images; choose at most that many")
    return job.calibrate


def _calibration(job: Job, subject: Subject, tuned: bool) -> str:
    data = f"{subject.spec.recipe.data}'s training set"
    if job.method == "static":
        ranges = "" if job.scheme.ranges == "min-max" else f"; ranges by {job.scheme.ranges}"
        return (
            f"{_images(job, subject)} images of {data}, in the order of the first epoch, without augmentation{ranges}"
        )
    if job.method == "dynamic":
        return "none: the range of each batch is taken when it comes"
    return (
        f"{counted(job.epochs, 'more epoch')} on {data}, ranges in training"
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
            notes.append(f"no ONNX file: {', '.join(lacking)} not installed; pip install 'lockstep-bench[onnx]'")
        else:
            float_program = graph.exported(original, subject.example)
            for name, each in ((files.ONNX, program), (files.ONNX_FP32, float_program)):
                try:
                    files.write_onnx(where, name, each)
                    written.append(name)
                except Exception as error:  # the exporter raises many kinds
                    notes.append(f"no {name}: {first_line(error)}")
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
    job: Job, subject: Subject, program: torch.export.ExportedProgram | None, say: Callable[[str], None]
) -> dict[str, Any]:
    if program is None:
        raise InputError("--measure needs the exported file, and torch.export cannot follow this model: leave it out")
    request = bench.Request(
        run=str(subject.run.folder.absolute()),
        method=job.method,
        threads=1,
        batches=job.batches,
        routes=[],
        data_root=job.data_root,
    )
    return {"timing": timing.measure(request, job.threads, job.compiled, say), "memory": timing.memory(request, say)}
