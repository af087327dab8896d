"""A private Slurm of two nodes on loopback: munged, slurmctld and two slurmd in a temporary folder, with ports of their own.

Both nodes are this machine, so they share its cores and its files. ProctrackType=linuxproc works without cgroups of our own.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lockstep.launch import mpirun

with_mpich = pytest.mark.skipif(
    mpirun.library_kind() != "mpich", reason="mpi4py with MPICH is not installed: pip install 'lockstep-bench[mpi]'"
)
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "scontrol", "scancel")
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_LIBC = ctypes.CDLL(None)

_CONFIGURATION = """\
ClusterName=lockstep
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={port}
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
EnforcePartLimits=ALL
ReturnToService=2
KillWait=5
SlurmdTimeout=5
MessageTimeout=3
MailProg=/bin/true
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={port1} CPUs=2 State=UNKNOWN
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={port2} CPUs=2 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


def missing() -> str | None:
    """Why a cluster cannot be started here, or None."""
    if os.getuid() != 0:
        return "a Slurm of our own needs root"
    absent = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    return f"not installed: {', '.join(absent)} (.ci/packages installs them on Debian)" if absent else None


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": "lo"}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("munge", "run", "state", "log", "spool/node1", "spool/node2", "tmp/node1", "tmp/node2"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge" / "key").write_bytes(os.urandom(1024))
        (self.folder / "munge" / "key").chmod(0o600)
        port, port1, port2 = _free_ports(3)
        # Ranks meet at a port by the job's number: two clusters, or one right after the other, must not number alike.
        first_job = random.randrange(1, 9000)
        text = _CONFIGURATION.format(folder=self.folder, port=port, port1=port1, port2=port2, first_job=first_job)
        (self.folder / "slurm.conf").write_text(text)
        munge = self.folder / "munge"
        self._begin(
            "munged",
            *("munged", "--foreground", f"--key-file={munge / 'key'}", f"--socket={munge / 'munge.socket'}"),
            *(f"--pid-file={self.folder}/run/munged.pid", f"--seed-file={self.folder}/run/munged.seed"),
        )
        _until(lambda: (munge / "munge.socket").exists(), 10, "munged", self.folder)
        self._begin("slurmctld", "slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
        for node in ("node1", "node2"):
            self.start_node(node)
        _until(lambda: self.idle() == 2, 20, "both nodes to be idle", self.folder)
        # Only a step that has run proves that steps run: with a wrong process tracker srun prints an error and exits with 0.
        names = self("srun", "-N2", "--ntasks-per-node=1", "printenv", "SLURMD_NODENAME").stdout.split()
        assert sorted(names) == ["node1", "node2"], (names, self.logs())

    def start_node(self, node: str) -> None:
        self._begin(node, "slurmd", "-D", "-f", self.environment["SLURM_CONF"], "-N", node)

    def kill_node(self, node: str) -> None:
        """As if the node had lost its power, as far as the controller can see; its tasks are still there."""
        self._daemons[node].kill()
        self._daemons.pop(node).wait()

    def _begin(self, name: str, *argv: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                argv,
                env={**os.environ, "PATH": _PATH, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # The daemons end with the tests, even if those are killed.
                preexec_fn=lambda: _LIBC.prctl(1, signal.SIGTERM, 0, 0, 0),
            )

    def __call__(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """A Slurm command that must succeed."""
        result = subprocess.run(
            argv, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=30
        )
        assert result.returncode == 0, (argv, result.stdout, result.stderr, self.logs())
        return result

    def idle(self) -> int:
        result = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        return int(result.stdout.strip() or 0) if result.returncode == 0 else 0

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in (self.folder / "log").iterdir())

    def stop(self) -> None:
        """All at once: each daemon takes its time. Then the step daemons that a dead node left."""
        for daemon in self._daemons.values():
            daemon.terminate()
        until = time.monotonic() + 15
        for daemon in self._daemons.values():
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(max(0.1, until - time.monotonic()))
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _until(lambda: not self.processes(), 5, "the last process of the cluster to be gone", self.folder)

    def processes(self) -> list[int]:
        """Every process that has a file of this cluster open: a step daemon does not name the folder in its command line."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if any(str(self.folder) in os.readlink(fd) for fd in (entry / "fd").iterdir()):  # noqa: PTH115
                        found.append(int(entry.name))
        return found


@contextmanager
def running() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="lockstep-slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    """Neither from the range of ranks' meeting points nor from the kernel's own."""
    found: list[int] = []
    for port in random.sample(range(30000, 32700), 200):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports between 30000 and 32700")


def _until(condition: object, seconds: float, what: str, folder: Path) -> None:
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in (folder / "log").iterdir())
            raise RuntimeError(f"waited {seconds} s in vain for {what}\n{logs}")
        time.sleep(0.05)
