"""What the system says about the processor: its name, and the instructions that it advertises. Whether they work is tried elsewhere."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# The instructions that multiply numbers of each format, by the names of Linux.
INSTRUCTIONS = {
    "bf16": {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16", "avx_ne_convert": "AVX-NE-CONVERT"},
    "fp16": {"avx512_fp16": "AVX512-FP16", "amx_fp16": "AMX-FP16"},
    "int8": {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX-INT8"},
}
# The values of ONEDNN_MAX_CPU_ISA from low to high, each with the instructions that it adds.
_AVX2_EXTRAS = ("avx_vnni", "avx_ne_convert")
ISAS: dict[str, tuple[str, ...]] = {
    "SSE41": (),
    "AVX": (),
    "AVX2": (),
    "AVX2_VNNI": ("avx_vnni",),
    "AVX2_VNNI_2": _AVX2_EXTRAS,
    "AVX512_CORE": (),
    "AVX512_CORE_VNNI": ("avx512_vnni",),
    "AVX512_CORE_BF16": ("avx512_vnni", "avx512_bf16"),
    "AVX512_CORE_FP16": ("avx512_vnni", "avx512_bf16", "avx512_fp16", *_AVX2_EXTRAS),
}


@cache
def _cpuinfo() -> tuple[str, ...]:
    try:
        return tuple(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return ()


def cpu_model() -> str:
    """The processor's name in the system's words."""
    for line in _cpuinfo():
        if line.startswith(("model name", "Hardware", "cpu model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def clock_mhz() -> float | None:
    """The first core's clock, as the system states it now."""
    for line in _cpuinfo():
        if line.startswith("cpu MHz"):
            return float(line.partition(":")[2])
    return None


def cpu_flags() -> frozenset[str]:
    """The instructions that the processor advertises, by the names of Linux."""
    return frozenset(next((line for line in _cpuinfo() if line.startswith("flags")), "").partition(":")[2].split())


def allowed_flags(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Those of them that oneDNN may use under ONEDNN_MAX_CPU_ISA, where that is set."""
    cap = environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "")).upper()
    if cap not in ISAS:
        return cpu_flags()
    capped = {flag for names in INSTRUCTIONS.values() for flag in names} - set(ISAS[cap])
    return cpu_flags() - capped


def stolen_ticks() -> tuple[int, int]:
    """Time that the hypervisor gave to others, and all time, since the machine started, in clock ticks of all cores."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return (fields[7] if len(fields) > 7 else 0), sum(fields)
