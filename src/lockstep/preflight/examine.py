"""Ask every node, in turns: a node that answers half is named and left out, and what the others say is kept.

All nodes are asked at the same time, as all of them work at the same time in a training. Everything that is compared
is measured in several rounds, seconds apart, so that a moment's disturbance does not decide.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lockstep.launch.pool import Pool
from lockstep.placement import Placement
from lockstep.preflight.node import HERE
from lockstep.preflight.seen import VARIABLE, Link, Node, Seen, Task
from lockstep.run import Run
from lockstep.units import counted

WORKER = "lockstep.preflight.worker"
ROUNDS = 7
# Of one turn of a core, of the memory, and of one direction of a link.
COMPUTE_S, MEMORY_S, LINK_S = 0.25, 0.2, 0.08
# Each node meets at most this many others: a thousand nodes have half a million links.
MOST_PARTNERS = 24
CLOCKS = 9
LEAVE_S = 5.0
LATE_S = 10.0
# What another node has written may take a while to show.
SHOW_S = 5.0

Tell = Callable[[str], None]


class Examination:
    def __init__(self, placement: Placement, folder: Path, limit_s: float, tell: Tell) -> None:
        self._placement, self._folder, self._limit_s, self._tell = placement, folder, limit_s, tell
        emulated = [f"host {number}" for number in range(placement.hosts)] if placement.emulated else []
        self._task = Task(placement=placement, token=secrets.token_hex(16), names=emulated)
        environment = {VARIABLE: msgspec.json.encode(self._task).decode()}
        self._pool = Pool(placement, folder, WORKER, together=False, environment=environment)
        names = emulated or [f"node {rank}" for rank in range(placement.hosts)]
        self.seen = Seen(nodes=[Node(name=name, rank=rank) for rank, name in enumerate(names)], folder=str(folder))
        self._links: dict[tuple[int, int], Link] = {}
        self._meeting = 0

    def run(self) -> Seen:
        began = time.monotonic()
        (self._folder / HERE).write_text(self._task.token)
        try:
            self._pool.start()
            self._tell(f"starting a worker on each of {counted(len(self.seen.nodes), 'node')} …")
            self._pool.join(self._limit_s, self._tell)
            self._greet()
            self._look()
            for number in range(ROUNDS):
                self._tell(f"round {number + 1} of {ROUNDS}: cores, memory, links …")
                self._measure(disk=number < 3)
                self.seen.rounds += 1
            self._ask("the end", {"do": "leave"}, LEAVE_S)
            self._pool.wait(LEAVE_S)
        finally:
            self._pool.end()
            self.seen.seconds = time.monotonic() - began
            self.seen.links = list(self._links.values())
        return self.seen

    # ---- what is asked once

    def _greet(self) -> None:
        """Who is there. Slurm knows the names of those who are not."""
        for node, name in zip(self.seen.nodes, self._pool.nodes(), strict=False):
            node.name = name
        for rank, answer in self._collect("the start", self._limit_s).items():
            self.seen.nodes[rank].name = answer["name"]

    def _look(self) -> None:
        self._tell("asking every node what it has …")
        for rank, answer in self._ask("what it has", {"do": "facts"}, self._limit_s).items():
            self.seen.nodes[rank].facts = answer
        self._check_folder()
        for rank in self._alive():
            self._clock(self.seen.nodes[rank])
        if len(self.seen.nodes) > 1:
            for rank, answer in self._ask("its address", {"do": "listen"}, self._limit_s).items():
                self.seen.nodes[rank].facts |= answer

    def _check_folder(self) -> None:
        """Whether we see what each node wrote, and each sees what we did."""
        until = time.monotonic() + SHOW_S
        missing = {rank for rank in self._alive() if self.seen.nodes[rank].facts}
        while missing and time.monotonic() < until:
            missing -= {rank for rank in missing if self._wrote(rank)}
            time.sleep(0.05 if missing else 0.0)
        for node in self.seen.nodes:
            if node.facts:
                node.shared = bool(node.facts["sees_folder"]) and node.rank not in missing

    def _wrote(self, rank: int) -> bool:
        try:
            return (Run(self._folder).rank_folder(rank) / HERE).read_text() == self._task.token
        except OSError:
            return False

    def _clock(self, node: Node) -> None:
        """Of several questions the one that was answered soonest says most."""
        tried: list[tuple[float, float]] = []
        for _ in range(CLOCKS):
            before = time.time()
            answers = self._ask("its clock", {"do": "clock"}, self._limit_s, [node.rank])
            after = time.time()
            if node.rank not in answers:
                return
            tried.append(((after - before) / 2, answers[node.rank]["time"] - (before + after) / 2))
        node.skew_within_s, node.skew_s = min(tried)

    # ---- what is asked in rounds

    def _measure(self, disk: bool) -> None:
        for rank, answer in self._ask(
            "matrix products", {"do": "compute", "seconds": COMPUTE_S}, self._limit_s
        ).items():
            for core, found in answer["cores"].items():
                self.seen.nodes[rank].cores.setdefault(int(core), []).append(found["gflops"])
                self.seen.nodes[rank].granted.setdefault(int(core), []).append(found["granted"])
        for rank, answer in self._ask("copies in memory", {"do": "memory", "seconds": MEMORY_S}, self._limit_s).items():
            self.seen.nodes[rank].memory.append(answer["gbs"])
        sharing = [rank for rank in self._alive() if self.seen.nodes[rank].shared]
        for rank, answer in (self._ask("writing", {"do": "disk"}, self._limit_s, sharing) if disk else {}).items():
            self.seen.nodes[rank].write.append(answer["mbs"])
            self.seen.nodes[rank].create_ms.append(answer["create_ms"])
        for pairs in meetings(len(self.seen.nodes)):
            self._meet([pair for pair in pairs if set(pair) <= set(self._reachable())])

    def _meet(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Pairs that have no node in common, all at the same time. One whose link failed before is not tried again."""
        pairs = [pair for pair in pairs if not self._link(*pair).problem]
        for serving, calling in pairs:
            facts = self.seen.nodes[serving].facts
            self._meeting += 1
            self._pool.tell({"do": "serve", "meeting": self._meeting}, [serving])
            order = {"do": "call", "meeting": self._meeting, "address": facts["address"], "port": facts["port"]}
            self._pool.tell(order | {"seconds": LINK_S}, [calling])
        answers = self._collect("its links", self._limit_s, [rank for pair in pairs for rank in pair])
        for serving, calling in pairs:
            if {serving, calling} - answers.keys():
                continue  # a node that is lost says nothing about a link
            found, there, back = answers[calling], self._link(calling, serving), self._link(serving, calling)
            if problem := found.get("problem") or answers[serving].get("problem"):
                there.problem = back.problem = problem
                continue
            there.gbit.append(found["out_gbit"])
            back.gbit.append(found["back_gbit"])
            for link in (there, back):
                link.latency_us.append(found["latency_us"])

    def _link(self, source: int, target: int) -> Link:
        return self._links.setdefault((source, target), Link(source=source, target=target))

    def _reachable(self) -> list[int]:
        return [rank for rank in self._alive() if "address" in self.seen.nodes[rank].facts]

    # ---- asking

    def _alive(self) -> list[int]:
        return [node.rank for node in self.seen.nodes if node.lost is None]

    def _ask(
        self, what: str, order: dict[str, Any], limit_s: float, ranks: Sequence[int] | None = None
    ) -> dict[int, dict[str, Any]]:
        ranks = self._alive() if ranks is None else ranks
        self._pool.tell(order, ranks)
        return self._collect(what, limit_s, ranks)

    def _collect(self, what: str, limit_s: float, ranks: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
        """The answers of those who gave one. Who gave none, or an error, is not asked again."""
        ranks = self._alive() if ranks is None else ranks
        answers = self._pool.collect(limit_s, ranks)
        gone = self._pool.gone()
        for rank in ranks:
            answer = answers.get(rank)
            if answer is None:
                why = "its worker ended" if rank in gone else f"no answer within {limit_s:g} s"
                said = self._pool.said(rank)
                self.seen.nodes[rank].lost = f"{what}: {why}" + (f": {said}" if said else "")
            elif "error" in answer:
                self.seen.nodes[rank].lost = f"{what}: {answer['error']}"
        self._mark_late(what, {rank: answer.pop("took") for rank, answer in answers.items() if "took" in answer})
        return {rank: answer for rank, answer in answers.items() if "error" not in answer}

    def _mark_late(self, what: str, took: dict[int, float]) -> None:
        for rank, seconds in took.items():
            others = [each for other, each in took.items() if other != rank]
            if others and seconds - statistics.median(others) > LATE_S:
                self.seen.nodes[
                    rank
                ].late = f"{what} took it {seconds:.0f} s, the others {statistics.median(others):.1f} s"


def meetings(nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Every node meets every other one: in each list pairs without a node in common, as in a tournament. Of many nodes, some of the lists.

    Who calls changes with each list, so that no node always does.
    """
    count = nodes + nodes % 2
    turns = range(count - 1)
    step = max(1, -(-len(turns) // MOST_PARTNERS))
    for number, turn in enumerate(turns[::step]):
        circle = [0, *(1 + (place + turn) % (count - 1) for place in range(count - 1))]
        pairs = [(circle[place], circle[-1 - place]) for place in range(count // 2)]
        yield [pair if number % 2 else pair[::-1] for pair in pairs if max(pair) < nodes]


def examine(placement: Placement, folder: Path, limit_s: float, tell: Tell) -> Seen:
    """Every node, core and link of a placement; RunFailed and InputError where nothing could be started."""
    return Examination(placement, folder, limit_s, tell).run()
