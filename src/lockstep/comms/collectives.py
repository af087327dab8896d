"""Every collective as a case that can be timed and checked (case.py), through the public calls of torch.distributed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.comms.case import Case, difference
from lockstep.comms.plan import OWN
from lockstep.parallel.ranks import Rank

# A chain of sums grows by the number of ranks with each call; float32 ends at 3e38.
LARGEST_EXPONENT = 100


class AllReduce(Case):
    """In place, so each call works on the result of the one before: one wrong call shows at the end of the chain."""

    name = "all_reduce"

    def fill(self, seed: int) -> None:
        self.seed = seed
        self.output = self.of(self.rank)

    def call(self) -> None:
        dist.all_reduce(self.output)

    def longest_chain(self) -> int:
        return max(1, int(LARGEST_EXPONENT / math.log2(self.world)))

    def check(self, calls: int) -> str | None:
        wanted = self.sum().double() * float(self.world) ** (calls - 1)
        # Each call rounds by 6e-8 at most for each rank's addend; a rank left out is wrong by 1 / (251 ranks) or more.
        return difference(self.output.double(), wanted, 2e-7 * calls * self.world)


class Own(AllReduce):
    """The user's own function that sums a tensor over all ranks in place."""

    name = OWN
    function: Callable[[torch.Tensor], object]

    def call(self) -> None:
        type(self).function(self.output)


class Broadcast(Case):
    name = "broadcast"

    def fill(self, seed: int) -> None:
        self.seed = seed
        self.output = self.of(0) if self.rank == 0 else self.spoilt(self.whole)

    def call(self) -> None:
        dist.broadcast(self.output, 0)

    def wanted(self) -> torch.Tensor:
        return self.of(0)


class Reduce(Case):
    """What the other ranks' buffers hold afterwards is not defined, so only one call after a fill can be checked."""

    name = "reduce"

    def fill(self, seed: int) -> None:
        self.seed = seed
        self.output = self.of(self.rank)

    def call(self) -> None:
        dist.reduce(self.output, 0)

    def check(self, calls: int) -> str | None:
        return difference(self.output, self.sum()) if self.rank == 0 and calls == 1 else None


class AllGather(Case):
    name = "all_gather"

    def fill(self, seed: int) -> None:
        super().fill(seed)
        self.input = self.part_of(self.rank, self.rank).clone()
        self.lists = self.parts(self.output)

    def call(self) -> None:
        dist.all_gather_into_tensor(self.output, self.input)

    def wanted(self) -> torch.Tensor:
        return torch.cat([self.part_of(source, source) for source in range(self.world)])


class AllGatherList(AllGather):
    name = "all_gather_list"

    def call(self) -> None:
        dist.all_gather(self.lists, self.input)


class ReduceScatter(Case):
    name = "reduce_scatter"

    def fill(self, seed: int) -> None:
        super().fill(seed)
        self.output = self.spoilt(self.part)
        self.lists = self.parts(self.input)

    def call(self) -> None:
        dist.reduce_scatter_tensor(self.output, self.input)

    def wanted(self) -> torch.Tensor:
        return self.parts(self.sum())[self.rank]


class ReduceScatterList(ReduceScatter):
    name = "reduce_scatter_list"

    def call(self) -> None:
        dist.reduce_scatter(self.output, self.lists)


class Gather(Case):
    name = "gather"

    def fill(self, seed: int) -> None:
        super().fill(seed)
        self.input = self.part_of(self.rank, self.rank).clone()
        self.lists = self.parts(self.output) if self.rank == 0 else None

    def call(self) -> None:
        dist.gather(self.input, self.lists, 0)

    def wanted(self) -> torch.Tensor | None:
        if self.rank:
            return None
        return torch.cat([self.part_of(source, source) for source in range(self.world)])


class Scatter(Case):
    name = "scatter"

    def fill(self, seed: int) -> None:
        super().fill(seed)
        self.output = self.spoilt(self.part)
        self.lists = self.parts(self.input) if self.rank == 0 else None

    def call(self) -> None:
        dist.scatter(self.output, self.lists, 0)

    def wanted(self) -> torch.Tensor:
        return self.part_of(0, self.rank)


class AllToAll(Case):
    name = "all_to_all"

    def fill(self, seed: int) -> None:
        super().fill(seed)
        self.lists = (self.parts(self.output), self.parts(self.input))

    def call(self) -> None:
        dist.all_to_all_single(self.output, self.input)

    def wanted(self) -> torch.Tensor:
        return torch.cat([self.part_of(source, self.rank) for source in range(self.world)])


class AllToAllList(AllToAll):
    name = "all_to_all_list"

    def call(self) -> None:
        dist.all_to_all(*self.lists)


class SendRecv(Case):
    """A ring, as in nccl-tests: every rank sends to the next one and receives from the one before."""

    name = "send_recv"

    def __init__(self, size: int, rank: Rank, device: torch.device) -> None:
        super().__init__(size, rank, device)
        self.next, self.previous = (self.rank + 1) % self.world, (self.rank - 1) % self.world

    def call(self) -> None:
        if self.device.type == "cuda":  # NCCL wants both of them in one group
            receive = dist.P2POp(dist.irecv, self.output, self.previous)
            works = dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, self.input, self.next)])
        else:
            # The receive is posted first: a message then always has a place to go to.
            started = (dist.irecv(self.output, self.previous), dist.isend(self.input, self.next))
            works = [work for work in started if work is not None]
        for work in works:
            work.wait()

    def wanted(self) -> torch.Tensor:
        return self.of(self.previous)


class Barrier(Case):
    """Nobody may leave before the last one came. The ranks of one host share a clock, which tells."""

    name = "barrier"
    LATE_S = 0.02

    def __init__(self, size: int, rank: Rank, device: torch.device) -> None:
        super().__init__(size, rank, device)
        self._moments: list[int] | None = None

    def fill(self, seed: int) -> None:
        pass

    def call(self) -> None:
        dist.barrier()

    def check(self, calls: int) -> str | None:
        if calls == 1:
            time.sleep(self.LATE_S if self.rank == self.world - 1 else 0.0)
            came = time.monotonic_ns()
            dist.barrier()
            self._moments = [came, time.monotonic_ns()]
        return None

    def moments(self) -> list[int] | None:
        return self._moments


_KINDS: tuple[type[Case], ...] = (
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    AllGatherList,
    ReduceScatter,
    ReduceScatterList,
    Gather,
    Scatter,
    AllToAll,
    AllToAllList,
    SendRecv,
    Barrier,
    Own,
)
CASES: dict[str, type[Case]] = {kind.name: kind for kind in _KINDS}
