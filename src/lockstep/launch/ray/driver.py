"""Runs the ranks as tasks of Ray, and ends with them: `python -m lockstep.launch.ray.driver RUN_DIR`.

A host is one bundle of a placement group, with the cores of all its ranks, and no two bundles share a node: so each host has as many ranks as
were planned, which bundles of single ranks would leave to Ray. A task starts what every launcher starts, and waits for it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.backends.ranks import Rank, environment_for
from lockstep.errors import InputError, RunFailed
from lockstep.launch.base import monitor_argv
from lockstep.measure.recorder import write_failure
from lockstep.placement import Placement, ranks_per_host, split_address
from lockstep.process import PARENT, die_with_parent, end_now
from lockstep.run import Run

# A session's sockets have long names, and the system allows them 107 characters: a folder for all of them must be short.
FOLDER = "lockstep-ray-"
# Nothing of a run goes through Ray's store of objects. This is the least that it takes.
STORE_BYTES = 80 << 20
# After the first failure the other ranks notice within a moment and write their failure reports; then they are ended.
GRACE_S = 3.0
LOOK_S = 0.2
ANSWER_S = 5.0
# Nothing is told to anybody outside.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
# Of a Ray of our own. It listens on loopback only where it believes that it can be no cluster (seen in 2.60: by any other setting it listens to
# all). Its memory monitor ends tasks by a threshold of the machine, which no other launcher has. A busy machine takes long to start it.
OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_raylet_start_wait_time_s": "120",
}


def run_rank(argv: list[str], environment: dict[str, str], folder: str, log: str) -> int:
    """What a task does, on whichever node: it knows nothing of Lockstep, which only the process that it starts imports."""
    import subprocess

    with open(log, "ab") as file:  # noqa: PTH123
        return subprocess.call(
            argv, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )


def meeting_point() -> tuple[str, int]:
    """An address of the first host, and a port that is free there now."""
    import socket

    import ray

    address = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        return address, int(probe.getsockname()[1])


@contextmanager
def cluster(placement: Placement) -> Iterator[None]:
    """Connected to Ray: to the one that is named, or to one of our own that is gone afterwards."""
    address = placement.ray.address
    os.environ.update(QUIET if address is not None else {**QUIET, **OWN, **_secret()})
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    if address is not None:
        _check_answers(address)
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(f"ray.address={address}: {_first_line(error)}") from None
        try:
            yield
        finally:
            ray.shutdown()
        return
    _sweep()
    folder = Path(tempfile.gettempdir()) / f"{FOLDER}{os.getpid()}"
    try:
        ray.init(
            address="local",
            num_cpus=placement.ranks * (placement.threads or 1),
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
            **quiet,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _secret() -> dict[str, str]:
    """Other users of this machine can reach loopback too. Left to itself, Ray would write its secret into the home folder, and keep it there."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _check_answers(address: str) -> None:
    """Ray itself would look for a minute."""
    if address == "auto":
        return
    host, port = split_address(address, "ray.address")
    try:
        socket.create_connection((host.strip("[]"), port), ANSWER_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"ray.address={address}: no Ray cluster answers there: {reason}; 'ray status' shows one"
        ) from None


def _sweep() -> None:
    """What a driver that was killed outright has left."""
    for stale in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        pid = stale.name.removeprefix(FOLDER)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(stale, ignore_errors=True)


def drive(run: Run, placement: Placement) -> int:
    """Start all ranks, and wait for them. Returns the exit code."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    local, threads = ranks_per_host(placement), placement.threads or 1
    group = _places(placement, local * threads)
    task = ray.remote(max_retries=0, num_cpus=threads)

    def on(host: int) -> Any:
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=host)

    environment = {name: value for name, value in os.environ.items() if name != PARENT and not name.startswith("RAY_")}
    if placement.hosts > 1:
        address, port = ray.get(task(meeting_point).options(scheduling_strategy=on(0)).remote())
        environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    ranks = {}
    for rank in range(placement.ranks):
        place = Rank(rank, placement.ranks, rank % local, local)
        log = run.rank_folder(rank) / "launcher.log"
        started = task(run_rank).options(scheduling_strategy=on(rank // local), name=f"rank {rank}")
        words = (monitor_argv(run.folder), environment | environment_for(place), str(Path.cwd()), str(log))
        ranks[started.remote(*words)] = rank
    return _wait(run, ranks)


def _places(placement: Placement, cores: int) -> Any:
    """One bundle a host, as soon as the cluster has room for all of them."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= cores]
    if len(nodes) < placement.hosts:
        raise InputError(
            f"launcher=ray: hosts={placement.hosts} with {cores} cores each, but Ray has {len(nodes)} such nodes "
            "('ray status' shows what it has): change hosts, ranks or threads"
        )
    group = ray.util.placement_group([{"CPU": float(cores)}] * placement.hosts, strategy="STRICT_SPREAD")
    began = time.monotonic()
    while not group.wait(LOOK_S):
        if time.monotonic() - began > ANSWER_S:
            began = time.monotonic()
            print(f"waiting for {placement.hosts} nodes with {cores} free cores", flush=True)
    return group


def _wait(run: Run, ranks: dict[Any, int]) -> int:
    import ray

    left, failed_at = dict(ranks), None
    while left:
        done, _ = ray.wait(list(left), num_returns=1, timeout=LOOK_S)
        for task in done:
            if _failed(run, task, left.pop(task)) and failed_at is None:
                failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            break
    for task in left:
        ray.cancel(task, force=True)
    return 0 if failed_at is None else RunFailed.exit_code


def _failed(run: Run, task: Any, rank: int) -> bool:
    """Whether a rank has ended badly; what only Ray knows of it is written down."""
    import ray

    try:
        return bool(ray.get(task))
    except (ray.exceptions.RayError, OSError) as error:
        if not (run.rank_folder(rank) / "failure.json").exists():
            message = f"Ray lost its process: {_first_line(error)}"
            write_failure(run, _account(rank, message, RunFailed.exit_code))
        return True


def _account(rank: int, message: str, code: int) -> dict[str, Any]:
    return {"rank": rank, "kind": "", "message": message, "exit_code": code, "consequence": False, "step": 0}


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _stop(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    # SIGTERM, for then Ray is ended in order; its own processes end with us if we are killed outright.
    die_with_parent(sign=signal.SIGTERM)
    run = Run.open(Path(sys.argv[1]))
    placement = run.spec().placement
    code = RunFailed.exit_code
    try:
        signal.signal(signal.SIGTERM, _stop)
        with cluster(placement):
            signal.signal(signal.SIGTERM, _stop)  # Ray has set its own
            code = drive(run, placement)
    except InputError as error:
        write_failure(run, _account(0, str(error), error.exit_code))
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    with suppress(OSError):
        sys.stdout.flush()
    end_now(code)


if __name__ == "__main__":
    main()
