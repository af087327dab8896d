"""Which number formats this machine computes in hardware, found out without torch: a run says so before it starts."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

from lockstep.placement import Placement

# The instructions that multiply numbers of each format, by the names of Linux.
_FLAGS = {
    "bf16": {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16", "avx_ne_convert": "AVX-NE-CONVERT"},
    "fp16": {"avx512_fp16": "AVX512-FP16", "amx_fp16": "AMX-FP16"},
}


@cache
def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def cpu_support() -> dict[str, list[str]]:
    """Of each format the CPU's instructions for it; none means that it is emulated through fp32, which costs time."""
    return {kind: [name for flag, name in flags.items() if flag in cpu_flags()] for kind, flags in _FLAGS.items()}


def cuda_capability() -> str | None:
    """The first GPU's compute capability, from its driver's own tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    words = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.split("\n")[0].strip() or None


def precision_line(precision: str, placement: Placement) -> str:
    """One line on what a 16-bit format is on this hardware."""
    kind = precision.removeprefix("pure-")
    if placement.launcher == "slurm":
        return f"precision {precision}: what the cluster's nodes support is not known here"
    if placement.device == "cuda":
        capability = cuda_capability() or "unknown"
        least = {"bf16": "8.0", "fp16": "7.0"}[kind]
        return f"precision {precision}: CUDA capability {capability} (tensor cores for {kind} from {least} on)"
    found = cpu_support()[kind]
    if found:
        return f"precision {precision}: this CPU has {', '.join(found)}"
    missing = " nor ".join(_FLAGS[kind].values())
    return f"precision {precision}: this CPU has neither {missing}: {kind} is computed through fp32, and will be slower than it"
