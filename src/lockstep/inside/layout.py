"""The layout of what a rank writes in place: rows of steps.bin and beside.bin, the counters of asides.bin, and the lines of logged.jsonl."""

from __future__ import annotations

import struct

PHASES = ("data", "forward", "backward", "exchange", "optimizer")
WARMUP_STEPS = 10

HEAD = struct.Struct("<qiiqqqqqqqq")
"""Of a row: step, epoch, warm-up, samples, start, five phases, total. Loss and hits follow. The step is written last, by itself."""
STEP = struct.Struct("<q")
ROW_BYTES = 96

ASIDES = struct.Struct("<qq")
"""Nanoseconds of evaluation and of checkpoints between the steps, so far."""
ASIDES_FILE = "asides.bin"

BESIDE = ("reading", "logging", "progress", "schedule", "callbacks", "collecting", "framework")
"""The parts of a step's "other" that have a name: values read out of tensors, calls of loggers, progress bars, learning-rate schedules, methods of
the user's that a framework calls, the garbage collector, and the framework's own loop."""
BESIDE_ROW = struct.Struct("<8q")
"""Of a step of an attached command: nanoseconds of each of them, and how many values were read."""
BESIDE_FILE = "beside.bin"

LOGGED_FILE = "logged.jsonl"
"""What the script has logged: in each line the step, the time, and values by name."""
