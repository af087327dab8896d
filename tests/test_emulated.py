"""Emulated hosts: the text of a link, the real network that it makes, runs over it, and what is left of it afterwards."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import InputError, RunFailed
from lockstep.launch import specify
from lockstep.launch.emulated import network as emulate
from lockstep.launch.emulated.link import Link, parse_link
from lockstep.launch.emulated.network import Network
from lockstep.launch.emulated.switch import QUEUE_S, Wire
from lockstep.measure.records import read_steps
from lockstep.placement import Placement
from lockstep.run import Run
from lockstep.settings import load
from support import SHORT, Cli, processes_of, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.cold]

here = pytest.mark.skipif(emulate.problem() is not None, reason=str(emulate.problem()))
LINKS = st.builds(
    Link,
    rate=st.none() | st.integers(10**4, 400 * 10**9),
    delay_us=st.integers(0, 10**7),
    loss_ppm=st.integers(0, 99 * 10**4),
)


# The text of a link


@given(LINKS.filter(lambda link: str(link) != ""))
def test_a_link_and_its_text_are_the_same(link: Link) -> None:
    assert parse_link(str(link)) == link


@given(st.permutations(["1.5Gbit", " 0.25 ms", "0.1% "]))
def test_the_parts_of_a_link_come_in_any_order(parts: list[str]) -> None:
    assert parse_link(",".join(parts)) == Link(rate=1_500_000_000, delay_us=250, loss_ppm=1000)


@given(st.text(alphabet="0123456789.,-+ gmkbitus%e", max_size=12) | st.text(max_size=8))
def test_any_other_text_is_an_error_that_names_link_and_an_example(text: str) -> None:
    try:
        link = parse_link(text)
    except InputError as error:
        said = str(error)
    else:
        assert parse_link(str(link) or None) == link
        return
    assert said.startswith(f"link={text!r}")
    assert 'link="1gbit,0.5ms,0.1%"' in said


def test_no_link_is_one_without_limits() -> None:
    assert parse_link(None) == Link()
    assert str(Link()) == ""


# The arithmetic of the user-space link


@given(
    st.integers(10**5, 10**10),
    st.integers(0, 10**5),
    st.lists(st.tuples(st.floats(0, 0.01), st.integers(1, 3), st.integers(40, 65535)), min_size=1, max_size=60),
)
def test_no_packet_is_early_and_no_cable_carries_more_than_its_rate(
    rate: int, delay_us: int, sent: list[tuple[float, int, int]]
) -> None:
    """Three hosts send to a fourth: the cable to it is the narrow place."""
    wire = Wire(Link(rate=rate, delay_us=delay_us), random.Random(0))
    now, first, carried, last = 5.0, 5.0, 0, 0.0
    for pause, source, size in sent:
        now += pause
        arrival = wire.arrival(now, source, 0, size)
        if arrival is None:
            continue
        carried += size
        takes = size * 8 / rate
        assert arrival >= now + takes + delay_us / 1e6 - 1e-9
        assert arrival <= now + QUEUE_S + takes + delay_us / 1e6 + 1e-9
        assert arrival >= last, "packets for one host stay in order"
        last = arrival
    assert carried * 8 / rate <= last - first + 1e-6


def test_the_share_of_lost_packets() -> None:
    wire = Wire(Link(loss_ppm=100_000), random.Random(3))
    lost = sum(wire.arrival(float(i), 0, 1, 1500) is None for i in range(10_000))
    assert 900 < lost < 1100


# The real network


@contextmanager
def network(hosts: int, link: str | None) -> Iterator[Network]:
    with emulate.network(Placement(hosts=hosts, ranks=hosts, emulated=True, link=link)) as made:
        yield made


def python_on(made: Network, host: int, code: str, *words: str) -> subprocess.Popen[str]:
    argv = [*made.hosts[host].prefix, sys.executable, "-c", code, *words]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# Says "ready", takes one connection, echoes single bytes until an "e" comes, then counts what follows; says bytes and seconds.
SERVER = """
import socket, time
server = socket.create_server(("0.0.0.0", 7000)); print("ready", flush=True)
peer, _ = server.accept(); peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while (byte := peer.recv(1)) not in (b"e", b""): peer.sendall(byte)
count = len(peer.recv(65536)); began = time.perf_counter(); counted = 0
while data := peer.recv(1 << 20): counted += len(data); ended = time.perf_counter()
print(count + counted, counted / (ended - began) if counted else 0)
"""
# Fifty round trips of one byte, then so many bytes at once; says the median round trip and the segments sent again.
CLIENT = """
import socket, statistics, struct, sys, time
peer = socket.create_connection((sys.argv[1], 7000), timeout=20)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def trip():
    began = time.perf_counter(); peer.sendall(b"x"); peer.recv(1); return time.perf_counter() - began
trips = [trip() for _ in range(50)]
peer.sendall(b"e" + bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR); peer.recv(1)
again = struct.unpack_from("I", peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 100)[0]
print(statistics.median(trips), again)
"""


def talk(made: Network, source: int, target: int, size: int) -> dict[str, float]:
    """Round trip in seconds, rate in bit/s, and segments sent again, over one TCP connection."""
    server = python_on(made, target, SERVER)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    client = python_on(made, source, CLIENT, made.hosts[target].address, str(size))
    said, _ = client.communicate(timeout=30)
    counted, _ = server.communicate(timeout=30)
    assert (client.returncode, server.returncode) == (0, 0)
    trip, again = said.split()
    total, rate = counted.split()
    assert int(total) == size
    return {"trip": float(trip), "rate": float(rate) * 8, "again": float(again)}


@here
@pytest.mark.parametrize(("link", "size"), [("100mbit", 8 << 20), ("80mbit,2ms", 6 << 20), ("300mbit,0.5ms", 20 << 20)])
def test_rate_and_round_trip_are_what_the_link_says(link: str, size: int) -> None:
    wanted = parse_link(link)
    assert wanted.rate
    with network(2, link) as made:
        # A busy machine may spoil a measurement; a wrong link spoils all three.
        for _ in range(3):
            seen = talk(made, 0, 1, size)
            assert seen["trip"] >= 2 * wanted.delay_s
            assert seen["rate"] < 1.25 * wanted.rate
            if seen["rate"] > 0.75 * wanted.rate and seen["trip"] < 2 * wanted.delay_s + 0.003:
                return
    pytest.fail(f"three attempts, the last one: {seen}")


@here
def test_lost_packets_are_sent_again() -> None:
    with network(2, "1ms,3%") as made:
        assert talk(made, 0, 1, 1 << 20)["again"] > 5
    with network(2, "1ms") as made:
        assert talk(made, 0, 1, 1 << 20)["again"] <= 1


@here
@pytest.mark.parametrize("link", ["200mbit", "200mbit,1ms"])
def test_eight_hosts_reach_each_other_and_one_receives_no_more_than_its_rate(link: str) -> None:
    with network(8, link) as made:
        assert len({host.address for host in made.hosts}) == 8
        talk(made, 7, 0, 1000)
        servers = [python_on(made, 3, SERVER.replace("7000", str(7000 + host))) for host in (0, 1)]
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
        began = time.perf_counter()
        code = CLIENT.replace("7000", "7000 + int(sys.argv[3])")
        size = 5 << 20
        clients = [python_on(made, host, code, made.hosts[3].address, str(size), str(host)) for host in (0, 1)]
        assert [client.wait(30) for client in clients] == [0, 0]
        took = time.perf_counter() - began
        for process in (*servers, *clients):
            process.communicate(timeout=10)
    assert took > 0.9 * 2 * size * 8 / 200e6


@here
def test_two_networks_at_once_do_not_meet() -> None:
    with network(2, None) as one, network(2, "0.1ms") as other:
        assert one.hosts[0].address == other.hosts[0].address
        server = python_on(one, 1, SERVER)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        code = "import socket, sys; sys.exit(socket.socket().connect_ex((sys.argv[1], 7000)) == 0)"
        stranger = python_on(other, 0, code, one.hosts[1].address)
        assert stranger.wait(20) == 0, "a host of the other network got through"
        assert python_on(one, 0, code, one.hosts[1].address).wait(20) == 1
        server.communicate(timeout=10)


def root_network() -> str:
    words = (["ip", "-o", "link"], ["ip", "-o", "addr"], ["ip", "route"], ["tc", "qdisc"], ["ip", "netns", "list"])
    return "".join(subprocess.run(w, capture_output=True, text=True, check=True).stdout for w in words)


def inode_of(path: str) -> int:
    return Path(path).stat().st_ino


def kept_namespaces() -> set[int]:
    """Every network namespace that a process is in, or keeps open."""
    found = set()
    for pattern in ("[0-9]*/task/*/ns/net", "[0-9]*/fd/*"):
        for path in Path("/proc").glob(pattern):
            try:
                if str(path.readlink()).startswith("net:["):
                    found.add(path.stat().st_ino)
            except OSError:
                continue
    return found


@here
@pytest.mark.parametrize("link", ["1gbit", "1ms"])
def test_the_machines_own_network_stays_as_it_is(link: str) -> None:
    before = root_network()
    with network(3, link) as made:
        assert root_network() == before
        inodes = {inode_of(host.namespace) for host in made.hosts}
        assert inodes <= kept_namespaces()
    assert root_network() == before
    assert not inodes & kept_namespaces()


@here
def test_what_tc_is_told_about_netem_is_what_tc_takes() -> None:
    """This holds on kernels with netem and on those without: there the words must fail on the kernel, not on tc."""
    with network(1, None) as made:
        for line in emulate.host_limits(parse_link("1gbit,0.5ms,0.1%"))[:1]:
            words = [*made.hosts[0].prefix, "tc", *line.split()]
            result = subprocess.run(words, capture_output=True, text=True)
            assert result.returncode == 0 or "qdisc kind is unknown" in result.stderr, result.stderr


@here
def test_a_link_that_dies_is_named() -> None:
    def die() -> None:
        with network(2, "1ms"):
            link = link_process(os.getpid())
            os.kill(link, signal.SIGKILL)
            wait_for(lambda: not alive(link), what="the link to die")

    if not user_space():
        pytest.skip("this kernel has netem: there is no link process")
    with pytest.raises(RunFailed, match="the user-space link between the emulated hosts ended by itself"):
        die()


def user_space() -> bool:
    with network(2, "1ms") as made:
        return "user-space" in made.made_by


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def link_process(parent: int) -> int:
    """The user-space link that a process has started."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(status[1]) == parent and b"lockstep.launch.emulated.switch" in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except OSError:
            continue
    return -1


# What a user meets


def test_a_link_that_cannot_be_read_is_said_before_anything_is_made(cli: Cli) -> None:
    message = cli.error("run", *SHORT, "ranks=2", "hosts=emulated:2", "link=1gbps", code=2)
    assert message.startswith("link='1gbps'")
    message = cli.error("run", *SHORT, "ranks=300", "hosts=emulated:300", "global_batch=300", code=2)
    assert "at most 250" in message
    message = cli.error("run", *SHORT, "ranks=2", "hosts=emulated:2", "--host-index", "1", code=2)
    assert "--host-index 1" in message
    assert not cli.runs.exists()


def test_without_the_right_to_make_a_network(cli: Cli) -> None:
    argv = cli.argv("run", *SHORT, "ranks=2", "hosts=emulated:2")
    if os.geteuid() == 0:
        argv = ["setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin", *argv]
    result = subprocess.run(argv, env=cli.environment, cwd=cli.folder, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "emulated hosts need root (CAP_NET_ADMIN" in result.stderr
    assert "Traceback" not in result.stderr
    assert not cli.runs.exists()


@here
def test_without_iproute2(cli: Cli) -> None:
    result = cli("run", *SHORT, "ranks=2", "hosts=emulated:2", PATH=str(cli.folder))
    assert result.returncode == 2, result.stderr
    assert "need the program 'ip': install iproute2" in result.stderr
    assert not cli.runs.exists()


def test_a_dry_run_shows_every_command_and_makes_nothing(cli: Cli) -> None:
    words = ("run", *SHORT, "ranks=4", "hosts=emulated:2", "threads=1", "link=1gbit,0.5ms", "--dry-run", "--json")
    [launch] = json.loads(cli(*words).stdout)["launch"]
    interface = ["GLOO_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=eth0", "nsenter"]
    for rank, command in enumerate(launch):
        host, local = divmod(rank, 2)
        assert command[1:5] == [
            f"LOCKSTEP_RANK={rank}",
            "LOCKSTEP_WORLD_SIZE=4",
            f"LOCKSTEP_LOCAL_RANK={local}",
            "LOCKSTEP_LOCAL_WORLD_SIZE=2",
        ]
        assert command[7:11] == [*interface, f"--net=emulated-host-{host}"]
        assert command[-3:-1] == ["-m", "lockstep.worker"]
    recipe, placement = load([], [*SHORT, "ranks=4", "hosts=emulated:2", "launcher=torchrun"])
    _, spec = specify(recipe, placement, runs=cli.runs)
    agents = spec.command
    assert len(agents) == 2
    for host, command in enumerate(agents):
        assert [*interface, f"--net=emulated-host-{host}"] == command[3:7]
        assert {"--nnodes=2", "--nproc-per-node=2", f"--node-rank={host}", "--master-addr=10.77.0.1"} <= set(command)
    assert not cli.runs.exists()


# Runs


@here
@pytest.mark.parametrize(
    ("launcher", "ranks", "link"),
    [("spawn", 2, "1gbit,2ms"), ("torchrun", 4, "1gbit")],
)
def test_emulated_hosts_compute_what_one_process_does(
    module_cli: Cli, alone: dict[str, Any], launcher: str, ranks: int, link: str
) -> None:
    words = (f"launcher={launcher}", f"ranks={ranks}", "hosts=emulated:2", "threads=1", f"link={link}", "strategy=ddp")
    seen = module_cli.run(*SHORT, *words)
    assert seen["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-5)
    assert seen["ranks_agree"]
    run = Run.find("last", module_cli.runs)
    document = json.loads((run.folder / "network.json").read_text())
    assert document["addresses"] == ["10.77.0.1", "10.77.0.2"]
    assert parse_link(document["link"]) == parse_link(link)
    # The gradients went over the link, and waited for it: an exchange takes at least a round trip.
    rows = read_steps(run.rank_folder(0) / "steps.bin")
    assert statistics.median(rows["exchange_ns"]) > 2e9 * parse_link(link).delay_s
    assert not processes_of(run.folder)


class Started:
    """A long run over two emulated hosts that has taken its first steps."""

    def __init__(self, cli: Cli, *words: str) -> None:
        settings = (*SHORT, "epochs=100000", "ranks=2", "hosts=emulated:2", "threads=1", *words)
        self.process = cli.start("run", *settings)
        self.run: Run = wait_for(
            lambda: next((Run(p.parent) for p in cli.runs.glob("*/run.json")), None), what="the run folder"
        )
        wait_for(lambda: self.steps() > 20 and len(self.run.rank_statuses()) == 2, what="steps on every rank")
        self.network = emulate.of_run(self.run)
        self.namespaces = {inode_of(host.namespace) for host in self.network.hosts}
        assert len(self.namespaces | {inode_of("/proc/self/ns/net")}) == 3
        self.link = link_process(self.process.pid)

    def steps(self) -> int:
        return min(len(read_steps(self.run.rank_folder(rank) / "steps.bin")) for rank in range(2))

    def stands_still(self, beats: int) -> bool:
        """Whether every rank has reported so often, one sign of life after the other, that it waits at the same step."""
        seen = getattr(self, "_seen", [])
        now = [(beat.get("step"), beat.get("waits"), beat["time"]) for beat in self.run.rank_statuses()]
        if not seen or [beat[:2] for beat in seen[-1]] != [beat[:2] for beat in now]:
            seen = []
        if not seen or all(before[2] != after[2] for before, after in zip(seen[-1], now, strict=True)):
            seen.append(now)
        self._seen = seen
        return len(seen) > beats and all(waits for _, waits, _ in now)

    def end(self, code: int, seconds: float) -> str:
        """What was said on the way out; and nothing may be left."""
        _, errors = self.process.communicate(timeout=seconds)
        assert self.process.returncode == code, errors
        assert "Traceback" not in errors
        wait_for(lambda: not processes_of(self.run.folder), seconds=5, what="every process to be gone")
        wait_for(lambda: not self.namespaces & kept_namespaces(), seconds=5, what="every namespace to be gone")
        wait_for(lambda: self.link == -1 or not alive(self.link), seconds=5, what="the link to be gone")
        return errors


@here
def test_a_link_cut_for_a_while_recovers_and_ctrl_c_leaves_nothing(cli: Cli) -> None:
    # Long epochs: an evaluation has exchanges of its own, and a rank that stands still there does not say that it waits.
    started = Started(cli, "link=1gbit,0.5ms", "train_limit=6000", "test_limit=10", "epochs=2000")
    emulate.cut(started.network, 1)
    # Both ranks wait in the exchange of one step, and say so again and again without a step between.
    wait_for(lambda: started.stands_still(beats=3), what="both ranks to wait for each other")
    during = started.steps()
    emulate.mend(started.network, 1)
    wait_for(lambda: started.steps() > during + 20, what="the run to go on")
    started.process.send_signal(signal.SIGINT)
    assert "stopped; what was measured is in" in started.end(130, seconds=60)


@here
def test_a_link_cut_for_good_ends_the_run_by_the_timeout(cli: Cli) -> None:
    started = Started(cli, "link=1gbit", "timeout_s=5")
    emulate.cut(started.network, 0)
    errors = started.end(3, seconds=60)
    # It depends on where in an exchange the cut falls: one of them may have got its half, and be a call ahead.
    assert re.search(r"rank \d after step \d+: lost the other ranks|a rank sent may have been lost on its way", errors)
    assert started.run.status()["state"] == "failed"
    assert len(read_steps(started.run.rank_folder(0) / "steps.bin")) > 20


@here
@pytest.mark.parametrize(("launcher", "link"), [("spawn", "1ms"), ("torchrun", "1gbit")])
def test_kill_9_of_the_supervisor_leaves_nothing_and_the_next_start_works(cli: Cli, launcher: str, link: str) -> None:
    started = Started(cli, f"launcher={launcher}", f"link={link}")
    started.process.kill()
    started.end(-signal.SIGKILL, seconds=10)
    with network(2, link) as made:
        assert talk(made, 0, 1, 1000)["trip"] > 0
