"""`lockstep preflight`: real nodes (emulated hosts, a real Slurm of two nodes) with planted faults, and the judgement by itself."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.emulated import network as emulate
from lockstep.preflight import node, peer
from lockstep.preflight.asked import _given, placed
from lockstep.preflight.examine import MOST_PARTNERS, ROUNDS, meetings
from lockstep.preflight.judge import Finding, judge, slow
from lockstep.preflight.seen import Link, Node, Seen
from slurm_cluster import Cluster
from support import Cli, processes_of, wait_for

emulated = pytest.mark.skipif(emulate.problem() is not None, reason=str(emulate.problem()))


# ---------------------------------------------------------------- the judgement

FACTS: dict[str, Any] = {
    "lockstep": "1.0",
    "torch": "2.13.0",
    "python": "3.11.7",
    "load": 0.1,
    "disk_free_bytes": 1 << 40,
    "shm_free_bytes": 1 << 33,
}


def seen(nodes: int = 4, seed: int = 0, noise: float = 0.05) -> Seen:
    """Nodes that are all alike, measured with noise: now and then a figure is half of what it should be."""
    draw = random.Random(seed)

    def rounds(value: float, count: int = ROUNDS) -> list[float]:
        return [value * draw.lognormvariate(0, noise) / (2 if draw.random() < 0.1 else 1) for _ in range(count)]

    made = [
        Node(
            name=f"n{rank}",
            rank=rank,
            facts=dict(FACTS),
            cores={core: rounds(50.0) for core in range(2)},
            granted={core: [0.99] * ROUNDS for core in range(2)},
            memory=rounds(20.0),
            shared=True,
            write=rounds(200.0, 3),
            skew_s=draw.uniform(-0.01, 0.01),
            skew_within_s=0.001,
        )
        for rank in range(nodes)
    ]
    links = [
        Link(source=a, target=b, gbit=rounds(9.0), latency_us=[1 / each for each in rounds(1 / 30)])
        for a in range(nodes)
        for b in range(nodes)
        if a != b
    ]
    return Seen(nodes=made, links=links, rounds=ROUNDS, folder="/shared/runs/.preflight-1")


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def test_noise_accuses_nobody() -> None:
    """Two hundred examinations of healthy nodes: 1,600 cores, 3,200 links."""
    accused = [each for seed in range(200) for each in judge(seen(nodes=6 if seed % 2 else 2, seed=seed, noise=0.1))]
    assert accused == []


def test_who_is_slow_in_every_round_is_named_with_numbers() -> None:
    found = seen()
    found.nodes[2].cores[1] = [rate / 1.6 for rate in found.nodes[2].cores[1]]
    finding = only(judge(found))
    assert (finding.kind, finding.where) == ("core", "n2")
    assert finding.text.startswith("core 1 is 1.")
    assert "times as slow as the median of the others (" in finding.text
    found.nodes[2].cores[0] = [rate / 1.6 for rate in found.nodes[2].cores[0]]
    assert "2 of its 2 cores are slow at matrix products" in only(judge(found)).text
    # What something else had of a core is no slowness of its own.
    found.nodes[2].granted[1] = [0.6] * ROUNDS
    busy, core = judge(found)
    assert (busy.kind, busy.where) == ("busy", "n2")
    assert "core 1 (60%); the other nodes 99%; other work (load 0.1) or a CPU limit has the rest" in busy.text
    assert core.text.startswith("core 0 is 1.")
    found.nodes[2].granted[1] = [0.99] * ROUNDS
    # In one round as fast as the others: not named.
    found.nodes[2].cores = {core: [*rates[:-1], 50.0] for core, rates in found.nodes[2].cores.items()}
    assert judge(found) == []


def test_a_ratio_is_that_within_a_round() -> None:
    """Everybody is five times as slow in every other round, and one of them always 1.5 times as slow as the others."""
    pace = [1.0, 5.0] * 4
    times = {name: [each * (1.5 if name == "slow" else 1.0) for each in pace] for name in ("a", "b", "c", "slow")}
    found = slow(times, 0.15)
    assert list(found) == ["slow"]
    assert found["slow"] == (1.5, 1.5, 1.5)
    assert slow({name: each[:4] for name, each in times.items()}, 0.15) == {}, "too few rounds"
    assert slow({"alone": pace}, 0.15) == {}, "nobody to compare with"


def test_a_node_that_is_lost_on_the_way_hides_nobody() -> None:
    times = {name: [1.5 if name == "slow" else 1.0] * ROUNDS for name in ("a", "b", "c", "slow")}
    assert list(slow(times | {"lost": [1.0, 1.0]}, 0.15)) == ["slow"]


def test_a_slow_cable_is_the_nodes_and_a_slow_link_is_the_pairs() -> None:
    found = seen()
    for link in found.links:
        if link.source == 3:
            link.gbit = [rate / 20 for rate in link.gbit]
    finding = only(judge(found))
    assert (finding.kind, finding.where) == ("link", "n3")
    assert finding.text.startswith("sends at most 0.4")
    found = seen(seed=1)
    link = next(link for link in found.links if (link.source, link.target) == (0, 1))
    link.gbit = [rate / 20 for rate in link.gbit]
    finding = only(judge(found))
    assert (finding.kind, finding.where) == ("link", "n0 → n1")
    found = seen(seed=2)
    for link in found.links:
        if {link.source, link.target} == {1, 2}:
            link.latency_us = [400.0] * ROUNDS
    finding = only(judge(found))
    assert finding.where == "n1 – n2"
    assert finding.text.startswith("a message takes 400 µs, 1")


def test_what_is_wrong_is_named() -> None:
    found = seen()
    found.nodes[0].facts |= {"torch": "2.12.0"}
    found.nodes[1].skew_s, found.nodes[1].skew_within_s = 3.0, 0.002
    found.nodes[2].shared = False
    found.nodes[3].facts |= {"shm_free_bytes": 64 << 20, "disk_free_bytes": 100 << 20}
    texts = {(finding.kind, finding.where): finding.text for finding in judge(found)}
    assert texts["version", "n0"] == "has torch 2.12.0, the others 2.13.0"
    assert texts["clock", "n1"] == "its clock is 3.0 s ahead of the others (to within 2 ms)"
    assert texts["folder", "n2"].startswith("does not share /shared/runs: ")
    assert texts["space", "n3"] == "has 64 MiB of /dev/shm left"
    assert len(texts) == 4, "two about space on n3"
    found = seen()
    found.nodes[1].lost = "its clock: no answer within 60 s"
    found.nodes[2].granted = {core: [0.4] * ROUNDS for core in range(2)}
    found.nodes[3].facts |= {"address": "127.0.1.1"}
    for link in found.links:
        if 3 in (link.source, link.target):
            link.gbit, link.latency_us, link.problem = [], [], "Connection refused"
    kinds = [(finding.kind, finding.where) for finding in judge(found)]
    assert kinds == [
        ("silent", "n1"),
        ("address", "n3"),
        ("busy", "n2"),
        *(("link", f"n{other} – n3") for other in range(3)),
    ]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 16])
def test_every_two_nodes_meet_once(nodes: int) -> None:
    lists = list(meetings(nodes))
    met = [frozenset(pair) for pairs in lists for pair in pairs]
    assert len(met) == len(set(met)) == nodes * (nodes - 1) // 2
    for pairs in lists:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def test_of_a_thousand_nodes_each_meets_some() -> None:
    lists = list(meetings(1000))
    assert len(lists) <= MOST_PARTNERS
    assert all(len(pairs) == 500 for pairs in lists)


def test_cores_of_an_allocation() -> None:
    assert _given("2(x2)") == 2
    assert _given("16(x3),4") == 4
    assert _given("") is None


@pytest.mark.skipif(shutil.which("srun") is None, reason="Slurm's commands are not installed")
@pytest.mark.parametrize(
    ("words", "hosts", "threads"),
    [
        ((), 4, 8),
        (("threads=3",), 4, 3),
        (("slurm.partition=debug",), 4, 8),
        (("hosts=2",), 2, 8),
        (("launcher=slurm",), 1, 8),
        (("launcher=spawn", "threads=2"), 1, 2),
    ],
)
def test_in_an_allocation_all_its_nodes_are_tried(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], hosts: int, threads: int
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = placed(words, {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_CPUS_PER_NODE": "8(x4)"})
    assert (found.hosts, found.ranks, found.threads) == (hosts, hosts, threads)
    assert found.launcher == ("spawn" if "launcher=spawn" in words else "slurm")


def test_two_nodes_talk_over_a_real_connection() -> None:
    listener = peer.listen("127.0.0.1")
    port = listener.getsockname()[1]
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(peer.serve(listener, "right")))
    thread.start()
    # Somebody else, or a caller of an earlier meeting, is hung up on; the right one is still served.
    assert "problem" in peer.call("127.0.0.1", port, "wrong", 0.01)
    found = peer.call("127.0.0.1", port, "right", 0.01)
    thread.join()
    assert min(found["latency_us"], found["out_gbit"], found["back_gbit"]) > 0
    assert answers == [{}]
    listener.close()
    assert peer.call("127.0.0.1", port, "right", 0.01) == {"problem": "Connection refused"}


def test_a_core_without_time_has_a_figure(tmp_path: Path) -> None:
    """On a crowded machine a turn may be over before it began: one product is waited for, and nothing is divided by zero."""
    cores = node.usable()
    found = node.compute(cores, 0.0)["cores"]
    assert list(found) == [str(core) for core in cores]
    assert all(each["gflops"] > 0 and each["granted"] > 0 for each in found.values())
    assert node.memory(cores, 0.0)["gbs"] > 0
    assert node.disk(tmp_path)["mbs"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=mnist-convnet"], "model=mnist-convnet: preflight trains nothing: leave it out"),
        (["hosts=2"], "hosts=2: say how they are reached"),
        (["ranks=4"], "ranks=4: preflight starts one worker on each of 1 hosts: leave ranks out"),
        (["--out", "."], "--out . is there already"),
    ],
)
def test_wrong_words(cli: Cli, words: list[str], message: str) -> None:
    cli.environment.pop("SLURM_JOB_ID", None)
    (cli.folder / "file").write_text("in the way")
    assert message in cli.error("preflight", *words, code=2)
    assert not cli.runs.exists()


# ---------------------------------------------------------------- real nodes


def looked(cli: Cli, *words: str, during: Callable[[], None] = lambda: None) -> tuple[int, dict[str, Any]]:
    """The exit code and the document; `during` happens while the workers start."""
    process = cli.start("preflight", *words, "--out", "out", "--json")
    try:
        during()
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert "Traceback" not in errors
    document: dict[str, Any] = json.loads(output)
    assert json.loads((cli.folder / "out" / "preflight.json").read_text()) == document
    assert not processes_of(cli.folder / "out"), "nothing is left running"
    return process.returncode, document


def of_kinds(document: dict[str, Any], *but: str) -> list[tuple[str, str]]:
    """What was found, without what the machine of the tests is to blame for: other work on its cores."""
    # Other tests run beside this one, and a container has little shared memory.
    return [(one["kind"], one["where"]) for one in document["findings"] if one["kind"] not in ("busy", "space", *but)]


def worker(cli: Cli, rank: int) -> int:
    path = cli.folder / "out" / "ranks" / f"{rank:04d}" / "pid"
    return int(wait_for(lambda: path.is_file() and path.read_text(), what=f"the worker of host {rank}"))


@contextmanager
def throttled(pid: int) -> Iterator[None]:
    """A process that is stopped for four fifths of the time."""
    over = threading.Event()

    def duty() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(0.04)
                os.kill(pid, signal.SIGCONT)
                over.wait(0.01)

    thread = threading.Thread(target=duty)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.alone
def test_this_machine_alone(cli: Cli) -> None:
    code, document = looked(cli)
    assert of_kinds(document) == []
    assert code == (3 if document["findings"] else 0)
    node = document["nodes"][0]
    assert len(node["cores"]) == len(os.sched_getaffinity(0)), "every core"
    assert all(len(rates) == ROUNDS and min(rates) > 0 for rates in node["cores"].values())
    assert node["shared"] is True
    assert node["facts"]["lockstep"]


@emulated
@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.alone
def test_healthy_hosts(cli: Cli) -> None:
    code, document = looked(cli, "hosts=emulated:2", "link=100mbit")
    assert of_kinds(document) == []
    assert code == (3 if document["findings"] else 0)
    assert [node["name"] for node in document["nodes"]] == ["host 0", "host 1"]
    for link in document["links"]:
        assert len(link["gbit"]) == ROUNDS
        assert 0.05 < sorted(link["gbit"])[ROUNDS // 2] < 0.11, "what the link is"
    text = cli("preflight", "hosts=emulated:2", "link=100mbit")
    assert "2 nodes, 2 cores and 1 link were tried in " in text.stdout.splitlines()[0]
    assert "next: lockstep " in text.stderr
    assert not cli.runs.exists(), "nothing is left behind"


@emulated
@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.alone
def test_a_throttled_host_is_named(cli: Cli) -> None:
    def slowed() -> None:
        with throttled(worker(cli, 1)):
            wait_for(lambda: (cli.folder / "out" / "preflight.json").is_file(), seconds=280, what="the end")

    code, document = looked(cli, "hosts=emulated:2", during=slowed)
    assert code == 3
    busy = {one["where"]: one["text"] for one in document["findings"] if one["kind"] == "busy"}
    assert "of its cores' time (" in busy["host 1"]
    assert "; the other nodes " in busy["host 1"]
    assert of_kinds(document, "late") == [], "it is named for what it is, and once"
    shares = [sorted(next(iter(node["granted"].values())))[ROUNDS // 2] for node in document["nodes"]]
    assert shares[1] < 0.4, "what is stopped for four fifths of the time"


@emulated
@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.alone
def test_a_slow_cable_is_named(cli: Cli) -> None:
    """Three hosts without limits; what the last one sends goes at 20 Mbit/s."""

    def narrowed() -> None:
        limit = "qdisc add dev eth0 root tbf rate 20mbit burst 10kb latency 50ms"
        argv = ["nsenter", f"--target={worker(cli, 2)}", "--net", "tc", *limit.split()]
        subprocess.run(argv, check=True)

    code, document = looked(cli, "hosts=emulated:3", during=narrowed)
    assert code == 3
    assert ("link", "host 2") in of_kinds(document)
    assert {where for kind, where in of_kinds(document) if kind == "link"} == {"host 2"}
    text = next(one["text"] for one in document["findings"] if one["kind"] == "link")
    assert text.startswith("sends at most 0.0")


@emulated
@pytest.mark.slow
@pytest.mark.cold
def test_another_version_and_a_wrong_clock_on_one_host(cli: Cli) -> None:
    """Host 1 finds another installation first, and has a clock of its own, ten seconds ahead."""
    other = cli.folder / "other" / "lockstep_bench-0.0.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep-bench\nVersion: 0.0.9\n")
    shim = cli.folder / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if os.environ.get('LOCKSTEP_RANK') == '1':\n"
        f"    sys.path.insert(0, {str(other.parent)!r})\n"
        "    real = time.time\n"
        "    time.time = lambda: real() + 10\n"
    )
    cli.environment["PYTHONPATH"] = os.pathsep.join([str(shim), cli.environment.get("PYTHONPATH", "")])
    code, document = looked(cli, "hosts=emulated:2")
    assert code == 3
    texts = {one["kind"]: one["text"] for one in document["findings"]}
    assert texts["version"].startswith("has lockstep 0.0.9, the others ")
    assert texts["clock"].startswith("its clock is 10.0 s ahead of the others")
    assert {("version", "host 1"), ("clock", "host 1")} <= set(of_kinds(document))


@emulated
@pytest.mark.slow
@pytest.mark.cold
def test_a_host_that_never_answers(cli: Cli) -> None:
    code, document = looked(
        cli, "hosts=emulated:3", "--limit", "20", during=lambda: os.kill(worker(cli, 1), signal.SIGSTOP)
    )
    assert code == 3
    silent = [one for one in document["findings"] if one["kind"] == "silent"]
    assert [one["where"] for one in silent] == ["host 1"]
    assert "no answer within 20 s" in silent[0]["text"]
    assert document["rounds"] == ROUNDS, "the others are examined to the end"
    assert document["nodes"][0]["memory"]
    assert {(link["source"], link["target"]) for link in document["links"] if link["gbit"]} == {(0, 2), (2, 0)}


@emulated
@pytest.mark.slow
@pytest.mark.cold
def test_a_host_that_dies(cli: Cli) -> None:
    def killed() -> None:
        pid = worker(cli, 1)
        wait_for(lambda: (cli.folder / "out" / "ranks" / "0001" / "here").exists(), what="its first answer")
        time.sleep(1.0)
        os.kill(pid, signal.SIGKILL)

    code, document = looked(cli, "hosts=emulated:2", during=killed)
    assert code == 3
    silent = [one for one in document["findings"] if one["kind"] == "silent"]
    assert [one["where"] for one in silent] == ["host 1"]
    assert "its worker ended" in silent[0]["text"]
    assert document["nodes"][1]["facts"]["torch"], "what it had said is kept"


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_whoever_stops_it_no_worker_is_left(cli: Cli, number: signal.Signals, code: int) -> None:
    process = cli.start("preflight", "--out", "out")
    worker(cli, 0)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    wait_for(lambda: not processes_of(cli.folder / "out"), seconds=10, what="the worker to be gone")


# ---------------------------------------------------------------- a real Slurm


@pytest.fixture
def on_cluster(cluster: Cluster, cli: Cli) -> Iterator[Cli]:
    cli.environment |= cluster.environment
    yield cli
    wait_for(lambda: not processes_of(cli.folder), seconds=10, what="every process to be gone")
    wait_for(lambda: cluster.idle() == 2, seconds=10, what="both nodes to be idle again")


@pytest.mark.slow
@pytest.mark.cold
def test_an_allocation_without_a_word(on_cluster: Cli) -> None:
    result = subprocess.run(
        ["salloc", "--quiet", "-N2", *on_cluster.argv("preflight", "--json")],
        env=on_cluster.environment,
        cwd=on_cluster.folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in result.stderr
    document = json.loads(result.stdout)
    assert [node["name"] for node in document["nodes"]] == ["node1", "node2"]
    assert all(node["shared"] for node in document["nodes"])
    assert of_kinds(document, "core", "memory", "write", "link") == []
    assert [len(link["gbit"]) for link in document["links"]] == [ROUNDS, ROUNDS]
    assert not on_cluster.runs.exists()


@pytest.mark.slow
@pytest.mark.cold
def test_a_folder_that_one_node_does_not_share(cluster: Cluster, on_cluster: Cli) -> None:
    """The second node's daemon lives where another file system lies over our runs."""
    on_cluster.runs.mkdir()
    cluster.kill_node("node2")
    over = f"mount -t tmpfs none {on_cluster.runs} && exec slurmd -D -f {cluster.environment['SLURM_CONF']} -N node2"
    cluster._begin("node2", "unshare", "--mount", "sh", "-c", over)
    try:
        wait_for(lambda: cluster.idle() == 2, seconds=30, what="the node to be back")
        result = on_cluster("preflight", "launcher=slurm", "hosts=2", "threads=1", "--json")
        assert result.returncode == 3, result.stderr
        document = json.loads(result.stdout)
        assert of_kinds(document, "core", "memory", "write", "link") == [("folder", "node2")]
        assert document["nodes"][1]["memory"], "it is examined all the same"
    finally:
        cluster.kill_node("node2")
        cluster.start_node("node2")
        wait_for(lambda: cluster.idle() == 2, seconds=30, what="the node to be back")
        shutil.rmtree(on_cluster.runs, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.cold
def test_a_node_without_our_python(cluster: Cluster, on_cluster: Cli) -> None:
    """Its worker cannot start: one line that names it, and the other is examined."""
    shim = on_cluster.folder / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('SLURMD_NODENAME') == 'node2' and 'SLURM_PROCID' in os.environ:\n"
        "    sys.exit('No module named lockstep')\n"
    )
    on_cluster.environment["PYTHONPATH"] = os.pathsep.join([str(shim), on_cluster.environment.get("PYTHONPATH", "")])
    result = on_cluster("preflight", "launcher=slurm", "hosts=2", "threads=1", "--limit", "15", "--json")
    assert result.returncode == 3, result.stderr
    document = json.loads(result.stdout)
    silent = [one for one in document["findings"] if one["kind"] == "silent"]
    assert [one["where"] for one in silent] == ["node2"]
    assert "No module named lockstep" in silent[0]["text"]
    assert document["nodes"][0]["memory"]
