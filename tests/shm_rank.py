"""One rank of a long-lived group for test_shm.py: it runs the pieces of code that it is sent, and sends back `result`.

`python shm_rank.py STORE_FILE RANK RANKS BACKEND TIMEOUT_S`
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist


def numbers(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The data of a rank: the same wherever they are made."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -100, 100, (count,), generator=generator).to(dtype)


def write(pipe: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


def read(pipe: BinaryIO) -> Any:
    head = pipe.read(8)
    return pickle.loads(pipe.read(struct.unpack("<Q", head)[0])) if len(head) == 8 else None


class Session:
    """The group, from the test's side."""

    def __init__(
        self, folder: Path, ranks: int, hosts: str, timeout: float = 20, name: str = "session", backend: str = "shm"
    ) -> None:
        """`hosts` is one letter a rank: ranks with the same letter are told that they share a host."""
        self.ranks, self.hosts = range(ranks), hosts
        store = folder / f"{name}-{hosts}"
        self.processes = []
        for rank in self.ranks:
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            environment["LOCKSTEP_HOST_KEY"] = hosts[rank]
            words = [sys.executable, __file__, str(store), str(rank), str(ranks), backend, str(timeout)]
            pipe = subprocess.PIPE
            self.processes.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, env=environment))

    def send(self, code: str, **values: Any) -> None:
        for process in self.processes:
            if process.poll() is None:
                write(process.stdin, (code, values))  # type: ignore[arg-type]

    def receive(self, rank: int) -> Any:
        return read(self.processes[rank].stdout)  # type: ignore[arg-type]

    def run(self, code: str, **values: Any) -> list[Any]:
        """The `result` of every rank."""
        self.send(code, **values)
        answers = [self.receive(rank) for rank in self.ranks]
        for rank, answer in enumerate(answers):
            assert answer is not None, f"rank {rank} ended"
            assert answer[0] == "ok", f"rank {rank}: {answer[1]}"
        return [answer[1] for answer in answers]

    def close(self) -> list[int]:
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        return [process.wait(20) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def main() -> None:
    from lockstep.backends import group

    file, rank, ranks, backend, timeout = sys.argv[1:]
    # gloo prints on stdout, which is ours for answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    store = dist.FileStore(file, int(ranks))
    dist.init_process_group(
        group._registered(backend),
        store=store,
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=float(timeout)),
    )
    known: dict[str, Any] = {
        "torch": torch,
        "dist": dist,
        "numbers": numbers,
        "rank": int(rank),
        "ranks": int(ranks),
    }
    while (request := read(sys.stdin.buffer)) is not None:
        code, values = request
        names = {**known, **values}
        try:
            exec(code, names)
            write(answers, ("ok", names.get("result")))
        except Exception as error:
            write(answers, (type(error).__name__, str(error)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
