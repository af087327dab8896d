"""Data files and checkpoints that are damaged or made to hold us up: refused, with a reason, in bounded time and memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import random
import struct
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import count, examples, watched
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.data import decode
from lockstep.data.catalog import MNIST, Part
from lockstep.data.unpickle import load_batch, load_plain
from lockstep.errors import InputError

SEEDS = st.integers(0, 2**32)
# Nothing that is made here is larger than a megabyte; what reads it may copy it a few times.
MOST_MEMORY = 64 << 20


def idx(rng: random.Random) -> bytes:
    sizes = [rng.choice((0, 1, 3, 2**31, 2**32 - 1)) for _ in range(rng.choice((1, 3, 4, 255)))]
    head = bytes((0, 0, rng.choice((8, 8, 8, 13)), len(sizes)))
    return head + struct.pack(f">{len(sizes)}I", *sizes) + rng.randbytes(rng.choice((0, 9, 2000)))


def batch(rng: random.Random) -> bytes:
    content = {
        b"data": np.zeros((rng.choice((0, 1, 5)), 3072), rng.choice(("u1", "u1", "f4"))),
        b"labels": [rng.choice((0, 9, 300, -1, "x"))] * 5,
    }
    return pickle.dumps(content, protocol=rng.choice((0, 1, 2, 3, 4, 5)))


def odd_pickle(rng: random.Random) -> bytes:
    """A few dozen instructions, in any order."""
    names = [
        b"cnumpy\nndarray\n",
        b"cnumpy\ndtype\n",
        b"cnumpy.core.multiarray\n_reconstruct\n",
        b"c_codecs\nencode\n",
        b"cos\nsystem\n",
    ]
    ops = [b"(", b"]", b"}", b")", b"N", b"K\x05", b"J\x00\x00\x00\x7f", b"J\xff\xff\xff\x7f", b"U\x02u1", b"\x85", b"\x86", b"\x87", b"R", b"b", b"t", b"l", b"d", b"a", b"e",
           b"s", b"u", b"0", b"1", b"2", b"q\x00", b"h\x00", b"r\xff\xff\xff\x7f", b"B\xff\xff\xff\x7f", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", b"I99999999\n", b"L" + b"9" * 5000 + b"L\n"]  # fmt: skip
    return b"\x80\x02" + b"".join(rng.choice(ops + names) for _ in range(rng.randrange(60))) + b"."


def archive(rng: random.Random) -> bytes:
    out = io.BytesIO()
    kinds = (tarfile.REGTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, b"Z")  # fmt: skip
    with tarfile.open(
        fileobj=out, mode=rng.choice(("w", "w:gz", "w:bz2", "w:xz")), format=rng.choice((0, 1, 2))
    ) as made:
        for _ in range(rng.randrange(5)):
            member = tarfile.TarInfo(rng.choice((MNIST.parts[0].name, "../x", "/x", "a" * 200, "é", "data_batch_1")))
            member.type, member.size = rng.choice(kinds), rng.choice((0, 5, 600))
            member.linkname = rng.choice(("", "x", "../../x"))
            with suppress(ValueError):  # one of the formats has no room for a long name
                made.addfile(member, io.BytesIO(rng.randbytes(600)))
    data = out.getvalue()
    return data * rng.choice((1, 1, 2, 40))


def chained(rng: random.Random) -> bytes:
    link = tarfile.TarInfo("././@LongLink")
    link.type, link.size = (
        rng.choice((tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE)),
        rng.choice((2, 1 << 21, 1 << 32)),
    )
    return (link.tobuf(tarfile.GNU_FORMAT) + b"x\0".ljust(512, b"\0")) * rng.choice((1, 300, 3000))


def bomb(rng: random.Random) -> bytes:
    zeros = b"\0" * (1 << rng.randrange(10, 27))
    return rng.choice((gzip.compress, bz2.compress, lzma.compress))(zeros)


def members(rng: random.Random) -> bytes:
    return gzip.compress(rng.randbytes(rng.choice((0, 0, 5)))) * rng.choice((1, 500, 20_000))


MAKERS: list[Callable[[random.Random], bytes]] = [idx, batch, odd_pickle, archive, chained, bomb, members]


def damaged(rng: random.Random, data: bytes) -> bytes:
    kind = rng.randrange(4)
    if kind == 0 or not data:
        return data
    if kind == 1:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 50))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


@examples("archives")
@given(seed=SEEDS)
@example(seed=8270)  # 65 kB that were unpacked to 48 MB, and held twice
def test_archives(seed: int) -> None:
    rng = random.Random(seed)
    data = damaged(rng, rng.choice(MAKERS)(rng))
    part: Part = rng.choice(MNIST.parts)
    readers: list[Callable[[], Any]] = [
        lambda: decode.plain(data, part, rng.choice(("idx", "cifar"))),
        lambda: list(decode.members(io.BytesIO(data), {part.name, "data_batch_1"})),
        lambda: decode.read_idx(data),
        lambda: decode.read_batch(data, (3, 32, 32)),
        lambda: load_plain(data),
        lambda: load_batch(data),
        lambda: decode.label_list(data),
        lambda: decode.picture_rows(data, b"\0" * 10),
    ]
    count("archives")
    tracemalloc.start()
    for reader in readers:
        with watched(), suppress(decode.Rejected):
            reader()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < MOST_MEMORY, f"{most / 1e6:.0f} MB for {len(data):,} bytes"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real one, of a run in this process."""
    from support import train_here

    folder = tmp_path_factory.mktemp("kept")
    words = ("data=embedded", "train_limit=64", "test_limit=32", "epochs=1", "backend=gloo", "threads=1")

    return Path(train_here(folder, *words, checkpoint_every=1)["run"])


def _odd(rng: random.Random) -> Any:
    return rng.choice((None, 0, -1, 2**70, 1.5, float("nan"), "x", [], {}, [1, 2], {"step": "x"}, True))


@examples("checkpoints")
@given(seed=SEEDS)
def test_checkpoints(seed: int, checkpoint: Path) -> None:
    """Cut, changed, or a valid file of other contents with a digest that fits: taken, or refused in one line. Never executed."""
    import json
    import shutil

    import torch

    from lockstep.training.checkpoint import CHECKPOINTS, checkpoints_in, load, save_whole

    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        shutil.copytree(checkpoint / CHECKPOINTS, run / CHECKPOINTS)
        name = checkpoints_in(run / CHECKPOINTS)[0]
        path = run / CHECKPOINTS / f"{name}.pt"
        about = json.loads(path.with_suffix(".json").read_text())
        kind = rng.randrange(4)
        if kind == 0:
            path.write_bytes(damaged(rng, path.read_bytes()))
        elif kind == 1:
            content = torch.load(path, weights_only=True)
            holder: Any = content if rng.random() < 0.4 else content["position"]
            key = rng.choice([*holder, "a key of a later version"])
            if rng.random() < 0.3:
                holder.pop(key, None)
            else:
                holder[key] = _odd(rng)
            about["sha256"] = save_whole(path, content)
            path.with_suffix(".json").write_text(json.dumps(about))
        elif kind == 2:
            about[rng.choice([*about, "x"])] = _odd(rng)
            path.with_suffix(".json").write_text(json.dumps(about))
        else:
            path.write_bytes(pickle.dumps(Exploding()))
            import hashlib

            about["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
            path.with_suffix(".json").write_text(json.dumps(about))
        count("checkpoints")
        with watched(), suppress(InputError):
            load(run, warn=lambda text: None)
    assert not EXECUTED


EXECUTED: list[int] = []


def _execute() -> None:
    EXECUTED.append(1)


class Exploding:
    def __reduce__(self) -> Any:
        return _execute, ()
