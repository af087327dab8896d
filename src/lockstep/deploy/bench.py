"""Times and memory of a model by several routes, in a process of its own: `python -m lockstep.deploy.bench REQUEST.json`.

Threads are the process's. Routes take turns within a round, so a machine that changes its speed changes it for all of them alike. Everything is warm: each route has
answered a batch of that size before. Answers one JSON document on stdout.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lockstep.data.inputs import leaves
from lockstep.deploy import engines, files
from lockstep.deploy.subject import CPU, Subject, load
from lockstep.measure.memory import MemoryMeter
from lockstep.quantize import convert
from lockstep.quantize.scheme import Scheme
from lockstep.rounds import LINGER_S, calls_in, rounds
from lockstep.run import Run

# A sample of a route lasts at least this long, in as many calls as that takes.
SAMPLE_S = 0.01
LEAST_ROUNDS = 3
MEMORY_PASSES = 5

Call = Callable[[Tensor], Any]


class Request(msgspec.Struct, kw_only=True):
    run: str
    method: str
    threads: int
    batches: list[int]
    routes: list[str]
    data_root: str | None = None
    rounds: int = 15
    seconds: float = 20.0
    """The time limit for one batch size, once there are three rounds."""
    memory: bool = False
    """Measure the growth of resident memory instead; one route and one size, since memory that was used once is kept."""


def routes(compiled: bool) -> list[str]:
    """All that can be measured here, the one that the others are compared with first."""
    found = ["fp32 eager", "fp32 channels-last"]
    if compiled and "inductor" not in engines.missing():
        found.append("fp32 compiled")
    found += [f"int8 {name}" for name in engines.available() if compiled or name != "inductor"]
    if not files.onnx_missing():
        found += ["onnx fp32", "onnx int8", "onnx int8 by its own quantizer"]
    return found


def main(path: Path) -> dict[str, Any]:
    request = msgspec.json.decode(path.read_bytes(), type=Request)
    torch.set_num_threads(request.threads)
    subject = load(Run.open(Path(request.run)), Path(request.data_root) if request.data_root else None)
    made: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for name in request.routes:
        try:
            made[name] = _route(name, subject, request)
        except Exception as error:  # each engine has kinds of its own; the others are worth having
            failed[name] = _reason(error)
    if request.memory:
        growth = {name: _growth(call, subject, request.batches[0]) for name, call in made.items()}
        return {"growth_bytes": growth, "failed": failed}
    times = {str(batch): _times(made, subject, batch, request, failed) for batch in request.batches}
    return {
        "samples": {
            batch: {name: [wall for wall, _ in pairs] for name, pairs in of.items()} for batch, of in times.items()
        },
        "cpu": {batch: {name: [cpu for _, cpu in pairs] for name, pairs in of.items()} for batch, of in times.items()},
        "failed": failed,
    }


def _reason(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def images_of(subject: Subject, count: int) -> Tensor:
    """The first N test images, repeated from the start if there are too few, in contiguous memory."""
    have = min(count, subject.spec.plan.test_samples)
    images = leaves(subject.test.take(0, have)[0])[0]
    return images.repeat(-(-count // have), 1, 1, 1)[:count].contiguous()


def _times(
    made: dict[str, Call], subject: Subject, batch: int, request: Request, failed: dict[str, str]
) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of one call, round by round."""
    images = images_of(subject, batch)
    calls: dict[str, int] = {}
    with torch.no_grad():
        for name in list(made):
            try:
                calls[name] = _calls(made[name], images)
            except Exception as error:  # a compiler says what it cannot do at the first call
                failed[name] = _reason(error)
                del made[name]
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for order in rounds(list(made), request.rounds, least=LEAST_ROUNDS, seconds=request.seconds):
            for name in order:
                if request.threads > 1:  # ONNX Runtime has threads of its own, which linger too
                    sleep(LINGER_S)
                    made[name](images)
                start, cpu = perf_counter(), process_time()
                for _ in range(calls[name]):
                    made[name](images)
                wall, cpu = perf_counter() - start, process_time() - cpu
                samples[name].append((wall / calls[name], cpu / calls[name]))
    return samples


def _calls(call: Call, images: Tensor) -> int:
    """Warm up, and see how many calls make a sample."""
    call(images)
    start = perf_counter()
    call(images)
    return calls_in(SAMPLE_S, perf_counter() - start)


def _growth(call: Call, subject: Subject, batch: int) -> int | None:
    small, images = images_of(subject, 1), images_of(subject, batch)
    with torch.no_grad():
        call(small)
        # Loading has left free memory behind, which would hide what the batch needs.
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        meter = MemoryMeter(CPU)
        for _ in range(MEMORY_PASSES):
            call(images)
    return meter.growth_bytes()


def _route(name: str, subject: Subject, request: Request) -> Call:
    kind, _, rest = name.partition(" ")
    where = subject.run.folder / files.FOLDER / request.method
    if kind == "int8":
        program = torch.export.load(where / files.PROGRAM)
        return engines.build(rest, program.module(check_guards=False), images_of(subject, 512))
    if kind == "onnx":
        from lockstep.deploy import onnx_runtime

        return onnx_runtime.session(rest, where, subject, request.threads)
    return _float_route(rest, fp32_of(subject))


def fp32_of(subject: Subject) -> nn.Module:
    """The run's model in fp32 as people deploy it: without fake layers, batch norm folded."""
    return convert.prepare(subject.model, subject.example, "static", Scheme()).model


def _float_route(name: str, model: nn.Module) -> Call:
    if name == "channels-last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return lambda images: model(images.contiguous(memory_format=torch.channels_last))
    model = model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return model if name == "eager" else engines.compiled(model)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m lockstep.deploy.bench REQUEST.json")
    with redirect_stdout(sys.stderr):
        answer = main(Path(sys.argv[1]))
    print(json.dumps(answer))
