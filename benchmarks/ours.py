"""The adapter to Lockstep's command line: the only place that knows its words and its results' names."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import ContenderFailed, run
from benchmarks.rounds import Span

# Document D's job; global batch, ranks and threads are each section's own.
RECIPE = (
    "data=mnist",
    "model=mnist-convnet",
    "epochs=1",
    "seed=123",
    "shuffle=false",
    "optimizer.name=adam",
    "optimizer.lr=0.0005",
    "optimizer.weight_decay=0.0005",
)


def executable() -> str:
    """The `lockstep` of the environment that runs the benchmark."""
    return str(Path(sys.executable).parent / "lockstep")


def train(
    global_batch: int, ranks: int, threads: int, samples: int | None, core: int | None, more: tuple[str, ...] = ()
) -> Span:
    """Train one epoch by `lockstep run` in a fresh process; `train_seconds` is the training loop alone."""
    words = [*RECIPE, f"global_batch={global_batch}", f"ranks={ranks}", f"threads={threads}", *more]
    if samples is not None:
        words.append(f"train_limit={samples}")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as runs:
        output = run([executable(), "run", *words, "--runs", runs, "--json"], core, threads)
    try:
        document = json.loads(output)
        epoch = document["epochs"][-1]
        return Span(
            int(document["train_images"]),
            float(document["train_seconds"]),
            float(document["train_cpu_seconds"]),
            {
                "loss": float(epoch["train_loss"]),
                "accuracy": float(epoch["train_accuracy"]),
                "checkpoint_seconds": float(document["checkpoint_seconds"]),
            },
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ContenderFailed(f"lockstep's JSON is not as expected: {type(error).__name__} {error}") from None
