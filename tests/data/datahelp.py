"""Small data sets with catalog entries, naive readers to compare with, a web server that misbehaves."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lockstep.data.catalog import Entry, Mirror, Part

LOCKSTEP = Path(sys.executable).parent / "lockstep"
HERE = Path(__file__).parent


# ---- small sets ----


def idx(sizes: tuple[int, ...], values: bytes) -> bytes:
    return struct.pack(">BBBB", 0, 0, 8, len(sizes)) + b"".join(struct.pack(">I", n) for n in sizes) + values


def digest(content: bytes, kind: str = "sha256") -> str:
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


def idx_files(train: int, test: int, side: tuple[int, int], classes: int, seed: int) -> dict[str, bytes]:
    dice = random.Random(seed)
    files = {}
    for split, count in (("train", train), ("t10k", test)):
        size = side[0] * side[1]
        files[f"{split}-images-idx3-ubyte"] = idx((count, *side), dice.randbytes(count * size))
        files[f"{split}-labels-idx1-ubyte"] = idx((count,), bytes(dice.randrange(classes) for _ in range(count)))
    return files


def idx_entry(
    files: dict[str, bytes],
    train: int,
    test: int,
    side: tuple[int, int],
    name: str = "mini",
    mirrors: tuple[str, ...] = (),
    classes: int = 10,
) -> Entry:
    parts = tuple(
        Part(
            part,
            len(content),
            digest(content),
            "train" if part.startswith("train") else "test",
            "images" if "images" in part else "labels",
        )
        for part, content in files.items()
    )
    return Entry(
        name, "idx", (1, *side), tuple(str(n) for n in range(classes)), train, test, "none", "for tests",
        parts, folders=("MNIST/raw", "", "raw"), mirrors=tuple(Mirror(base) for base in mirrors),
    )  # fmt: skip


def mini(mirrors: tuple[str, ...] = (), scale: int = 1) -> tuple[Entry, dict[str, bytes]]:
    """The usual small set: always the same, so that other processes can make it, too."""
    train, test, side = 40 * scale, 10 * scale, (6, 5)
    files = idx_files(train, test, side, 10, seed=7)
    return idx_entry(files, train, test, side, mirrors=mirrors), files


def cifar_rows(count: int, seed: int, shape: tuple[int, int, int] = (3, 32, 32)) -> bytes:
    dice = random.Random(seed)
    size = shape[0] * shape[1] * shape[2]
    return b"".join(bytes([dice.randrange(10)]) + dice.randbytes(size) for _ in range(count))


def cifar_entry(
    batches: list[bytes],
    test: bytes,
    mirrors: tuple[Mirror, ...] = (),
    shape: tuple[int, int, int] = (3, 32, 32),
) -> Entry:
    row = 1 + shape[0] * shape[1] * shape[2]
    parts = [
        Part(f"data_batch_{n}.bin", len(content), digest(content, "md5"), "train", "batch")
        for n, content in enumerate(batches, 1)
    ]
    parts.append(Part("test_batch.bin", len(test), digest(test, "md5"), "test", "batch"))
    return Entry(
        "minicifar", "cifar", shape, tuple("abcdefghij"), sum(map(len, batches)) // row, len(test) // row,
        "none", "for tests", tuple(parts),
        folders=("cifar-10-batches-bin", "cifar-10-batches-py", ""),
        archives=("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"), mirrors=mirrors,
    )  # fmt: skip


def pickled(rows: bytes, protocol: int = 2, shape: tuple[int, int, int] = (3, 32, 32)) -> bytes:
    """A batch as the python archive has it."""
    import numpy as np

    table = np.frombuffer(rows, np.uint8).reshape(-1, 1 + shape[0] * shape[1] * shape[2])
    batch = {
        b"batch_label": b"training batch 1 of 5",
        b"labels": table[:, 0].tolist(),
        b"data": np.ascontiguousarray(table[:, 1:]),
        b"filenames": [b"x.png"] * len(table),
    }
    return pickle.dumps(batch, protocol=protocol)


def as_python_2(raw: bytes) -> bytes:
    """Protocol 2 with the module paths of the numpy of those days."""
    return raw.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def tar_gz(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def lay_out(folder: Path, files: dict[str, bytes], gz: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if gz:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))
        else:
            (folder / name).write_bytes(content)
    return folder


# ---- naive readers: one sample at a time, with nothing but struct ----


def naive_idx_image(content: bytes, index: int) -> list[list[int]]:
    _, _, kind, rank = struct.unpack_from(">BBBB", content)
    assert (kind, rank) == (8, 3)
    _, height, width = struct.unpack_from(">III", content, 4)
    start = 16 + index * height * width
    return [list(struct.unpack_from(f"{width}B", content, start + row * width)) for row in range(height)]


def naive_idx_label(content: bytes, index: int) -> int:
    return int(struct.unpack_from("B", content, 8 + index)[0])


def naive_batch_sample(content: bytes, index: int, shape: tuple[int, int, int]) -> tuple[int, list[list[list[int]]]]:
    channels, height, width = shape
    start = index * (1 + channels * height * width)
    label = struct.unpack_from("B", content, start)[0]
    planes = [
        [
            list(struct.unpack_from(f"{width}B", content, start + 1 + (channel * height + row) * width))
            for row in range(height)
        ]
        for channel in range(channels)
    ]
    return label, planes


# ---- a web server on loopback ----


class Web:
    """Serves files with ranges, and misbehaves where told to."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.requests: Counter[str] = Counter()
        self.ranges: list[tuple[str, str]] = []
        self.sent: Counter[str] = Counter()
        self.cut_after: int | None = None  # bytes of a body after which the connection is closed
        self.cuts = 0  # how many times to do that
        self.failures = 0  # how many times to answer 503 first
        self.status: int | None = None
        self.ranged = True
        self.etag = '"one"'
        self.before: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                web.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # killed clients are the point
        self.base = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        name = handler.path.lstrip("/")
        asked = handler.headers.get("Range")
        with self._lock:
            self.requests[name] += 1
            if asked:
                self.ranges.append((name, asked))
            fail = self.failures > 0
            self.failures -= fail
        self.before()
        status = 503 if fail else self.status or (200 if name in self.files else 404)
        if status != 200:
            handler.send_response(status)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        self._send(handler, name, asked)

    def _send(self, handler: http.server.BaseHTTPRequestHandler, name: str, asked: str | None) -> None:
        body = self.files[name]
        start = 0
        same = handler.headers.get("If-Range") in (None, self.etag)
        if asked and self.ranged and same:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                handler.send_response(416)
                handler.send_header("Content-Length", "0")
                handler.end_headers()
                return
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            handler.send_response(200)
        rest = body[start:]
        handler.send_header("Content-Length", str(len(rest)))
        if self.etag:
            handler.send_header("ETag", self.etag)
        handler.end_headers()
        with self._lock:
            cut = self.cut_after is not None and self.cuts > 0 and len(rest) > self.cut_after
            self.cuts -= cut
        part = rest[: self.cut_after] if cut else rest
        self.sent[name] += len(part)
        handler.wfile.write(part)
        if cut:
            handler.wfile.flush()
            handler.close_connection = True


# ---- other processes ----


def environment(cache: Path, **extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LOCKSTEP_")}
    return {**kept, "LOCKSTEP_DATA": str(cache), **extra}


def shell(command: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a line through a real shell, with `lockstep` in the path."""
    path = f"{LOCKSTEP.parent}{os.pathsep}{env.get('PATH', '')}"
    return subprocess.run(
        ["/bin/bash", "-c", command],
        env={**env, "PATH": path},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def start_opener(cache: Path, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    """A process that opens the usual small set (see opener.py)."""
    command = [sys.executable, str(HERE / "opener.py"), *arguments]
    env = environment(cache, **extra)
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
