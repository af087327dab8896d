"""`torchrun`: PyTorch's own launcher, on this host or on several. One command per host."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from lockstep.errors import InputError
from lockstep.launch.base import Start, default_environment, thread_environment
from lockstep.placement import Placement, ranks_per_host, split_address
from lockstep.run import Spec


def arguments(spec: Spec, folder: Path, host_index: int) -> list[str]:
    """What follows the word `torchrun`."""
    placement = spec.placement
    words = [
        f"--nnodes={placement.hosts}",
        f"--nproc-per-node={ranks_per_host(placement)}",
        f"--max-restarts={placement.max_restarts}",
    ]
    if placement.rendezvous is None:
        words.append("--standalone")
    elif placement.max_restarts:
        # Only torchrun's own rendezvous can bring several hosts together again. It hands out ranks as hosts arrive.
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={placement.rendezvous}", f"--rdzv-id={spec.id}"]
    else:
        host, port = split_address(placement.rendezvous)
        words += [f"--node-rank={host_index}", f"--master-addr={host}", f"--master-port={port}"]
    return [*words, "-m", "lockstep.worker", str(folder)]


def starts(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    """torchrun itself, inside a small agent of ours that keeps its failure report (launch/agent.py)."""
    argv = [
        sys.executable,
        "-m",
        "lockstep.launch.agent",
        str(folder),
        str(host_index),
        *arguments(spec, folder, host_index),
    ]
    host = f" of host {host_index}" if spec.placement.hosts > 1 else ""
    environment, defaults = thread_environment(spec.placement), default_environment(spec.placement)
    return [Start(argv, environment, defaults, what=f"torchrun's agent{host}")]


def check_meeting_point(placement: Placement, first_host: bool) -> None:
    """Find out now that the meeting point is taken, or that there is no such host, not after minutes of waiting for ranks."""
    if placement.launcher != "torchrun" or placement.rendezvous is None:
        return
    host, port = split_address(placement.rendezvous)
    try:
        if not first_host:
            socket.getaddrinfo(host.strip("[]"), port)
            return
        # No SO_REUSEADDR: a port that is in use must show.
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host.strip("[]"), port))
    except socket.gaierror:
        raise InputError(f"rendezvous={host}:{port}: there is no host '{host}'") from None
    except OSError as error:
        hint = (
            "choose another port" if error.errno == 98 else "it must be an address of the first host (--host-index 0)"
        )
        raise InputError(f"rendezvous={host}:{port} cannot be used: {error.strerror}; {hint}") from None
