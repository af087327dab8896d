"""Eight-bit integers: accuracy, bytes, inference by every route, and what quantization-aware training costs.

Document D's net (4 and 8 channels, MNIST) and document A's (up to 256 channels, CIFAR-10). D's is trained as published, with and without
fake quantization in turns, a seed a round; A's for a few steps only, since its times do not depend on its weights.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import ours, stats
from benchmarks.processes import ContenderFailed, last_core, run
from benchmarks.record import Clock, Measurement, Section, compare
from benchmarks.rounds import Span, interleave
from benchmarks.settings import Settings

D, A = "D's net", "A's net"
EAGER, COMPILED, ONNX_FP32 = "fp32 eager", "fp32 compiled", "onnx fp32"
THREADS = (1, 2)
TRAINING = ("shuffle=false", "optimizer.lr=0.0005", "optimizer.weight_decay=0.0005", "global_batch=32", "threads=1")
# Targets of the issue: points of accuracy, times smaller, times as long, times as fast.
QAT_POINTS, STATIC_POINTS, FILE, WEIGHTS, EPOCH, FASTER, AHEAD = 0.3, 0.5, 2.2, 3.5, 1.35, 4.5, 1.0


@dataclass(frozen=True)
class Net:
    """A net, how it is trained here, and what its inference is measured with."""

    words: tuple[str, ...]
    quick: tuple[str, ...]
    batches: tuple[int, ...]
    left_out: tuple[str, ...]
    """Routes that would take minutes more and decide nothing; `lockstep quantize --measure` has them."""
    seconds: float
    """For one size of batch, at most."""


NETS = {
    D: Net(
        ("model=mnist-convnet", "data=mnist", "epochs=3"),
        ("train_limit=3200", "test_limit=500"),
        (1, 32, 128, 1000),
        ("int8 inductor",),
        8.0,
    ),
    A: Net(
        ("model=cifar-vgg", "data=cifar10", "train_limit=320", "test_limit=500", "epochs=1"),
        ("train_limit=64", "test_limit=50"),
        (1, 32, 128),
        ("int8 inductor", "fp32 channels-last", "int8 qnnpack"),
        15.0,
    ),
}


def measure(settings: Settings) -> Section:
    title = "Int8 against fp32: documents D's and A's nets"
    section = Section("quantization", title, "images", "rate", [])
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        runs = Path(folder)
        for name, rounds in ((D, settings.repeats), (A, min(3, settings.repeats))):
            _train(section, name, rounds, runs, settings)
        if not section.valid:
            return section
        _accuracy(section, runs, [one for one in section.measurements if one.contender == _epochs(D, "fp32")])
        for name in NETS:
            _inference(section, name, runs, settings)
    return section


def _epochs(net: str, kind: str) -> str:
    return f"{net}, training, {kind}"


# training


def _train(section: Section, name: str, rounds: int, runs: Path, settings: Settings) -> None:
    """fp32 and quantization-aware in turns, each round with a seed of its own."""
    kinds = {"fp32": (), "qat": ("quantize=qat",)}
    contenders = {
        _epochs(name, kind): partial(_trained, name, kind, words, itertools.count(), runs, settings.quick)
        for kind, words in kinds.items()
    }
    outcome = interleave("quantization", contenders, rounds, settings.seed)
    _add(section, outcome.measurements)
    for contender, reason in outcome.failures.items():
        section.refuse(f"{contender} failed: {reason}")
    clocks: tuple[tuple[Clock, float | None], ...] = (("wall", EPOCH), ("cpu", None))
    for clock, target in clocks:
        found = compare(section.measurements, _epochs(name, "qat"), _epochs(name, "fp32"), "share", clock, target)
        if found:
            section.comparisons.append(found)


def _trained(net: str, kind: str, words: tuple[str, ...], numbers: Any, runs: Path, quick: bool) -> Span:
    number, chosen = next(numbers), NETS[net]
    given = [*TRAINING, *chosen.words, *(chosen.quick if quick else ()), *words, f"seed={123 + number}"]
    where = ["--runs", str(runs), "--name", f"{net[0]}-{kind}-{number}", "--json"]
    document = _json([ours.executable(), "run", *given, *where], last_core())
    details = {
        "name": f"{net[0]}-{kind}-{number}",
        "loss": float(document["train_loss"]),
        "accuracy": float(document["test_accuracy"]),
        "int8_accuracy": document.get("int8_accuracy"),
        "int8_seconds": sum(
            epoch.get("int8_convert_seconds", 0) + epoch.get("int8_eval_seconds", 0) for epoch in document["epochs"]
        ),
    }
    return Span(
        int(document["train_images"]), float(document["train_seconds"]), float(document["train_cpu_seconds"]), details
    )


def _json(words: list[str], core: int | None = None) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(run(words, core, None if core is None else 1))
        return document
    except ValueError:
        raise ContenderFailed("lockstep's answer is not JSON") from None


def _add(section: Section, measurements: list[Measurement]) -> None:
    for one in measurements:
        order = len(section.measurements) + 1
        section.measurements.append(
            Measurement(order, one.round, one.contender, one.units, one.wall_seconds, one.cpu_seconds, one.details)
        )


# accuracy and bytes


def _accuracy(section: Section, runs: Path, trained: list[Measurement]) -> None:
    """Static on every fp32 run, the others on the first; of the aware runs, what they found themselves."""
    aware = {one.round: one for one in section.measurements if one.contender == _epochs(D, "qat")}
    both = [(one, aware[one.round]) for one in trained if one.round in aware]
    static = [quantize(runs, one.details["name"], "static") for one, _ in both]
    dynamic = quantize(runs, both[0][0].details["name"], "dynamic")
    kept = quantize(runs, both[0][1].details["name"], "qat")
    of_qat = [100 * (its.details["int8_accuracy"] - one.details["accuracy"]) for one, its in both]
    of_fake = [100 * (its.details["int8_accuracy"] - its.details["accuracy"]) for _, its in both]
    of_static = [100 * (each["accuracy"]["int8"] - each["accuracy"]["fp32"]) for each in static]
    of_dynamic = 100 * (dynamic["accuracy"]["int8"] - dynamic["accuracy"]["fp32"])
    samples = static[0]["test_samples"]
    section.notes += [
        f"{D}, accuracy on {samples:,} test images, fp32: {_list([one.details['accuracy'] for one, _ in both], '.2%')}.",
        f"{D}, int8 after quantization-aware training less fp32, points: {_list(of_qat, '+.2f')} "
        f"(median {stats.median(of_qat):+.2f}; target at least {-QAT_POINTS}: {_met(stats.median(of_qat) >= -QAT_POINTS)}); "
        f"less its own fake quantization: {_list(of_fake, '+.2f')}.",
        f"{D}, int8 after static quantization less fp32, points: {_list(of_static, '+.2f')} "
        f"(target at least {-STATIC_POINTS}: {_met(min(of_static) >= -STATIC_POINTS)}); dynamic: {of_dynamic:+.2f}.",
        f"{D}, the int8 test after each epoch took {_int8_share(list(aware.values())):.1%} of the training time.",
    ]
    for what, document in (("static", static[0]), ("qat", kept), ("dynamic", dynamic)):
        section.notes.append(f"{D}, {what}: {bytes_of(document)}")
        agreement = document["agreement"]
        section.notes.append(f"{D}, {what}: answers as fp32 {agreement['int8 with fp32']:.2%}.")


def quantize(runs: Path, name: str, method: str) -> dict[str, Any]:
    return _json([ours.executable(), "quantize", name, "--method", method, "--runs", str(runs), "--json"])


def _int8_share(aware: list[Measurement]) -> float:
    return stats.median([one.details["int8_seconds"] / one.wall_seconds for one in aware])


def bytes_of(document: dict[str, Any]) -> str:
    fp32, int8 = document["bytes"]["fp32"], document["bytes"]["int8"]
    files, weights = fp32["file"] / int8["file"], fp32["weights"] / int8["weights"]
    judged = f"; targets {FILE} and {WEIGHTS}: {_met(files >= FILE)} and {_met(weights >= WEIGHTS)}"
    if document["method"] == "dynamic":  # its convolutions stay as they are
        judged = ""
    return (
        f"file {fp32['file']:,} to {int8['file']:,} bytes ({files:.2f}x smaller), weights alone {fp32['weights']:,} to "
        f"{int8['weights']:,} ({weights:.2f}x{judged})."
    )


def _list(values: list[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


def _met(yes: bool) -> str:
    return "met" if yes else "missed"


# inference


def _inference(section: Section, name: str, runs: Path, settings: Settings) -> None:
    """Every route by turns, as `lockstep quantize --measure` does it, with the raw times in the record."""
    from lockstep.deploy import timing
    from lockstep.deploy.bench import Request, routes

    net, trained = NETS[name], f"{name[0]}-fp32-0"
    if name == A:
        section.notes.append(f"{A}, static: {bytes_of(quantize(runs, trained, 'static'))}")
    chosen = [route for route in routes(compiled=True) if route not in net.left_out]
    if ONNX_FP32 not in chosen:
        section.refuse("ONNX Runtime is not here: pip install 'lockstep-bench[onnx]'")
    batches = list(net.batches[:2] if settings.quick else net.batches)
    request = Request(
        run=str(runs / trained),
        method="static",
        threads=1,
        batches=batches,
        routes=chosen,
        rounds=3 if settings.quick else 15,
        seconds=1.0 if settings.quick else net.seconds,
    )
    for threads in THREADS:
        _say(f"{name}: {len(chosen)} routes with {threads} thread(s)")
        answer = timing.start(msgspec.structs.replace(request, threads=threads))
        for route, reason in answer["failed"].items():
            section.refuse(f"{name}, {threads} thread(s), {route}: {reason}")
        for batch in batches:
            _add(section, _timed(name, threads, batch, answer))
            _compare(section, name, threads, batch, chosen)
    grown = timing.memory(request, _say, [EAGER, "int8 onednn", "onnx int8"])
    text = ", ".join(f"{row['route']} {_megabytes(row.get('growth_bytes'))}" for row in grown)
    section.notes.append(f"{name}, resident growth at batch 128, one thread: {text}.")


def _megabytes(growth: float | None) -> str:
    return "unknown" if growth is None else f"{growth / 1e6:.1f} MB"


def _say(text: str) -> None:
    print(f"[quantization] {text}", file=sys.stderr, flush=True)


def _route(net: str, threads: int, batch: int, route: str) -> str:
    return f"{net}, {threads} thread{'s' if threads > 1 else ''}, batch {batch}: {route}"


def _timed(net: str, threads: int, batch: int, answer: dict[str, Any]) -> list[Measurement]:
    walls, cpus = answer["samples"][str(batch)], answer["cpu"][str(batch)]
    return [
        Measurement(0, number, _route(net, threads, batch, route), batch, wall, cpu)
        for route in walls
        for number, (wall, cpu) in enumerate(zip(walls[route], cpus[route], strict=True), 1)
    ]


def _compare(section: Section, net: str, threads: int, batch: int, routes: list[str]) -> None:
    """The best engine against every peer; the best of ONNX Runtime's two int8 files is the peer's best."""
    named: Callable[[str], str] = partial(_route, net, threads, batch)

    def best(start: str) -> str | None:
        able = {
            route: stats.median([one.wall_seconds for one in section.measurements if one.contender == named(route)])
            for route in routes
            if route.startswith(start) and any(one.contender == named(route) for one in section.measurements)
        }
        return min(able, key=lambda route: able[route]) if able else None

    ours_, theirs = best("int8 "), best("onnx int8")
    if ours_ is None:
        return
    goal = (FASTER if batch > 1 else None) if net == A else AHEAD if batch == 128 else None
    pairs = [(EAGER, goal), (COMPILED, None), (ONNX_FP32, None), (theirs or "", AHEAD if net == A else None)]
    for peer, target in pairs:
        found = compare(section.measurements, named(ours_), named(peer), "speed", "wall", target)
        if found:
            section.comparisons.append(found)
