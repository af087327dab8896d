"""The layout of what a rank writes in place: rows of steps.bin, and the counters of asides.bin. measure/records.py reads both."""

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
