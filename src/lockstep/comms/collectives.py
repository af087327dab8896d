"""Every collective as a case that can be timed and checked (case.py), through the public calls of torch.distributed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.backends.costs.plan import OWN, OWN_WITHIN
from lockstep.comms.case import Case, difference

# A chain of sums grows by the number of ranks with each call; float32 ends at 3e38.
LARGEST_EXPONENT = 100


class InPlace(Case):
    """Each call works on the result of the one before."""

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        mine = self.of(self.rank)
        return mine, mine


class AllReduce(InPlace):
    """One wrong call shows at the end of the chain."""

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

    function: Callable[[torch.Tensor], object]

    def call(self) -> None:
        type(self).function(self.output)


class OwnWithin(Own):
    """The same on a part of a larger tensor, of which nothing else may change."""

    BESIDE = 5

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        self._whole = torch.full((self.whole + 2 * self.BESIDE,), -1.0, device=self.device)
        mine = self._whole[self.BESIDE : self.BESIDE + self.whole]
        mine.copy_(self.of(self.rank))
        return mine, mine

    def check(self, calls: int) -> str | None:
        beside = torch.cat([self._whole[: self.BESIDE], self._whole[self.BESIDE + self.whole :]])
        if not bool((beside == -1.0).all()):
            return "it writes beyond the tensor that it was given"
        return super().check(calls)


class Broadcast(Case):
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        mine = self.of(0) if self.rank == 0 else self.spoilt(self.whole)
        return mine, mine

    def call(self) -> None:
        dist.broadcast(self.output, 0)

    def wanted(self) -> torch.Tensor:
        return self.of(0)


class Reduce(InPlace):
    """What the other ranks' buffers hold afterwards is not defined, so only one call after a fill can be checked."""

    def call(self) -> None:
        dist.reduce(self.output, 0)

    def check(self, calls: int) -> str | None:
        return difference(self.output, self.sum()) if self.rank == 0 and calls == 1 else None


class AllGather(Case):
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.part_of(self.rank, self.rank).clone(), self.spoilt(self.whole)

    def call(self) -> None:
        dist.all_gather_into_tensor(self.output, self.input)

    def wanted(self) -> torch.Tensor | None:
        return torch.cat([self.part_of(source, source) for source in range(self.world)])


class AllGatherList(AllGather):
    def call(self) -> None:
        dist.all_gather(self.outputs, self.input)


class Gather(AllGather):
    def fill(self, seed: int) -> None:
        super().fill(seed)
        self.gathered = self.outputs if self.rank == 0 else None

    def call(self) -> None:
        dist.gather(self.input, self.gathered, 0)

    def wanted(self) -> torch.Tensor | None:
        return super().wanted() if self.rank == 0 else None


class ReduceScatter(Case):
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.of(self.rank), self.spoilt(self.part)

    def call(self) -> None:
        dist.reduce_scatter_tensor(self.output, self.input)

    def wanted(self) -> torch.Tensor:
        return self.parts(self.sum())[self.rank]


class ReduceScatterList(ReduceScatter):
    def call(self) -> None:
        dist.reduce_scatter(self.output, self.inputs)


class Scatter(ReduceScatter):
    def fill(self, seed: int) -> None:
        super().fill(seed)
        self.scattered = self.inputs if self.rank == 0 else None

    def call(self) -> None:
        dist.scatter(self.output, self.scattered, 0)

    def wanted(self) -> torch.Tensor:
        return self.part_of(0, self.rank)


class AllToAll(Case):
    def call(self) -> None:
        dist.all_to_all_single(self.output, self.input)

    def wanted(self) -> torch.Tensor:
        return torch.cat([self.part_of(source, self.rank) for source in range(self.world)])


class AllToAllList(AllToAll):
    def call(self) -> None:
        dist.all_to_all(self.outputs, self.inputs)


class SendRecv(Case):
    """A ring, as in nccl-tests: every rank sends to the next one and receives from the one before."""

    def fill(self, seed: int) -> None:
        super().fill(seed)
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

    LATE_S = 0.02

    def call(self) -> None:
        dist.barrier()

    def check(self, calls: int) -> str | None:
        if calls == 1:
            time.sleep(self.LATE_S if self.rank == self.world - 1 else 0.0)
            came = time.monotonic_ns()
            dist.barrier()
            self.moments = [came, time.monotonic_ns()]
        return None


CASES: dict[str, type[Case]] = {
    "all_reduce": AllReduce,
    "broadcast": Broadcast,
    "reduce": Reduce,
    "all_gather": AllGather,
    "all_gather_list": AllGatherList,
    "reduce_scatter": ReduceScatter,
    "reduce_scatter_list": ReduceScatterList,
    "gather": Gather,
    "scatter": Scatter,
    "all_to_all": AllToAll,
    "all_to_all_list": AllToAllList,
    "send_recv": SendRecv,
    "barrier": Barrier,
    OWN: Own,
    OWN_WITHIN: OwnWithin,
}
