"""Whether this machine has a usable GPU, judged without importing torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def cuda_present() -> bool:
    """There is a device node, and torch was built for CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    library = Path(spec.submodule_search_locations[0]) / "lib" / "libtorch_cuda.so"
    return library.exists() and Path("/dev/nvidiactl").exists()
