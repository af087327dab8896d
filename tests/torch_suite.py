"""One rank that runs PyTorch's own distributed tests on gloo, then on our backends; test_torch_suite.py starts a set of them.

`python torch_suite.py FOLDER PORT RANK RANKS PREFIX BACKEND …`; under mpirun RANK is `-`. PREFIX is how the tests' names begin:
`test_` for all, `test_ours_` for those of this file.

PyTorch starts processes for every test. Here the ranks stay, and every test has a process group of its own: that is what
is under test, and importing torch a thousand times is not. The first backend, gloo, is the reference: it runs all tests,
the others those that it passed. Each rank writes FOLDER/results-RANK.json.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import types
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=20)
Results = dict[str, tuple[str, str]]
"""By the test's name: passed, skipped or failed, and why."""


def load(folder: Path, ranks: int) -> Any:
    """PyTorch's module. Its decorators decide by environment variables which tests a backend has: all take those of gloo."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(ranks), "INIT_METHOD": f"file://{folder}/init"}
    # It needs the package expecttest for texts that are kept in source files, which no distributed test has.
    stub: Any = types.ModuleType("expecttest")
    stub.TestCase, stub.ACCEPT = unittest.TestCase, False
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


class Name(str):
    """A backend's name, that stands for gloo where a test asks which devices it has."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str(self) == other


class Ours:
    """What else has to work as it does with gloo."""

    def test_ours_compiled_model_around_ddp(self) -> None:
        """The compiler looks at all that is called in the model, DDP's exchanges too (torch_private.untraced)."""
        torch._dynamo.reset()
        torch.manual_seed(dist.get_rank())
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 1))
        net = torch.compile(torch.nn.parallel.DistributedDataParallel(model), backend="eager")
        for _ in range(2):
            model.zero_grad()
            net(torch.randn(4, 6)).square().mean().backward()
        for parameter in model.parameters():
            mean = parameter.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / dist.get_world_size(), parameter.grad)

    def test_ours_compiled_conv_net_around_ddp_trains_as_on_gloo(self) -> None:
        if dist.get_world_size() != 4:
            raise unittest.SkipTest("compiling takes long: with four ranks only")

        def losses(group: dist.ProcessGroup | None) -> list[float]:
            torch._dynamo.reset()
            torch.manual_seed(5)
            model = torch.nn.Sequential(
                torch.nn.Conv2d(1, 4, 3),
                torch.nn.BatchNorm2d(4),
                torch.nn.ReLU(),
                torch.nn.Flatten(),
                torch.nn.Linear(144, 3),
            )
            net = torch.compile(torch.nn.parallel.DistributedDataParallel(model, process_group=group))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(dist.get_rank())  # each rank has its own samples
            images, labels = torch.randn(4, 8, 1, 8, 8), torch.randint(3, (4, 8))
            found = []
            for image, label in zip(images, labels, strict=True):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(image), label)
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found

        reference = losses(dist.new_group(backend="gloo"))
        assert len(set(reference)) == 4
        torch.testing.assert_close(losses(None), reference, rtol=1e-5, atol=1e-6)

    def test_ours_message_while_a_collective_is_under_way(self) -> None:
        """The others begin the collective only when they have heard from rank 0, which is in it."""
        rank, others = dist.get_rank(), range(1, dist.get_world_size())
        mine, word = torch.full((5,), float(rank)), torch.zeros(1)
        if rank == 0:
            work = dist.all_reduce(mine, async_op=True)
            answers = [torch.zeros(1) for _ in others]
            messages = [dist.isend(torch.tensor([7.0]), other) for other in others]
            messages += [dist.irecv(answer, other) for answer, other in zip(answers, others, strict=True)]
            for message in [*messages, work]:
                message.wait()
            assert [answer.item() for answer in answers] == [7.0 * other for other in others]
        else:
            dist.irecv(word, 0).wait()
            answer = dist.isend(word * rank, 0)
            dist.all_reduce(mine)
            answer.wait()
        assert mine.eq(sum(range(dist.get_world_size()))).all()


def leave() -> None:
    """End the group of a test, also one that did not come about.

    torch names groups by counting them, and it counts a start that fails too. The rank that failed would look for the others
    under another name than theirs, in every test from then on."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0


class Suite:
    def __init__(self, folder: Path, store: dist.Store, rank: int, ranks: int, prefix: str) -> None:
        self.folder, self.store, self.rank, self.ranks = folder, store, rank, ranks
        self.module = load(folder, ranks)

        class Test(self.module.TestDistBackend, self.module.DistributedTest._DistTestBase, Ours):  # type: ignore[misc,name-defined]
            pass

        self.case = Test
        names = unittest.TestLoader().getTestCaseNames(Test)
        names = [name for name in names if name.startswith(prefix)]
        self.names = [name for name in names if not getattr(getattr(Test, name), "__unittest_skip__", False)]
        # A collection after each test, because models hold process groups, must not look at all that torch has made.
        gc.collect()
        gc.freeze()

    def exchange(self, where: str, value: Any = None) -> list[Any]:
        """Every rank's value, when all have come."""
        self.store.set(f"{where}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{where}/{other}")) for other in range(self.ranks)]

    def run(self, backend: str, names: list[str]) -> Results:
        from lockstep.backends import group

        self.module.BACKEND = Name(group._registered(backend))  # for the groups that tests make themselves
        results = {}
        for name in names:
            self.exchange(f"{backend}/{name}/begin")
            results[name] = self.outcome(backend, name)
            gc.collect()
            # Nobody leaves a group while another one may still be using it.
            self.exchange(f"{backend}/{name}/end")
            leave()
        return results

    def outcome(self, backend: str, name: str) -> tuple[str, str]:
        place = self.folder / backend / name
        for part in ("barrier", "test_dir"):
            (place / part).mkdir(parents=True, exist_ok=True)
        os.environ |= {"TEMP_DIR": str(place), "TORCH_DISTRIBUTED_DEBUG": "OFF"}
        dist.set_debug_level_from_env()
        module = self.module
        module.INIT_METHOD, module.Barrier.barrier_id = f"file://{place}/init", 0
        try:
            dist.init_process_group(
                module.BACKEND,
                store=dist.PrefixStore(f"{backend}/{name}", self.store),
                rank=self.rank,
                world_size=self.ranks,
                timeout=TIMEOUT,
            )
            test = self.case(name)
            test.rank, test.file_name = self.rank, str(place / "file")
            torch.manual_seed(1234)
            getattr(test, name)()
        except (
            unittest.SkipTest,
            SystemExit,
        ) as reason:  # PyTorch's ranks leave with a code that stands for the reason
            return "skipped", str(reason)
        except Exception:
            return "failed", traceback.format_exc()
        return "passed", ""


def main(folder: Path, port: int, rank: int, ranks: int, prefix: str, backends: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=100))
    suite = Suite(folder, store, rank, ranks, prefix)
    results, names = {}, suite.names
    for backend in backends:
        results[backend] = suite.run(backend, names)
        (folder / f"results-{rank}.json").write_text(json.dumps(results))
        if backend == backends[0]:
            everyones: list[Results] = suite.exchange("reference", results[backend])
            outcomes = {name: {told[name][0] for told in everyones} for name in names}
            # Some tests skip the ranks that they have no part for.
            names = [name for name, found in outcomes.items() if "passed" in found and "failed" not in found]
    suite.exchange("over")


if __name__ == "__main__":
    where, at, rank_word, *rest = sys.argv[1:]
    if rank_word == "-":
        from lockstep.backends.mpi import group as mpi_group

        mpi_group.register()
        from mpi4py import MPI

        rank_word = str(MPI.COMM_WORLD.rank)
    main(Path(where), int(at), int(rank_word), int(rest[0]), rest[1], rest[2:])
