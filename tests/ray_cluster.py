"""A private Ray cluster of two nodes on loopback: two `ray start`, each with one core, in a temporary folder and on a port of its own.

Both nodes are this machine, so they share its cores and its files.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

START_S = 150.0


def missing() -> str | None:
    """Why there is no Ray here, or None."""
    return None if find_spec("ray") else "Ray is not installed: pip install 'lockstep-bench[ray]'"


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{_free_port()}"
        # A secret for this cluster alone; left to itself, Ray keeps one in the home folder.
        self.environment = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_raylet_start_wait_time_s": "120",
        }
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        port = self.address.rpartition(":")[2]
        temporary = ["--temp-dir", str(self.folder / "ray")]
        self._node("head", "--head", "--port", port, "--include-dashboard=false", *temporary)
        self._node("second", "--address", self.address)

    def _node(self, name: str, *words: str) -> None:
        log = self.folder / f"{name}.log"
        common = ["--num-cpus", "1", "--node-ip-address", "127.0.0.1", "--object-store-memory", "80000000", "--block"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *common],
                env={**os.environ, **self.environment},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._nodes.append(process)
        until = time.monotonic() + START_S
        while b"block forever" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"no Ray node: {log.read_text()}")
            time.sleep(0.2)

    def stop(self) -> None:
        for process in reversed(self._nodes):
            process.send_signal(signal.SIGTERM)
        for process in self._nodes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def cluster() -> Iterator[Cluster]:
    """In /tmp: the names of Ray's sockets are long, and the system allows them 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="lsr-"))
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)
