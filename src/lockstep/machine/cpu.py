"""What the system says about the processor: its name and kind, and the instructions that it advertises. Whether they work is tried elsewhere."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lockstep.process import stat_fields

TICKS_S = os.sysconf("SC_CLK_TCK")
"""In this unit the system counts what processors do."""
# The instructions that multiply numbers of each format, by the names of Linux.
INSTRUCTIONS = {
    "bf16": {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16", "avx_ne_convert": "AVX-NE-CONVERT"},
    "fp16": {"avx512_fp16": "AVX512-FP16", "amx_fp16": "AMX-FP16"},
    "int8": {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX-INT8"},
}
# What tells kinds of processors apart, on x86 and on ARM, and the words for it.
KIND = {"cpu family": "family", "model": "model", "CPU implementer": "implementer", "CPU part": "part"}
# A name with one of these is that of a single kind: "AMD EPYC 7763", but not "AMD EPYC" or "Intel(R) Xeon(R) CPU @ 2.20GHz".
PART_NUMBER = re.compile(r"\d{3}")
_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX2_EXTRAS = ("avx_vnni", "avx_ne_convert")
# The values of ONEDNN_MAX_CPU_ISA from low to high, each with what it allows of the instructions that one of them allows.
ISAS: dict[str, tuple[str, ...]] = {
    "SSE41": (),
    "AVX": (),
    "AVX2": _AVX2,
    "AVX2_VNNI": (*_AVX2, "avx_vnni"),
    "AVX2_VNNI_2": (*_AVX2, *_AVX2_EXTRAS),
    "AVX512_CORE": _AVX512,
    "AVX512_CORE_VNNI": (*_AVX512, "avx512_vnni"),
    "AVX512_CORE_BF16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "AVX512_CORE_FP16": (*_AVX512, "avx512_vnni", "avx512_bf16", "avx512_fp16", *_AVX2_EXTRAS),
}
# The same for ATEN_CPU_CAPABILITY, which is about PyTorch's own loops: it says nothing of the formats' instructions.
CAPABILITIES: dict[str, tuple[str, ...]] = {"default": (), "avx2": _AVX2}


@cache
def _cpuinfo() -> tuple[str, ...]:
    try:
        return tuple(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return ()


def cpu_model() -> str:
    """The processor's name in the system's words, with its family and model where it may be the name of several kinds.

    What was measured is kept and compared by it, and a virtual machine says "AMD EPYC" of three generations.
    """
    first: dict[str, str] = {}
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    names = (first[key] for key in ("model name", "Hardware", "cpu model") if first.get(key))
    name = next(names, "") or platform.processor() or platform.machine()
    kind = ", ".join(f"{word} {first[key]}" for key, word in KIND.items() if first.get(key))
    return f"{name} ({kind})" if kind and not PART_NUMBER.search(name) else name


def another_cpu(there: str, here: str) -> bool:
    """Whether two names are known to be of two kinds. One that was kept before names had their kind may be of any: "AMD EPYC"."""
    return there != here and not here.startswith(f"{there} (")


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
    """Those of them that may be used under ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY, where these are set."""
    flags = cpu_flags()
    cap = environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "")).upper()
    if cap in ISAS:
        formats = {flag for names in INSTRUCTIONS.values() for flag in names}
        flags -= {*_AVX512, *formats} - set(ISAS[cap])
    capability = environment.get("ATEN_CPU_CAPABILITY")
    if capability in CAPABILITIES:
        flags -= set(_AVX512) - set(CAPABILITIES[capability])
    return flags


class Ticks(NamedTuple):
    """Time of all cores since the machine started, in clock ticks."""

    busy: int
    stolen: int
    """What the hypervisor gave to others."""
    total: int


def ticks() -> Ticks:
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _idle, _iowait, interrupts, soft_interrupts, stolen = fields
    except (OSError, ValueError):
        return Ticks(0, 0, 0)
    return Ticks(user + nice + system + interrupts + soft_interrupts, stolen, sum(fields))


def runnable() -> int | None:
    """Tasks of this machine that run or could run at this moment, this one included; None where the system does not count them."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("procs_running "))
    except (OSError, IndexError, ValueError, StopIteration):
        return None


def delayed_seconds() -> float | None:
    """Seconds that this thread could have run and did not get a processor; None where the system does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


def waited_seconds() -> float:
    """Seconds that threads of this process could have run and did not get a processor; 0 where the system does not count them."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, IndexError, ValueError):
            total += int(path.read_text().split()[1])
    return total / 1e9


def children_seconds() -> float:
    """Processor seconds of the processes that this one has started (a loader's workers), and of theirs that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            total += sum(seconds_of(int(child)) for child in path.read_text().split())
    return total


def seconds_of(pid: int) -> float:
    """Processor seconds of a process, and of those that it started and that have ended; 0 where it is gone."""
    return sum(map(int, stat_fields(pid)[11:15])) / TICKS_S
