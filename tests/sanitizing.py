"""gcc's AddressSanitizer for a library that Python loads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from lockstep.machine.native_code import compiler


def sanitizer() -> str | None:
    """The sanitizer as a library that can be loaded before Python."""
    if shutil.which(compiler()) is None:
        return None
    done = subprocess.run([compiler(), "-print-file-name=libasan.so"], text=True, capture_output=True)
    path = Path(done.stdout.strip())
    return str(path.resolve()) if path.is_absolute() and path.exists() else None


def sanitized() -> dict[str, str]:
    """The environment of a process that loads such a library."""
    return os.environ | {
        "LD_PRELOAD": str(sanitizer()),
        # Python and torch keep what they have until they end.
        "ASAN_OPTIONS": "detect_leaks=0:protect_shadow_gap=0",
        "OMP_NUM_THREADS": "2",
    }
