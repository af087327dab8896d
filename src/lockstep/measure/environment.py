"""What a run ran on: a fingerprint of the machine and the software, with and without torch."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.machine import facts
from lockstep.machine.cores import cores
from lockstep.machine.cpu import clock_mhz, cpu_model
from lockstep.machine.formats import cap_line, works_line
from lockstep.machine.quota import ROOT, cpu_quota

# Packages whose distribution has another name.
DISTRIBUTIONS = {"lockstep": "lockstep-bench"}


def version_of(package: str) -> str | None:
    try:
        return metadata.version(DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return None


def memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def machine(root: Path = ROOT) -> dict[str, Any]:
    """Everything that is known without torch. `root` is where control groups are looked for."""
    known = facts.known()
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "clock_mhz": clock_mhz(),
        "cores_usable": cores(root),
        "cpu_quota": cpu_quota(root),
        "cores_machine": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "number_formats": works_line(known) if known else None,
        "instruction_cap": cap_line(known),
        "instruction_settings": {name: os.environ[name] for name in facts.VARIABLES if name in os.environ},
        "load_1min": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": sys.version.split()[0],
        "lockstep": version_of("lockstep"),
        "torch": version_of("torch"),
        "numpy": version_of("numpy"),
    }


def fingerprint(device: Any) -> dict[str, Any]:
    """The machine as one rank sees it, with what torch knows."""
    import torch

    seen = machine()
    seen |= {
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        seen |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return seen
