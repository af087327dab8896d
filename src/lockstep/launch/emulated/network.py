"""Emulated hosts: network namespaces of this machine, joined by a switch with a rate, a delay and a loss of our choice.

Nothing here has a name outside of this process. A namespace lives as long as a file descriptor of ours, or a rank in it;
so it goes with us, also after kill -9, and there is nothing that a later start would have to clean up.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import InputError, RunFailed
from lockstep.launch.emulated.link import Link, parse_link
from lockstep.launch.emulated.switch import CLONE_NEWNET, INTERFACE, QUEUE_S
from lockstep.placement import Placement, ranks_per_host
from lockstep.process import PARENT
from lockstep.run import Run
from lockstep.text import last_line

# Namespaces keep these to themselves, so every emulated network can have the same.
SUBNET = "10.77"
MOST_HOSTS = 250
# What a host may send at once after a pause, in seconds of its rate. With a quarter of it, "1gbit" carried 480 Mbit/s on a
# busy machine: the kernel cuts its 64 KiB chunks up where they are longer than this (docs/emulated-hosts.md).
BURST_S = 1e-3
LONGEST_PACKET = 1514

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


@dataclass(frozen=True)
class Host:
    """One emulated host: its namespace, and its address in it."""

    address: str
    namespace: str
    """A path that `nsenter --net=` takes."""
    interface: str = INTERFACE
    link_process: int | None = None
    """What carries its packets, where the kernel does not."""

    @property
    def prefix(self) -> list[str]:
        """Put before a command, runs it on this host, in the same process."""
        return ["nsenter", f"--net={self.namespace}"]


@dataclass(frozen=True)
class Network:
    hosts: tuple[Host, ...]
    link: Link
    made_by: str
    """What keeps to the link's rate, delay and loss."""

    def document(self) -> dict[str, Any]:
        """For the run folder: what really lay between the hosts."""
        return {"link": str(self.link), "made_by": self.made_by, "addresses": [host.address for host in self.hosts]}


def planned(placement: Placement) -> Network:
    """The network as it would be, without making anything."""
    if placement.hosts > MOST_HOSTS:
        raise InputError(f"hosts=emulated:{placement.hosts} is more than one switch has room for: at most {MOST_HOSTS}")
    hosts = tuple(Host(_address(i), f"emulated-host-{i}") for i in range(placement.hosts))
    return Network(hosts, parse_link(placement.link), "nothing yet")


def _address(index: int) -> str:
    return f"{SUBNET}.0.{index + 1}"


def problem() -> str | None:
    """Why hosts cannot be emulated on this machine, and what to do about it; None where they can."""
    if not sys.platform.startswith("linux"):
        return "emulated hosts are Linux network namespaces, which this system does not have: use hosts=1"
    missing = [name for name, bit in _CAPABILITIES.items() if not _effective_capabilities() >> bit & 1]
    if missing:
        return f"emulated hosts need root ({', '.join(missing)} is missing): start Lockstep with sudo, or use hosts=1"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return (
                f"emulated hosts need the program '{program}': install {package}, for example apt-get install {package}"
            )
    return None


def _effective_capabilities() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


@contextmanager
def network(placement: Placement) -> Iterator[Network]:
    """Make the hosts and what lies between them; all of it is gone at the end."""
    reason = problem()
    if reason:
        raise InputError(reason)
    plan = planned(placement)
    with ExitStack() as stack:
        hosts = tuple(replace(host, namespace=_new_namespace(stack)) for host in plan.hosts)
        kernel = not (plan.link.delay_us or plan.link.loss_ppm) or _kernel_has_netem(hosts[0])
        if kernel:
            _join_by_bridge(stack, hosts, plan.link)
        else:
            process = _join_by_process(stack, hosts, plan.link)
            hosts = tuple(replace(host, link_process=process) for host in hosts)
        for host in hosts:
            # No IPv6: a host has one address, and sends nothing on its own account.
            quiet = f"link set {INTERFACE} addrgenmode none txqueuelen 1000"
            if plan.link.loss_ppm:
                # Or one loss would take the 45 packets of a 64 KiB chunk with it.
                quiet += " gso_max_segs 1"
            address = f"addr add {host.address}/24 dev {INTERFACE}"
            _batch(host.namespace, "ip", ["link set lo up", quiet, address, f"link set {INTERFACE} up"])
        yield Network(hosts, plan.link, _maker(plan.link, kernel))


def _maker(link: Link, kernel: bool) -> str:
    if not kernel:
        return "user-space link (this kernel has no netem)"
    parts = [name for name, used in (("tbf", link.rate), ("netem", link.delay_us or link.loss_ppm)) if used]
    return "veth" + "".join(f" + {name}" for name in parts)


def _new_namespace(stack: ExitStack) -> str:
    """A new network namespace, kept by a file descriptor of this process, as a path that other programs can open."""

    def make() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            error = ctypes.get_errno()
            raise InputError(f"hosts=emulated: no network namespace can be made here: {os.strerror(error)}")
        # Connections of killed ranks keep trying to say goodbye, and keep the namespace while they do: 6 s and not 100.
        with suppress(OSError):  # in a container that may not change it, they take their time
            Path("/proc/sys/net/ipv4/tcp_orphan_retries").write_text("4")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    # In a thread of its own, which ends: the other threads of this process stay where they are.
    with ThreadPoolExecutor(1) as pool:
        descriptor = pool.submit(make).result()
    stack.callback(os.close, descriptor)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _batch(namespace: str, program: str, lines: list[str]) -> None:
    """Commands of `ip` or `tc` in a namespace, in one process."""
    argv = ["nsenter", f"--net={namespace}", program, "-batch", "-"]
    result = subprocess.run(argv, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if result.returncode:
        said = " ".join(result.stderr.split())
        raise InputError(f"hosts=emulated: this system refused '{program} {lines[0]}' …: {said}")


def _kernel_has_netem(host: Host) -> bool:
    """Tried out, because a module may be there and not loaded yet: asking for it loads it."""
    words = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    tried = subprocess.run([*host.prefix, *words], capture_output=True)
    if tried.returncode == 0:
        _batch(host.namespace, "tc", ["qdisc del dev lo root"])
    return tried.returncode == 0


def _join_by_bridge(stack: ExitStack, hosts: tuple[Host, ...], link: Link) -> None:
    """A switch in a namespace of its own, and a cable from each host to it, limited at both ends."""
    switch = _new_namespace(stack)
    lines = ["link add switch type bridge", "link set switch addrgenmode none", "link set switch up"]
    for index, host in enumerate(hosts):
        lines += [
            f"link add port{index} type veth peer name {INTERFACE} netns {host.namespace}",
            f"link set port{index} master switch addrgenmode none",
            f"link set port{index} up",
        ]
    _batch(switch, "ip", lines)
    for host in hosts:
        limits = host_limits(link)
        if limits:
            _batch(host.namespace, "tc", limits)
    if link.rate is not None:
        _batch(switch, "tc", [f"qdisc add dev port{index} root {_tbf(link.rate)}" for index in range(len(hosts))])


def host_limits(link: Link) -> list[str]:
    """What `tc` is told about a host's interface. Delay first, then rate, as the manual of netem has it."""
    lines = []
    if link.delay_us or link.loss_ppm:
        loss = f" loss {link.loss_ppm / 1e4:f}%" if link.loss_ppm else ""
        lines.append(f"qdisc add dev {INTERFACE} root handle 1: netem limit 100000 delay {link.delay_us}us{loss}")
    if link.rate is not None:
        parent = "parent 1:" if lines else "root"
        lines.append(f"qdisc add dev {INTERFACE} {parent} handle 10: {_tbf(link.rate)}")
    return lines


def _tbf(rate: int) -> str:
    burst = max(2 * LONGEST_PACKET, int(rate / 8 * BURST_S))
    return f"tbf rate {rate}bit burst {burst}b latency {QUEUE_S * 1e3:g}ms"


def _join_by_process(stack: ExitStack, hosts: tuple[Host, ...], link: Link) -> int:
    """The user-space link, by its process; it ends with us, whatever ends us."""
    if not Path("/dev/net/tun").exists():
        raise InputError(
            f"link={str(link)!r}: this kernel has neither netem nor TUN: 'modprobe sch_netem' or 'modprobe tun' adds one, "
            "or state a rate alone"
        )
    argv = [sys.executable, "-m", "lockstep.launch.emulated.switch", str(link)]
    argv += [f"{host.namespace}={host.address}" for host in hosts]
    # A session of its own: Ctrl-C must not cut the link before the ranks have been ended in order.
    process = subprocess.Popen(
        argv,
        env={**os.environ, PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    stack.callback(_end, process)
    assert process.stdout is not None
    if process.stdout.readline() != b"up\n":
        raise InputError(f"link={str(link)!r}: the user-space link did not start: {_last_words(process)}")
    return process.pid


def _end(process: subprocess.Popen[bytes]) -> None:
    """A link that ended before it was told to is why the ranks lost each other, so that is said."""
    if process.poll() is not None:
        raise RunFailed(f"the user-space link between the emulated hosts ended by itself: {_last_words(process)}")
    process.kill()
    process.communicate()


def _last_words(process: subprocess.Popen[bytes]) -> str:
    _, errors = process.communicate()
    return last_line(errors.decode(errors="replace")) or f"exit code {process.returncode}"


def of_run(run: Run) -> Network:
    """The network of a run that is under way, from outside of it: by the processes of its ranks."""
    placement = run.spec().placement
    beats = {beat["rank"]: beat["pid"] for beat in run.rank_statuses()}
    first_ranks = range(0, placement.ranks, ranks_per_host(placement))
    plan = planned(placement)
    hosts = [
        replace(host, namespace=f"/proc/{beats[rank]}/ns/net")
        for host, rank in zip(plan.hosts, first_ranks, strict=True)
    ]
    return replace(plan, hosts=tuple(hosts))


def cut(network: Network, host: int) -> None:
    """Pull the host's cable."""
    _batch(network.hosts[host].namespace, "ip", [f"link set {INTERFACE} down"])


def mend(network: Network, host: int) -> None:
    """Plug it in again; address and routes are still there."""
    _batch(network.hosts[host].namespace, "ip", [f"link set {INTERFACE} up"])
