"""What torch's compiler, Inductor, needs here: a C++ compiler, and a folder of its own for each setting of instruction sets."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lockstep.errors import InputError
from lockstep.machine import facts
from lockstep.machine.cache import cache_folder

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def has_compiler() -> bool:
    """Whether Inductor finds one: it asks for CXX, else for g++ alone."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def choose_folder() -> None:
    """To be called before anything is compiled: a folder for this processor and these instruction settings, in the folder that the user has
    set or in `inductor` next to the data cache.

    Inductor looks for code that it has written before by a key without ATEN_CPU_CAPABILITY. So in one folder for all it takes code that was
    written for AVX512 and compiles it for AVX2, which computes wrong numbers; or for less, which fails; or code without vectors, which is slow.
    """
    around, name = Path(os.environ.get(FOLDER) or cache_folder().parent / "inductor"), facts.path().stem
    if around.name == name:
        return  # a process that started this one has chosen
    chosen = around / name
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{chosen} cannot be written ({error.strerror}): set LOCKSTEP_DATA or {FOLDER}") from None
    os.environ[FOLDER] = str(chosen)
