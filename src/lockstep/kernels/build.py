"""What the fused kernels are compiled from, and for which kinds of processor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.machine.cpu import allowed_flags
from lockstep.machine.facts import rank_environment
from lockstep.machine.native_code import Library, build
from lockstep.run import KERNELS_OF_RUN

SOURCES = Path(__file__).with_name("csrc")
# No -ffast-math: it would change what becomes of NaN and infinity.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fvisibility=hidden")


@dataclass(frozen=True)
class Target:
    """One instruction set that the sources are compiled for."""

    lanes: int
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """What the processor has to have, by the names of Linux."""
    real: str = "float"

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.flags, f"-DREAL={self.real}", f"-DLANES={self.lanes}")


# The best first.
TARGETS = {
    "avx512": Target(
        16,
        ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
        ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    ),
    "avx2": Target(8, ("-mavx2", "-mfma"), ("avx2", "fma")),
    # What the compiler makes of four lanes without being told more: SSE2, or NEON with its 32 registers.
    "portable": Target(4),
    # For checking only.
    "double": Target(2, real="double"),
}


def able() -> list[str]:
    """The targets that this processor says it can run and that nobody has forbidden, the best first. The only place in this room
    that asks what the processor has; whether it is true is tried (trial.py)."""
    # A rank has its launcher's environment, cap included: what is found out while the run goes on must not part its ranks.
    cap = {} if os.environ.get(KERNELS_OF_RUN) else rank_environment()
    flags = allowed_flags({**os.environ, **cap})
    return [name for name, target in TARGETS.items() if flags >= set(target.needs) and name != "double"]


def library(name: str) -> Path:
    """The library for one target, compiled now if it is not there yet."""
    return build(sources_for(name))


@cache
def sources_for(name: str) -> Library:
    flags = (*FLAGS, *TARGETS[name].words)
    sources, headers = (tuple(sorted(SOURCES.glob(pattern))) for pattern in ("*.cpp", "*.h"))
    return Library(name, "the fused kernels", sources, flags, headers)


def fingerprint(name: str) -> str:
    """Of these sources and how they are compiled for a target."""
    return sources_for(name).path().stem
