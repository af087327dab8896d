"""Decoding against naive readers, and what must never be decoded."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import datahelp as h
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import decode
from lockstep.data.catalog import MNIST, Part
from lockstep.data.decode import Rejected
from lockstep.data.encode import parts_of
from lockstep.data.sources import Collected, from_folder
from lockstep.data.unpickle import load_batch, load_plain

FEW = settings(max_examples=25, deadline=None)


@FEW
@given(
    train=st.integers(1, 9), test=st.integers(1, 5), height=st.integers(1, 7), width=st.integers(1, 7),
    seed=st.integers(0, 2**32), gz=st.booleans(),
)  # fmt: skip
def test_idx_equals_a_reader_of_single_samples(
    tmp_path_factory: pytest.TempPathFactory,
    train: int,
    test: int,
    height: int,
    width: int,
    seed: int,
    gz: bool,
) -> None:
    files = h.idx_files(train, test, (height, width), 10, seed)
    entry = h.idx_entry(files, train, test, (height, width))
    collected = Collected(entry)
    assert from_folder(collected, h.lay_out(tmp_path_factory.mktemp("idx"), files, gz), "here") == []
    arrays = decode.to_arrays(entry, collected.contents)
    for split, prefix, count in (("train", "train", train), ("test", "t10k", test)):
        images, labels = arrays[f"{split}-images"], arrays[f"{split}-labels"]
        assert images.shape == (count, 1, height, width)
        for index in range(count):
            assert images[index, 0].tolist() == h.naive_idx_image(files[f"{prefix}-images-idx3-ubyte"], index)
            assert labels[index] == h.naive_idx_label(files[f"{prefix}-labels-idx1-ubyte"], index)
    assert {part.name: content for part, content in parts_of(entry, arrays)} == files  # and back again


SHAPE = (3, 4, 2)


@FEW
@given(
    counts=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
    form=st.sampled_from(["bin", "bin-tar", "py2", "py4", "py5", "py-tar"]),
)
def test_cifar_equals_a_reader_of_single_samples(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], seed: int, form: str
) -> None:
    batches = [h.cifar_rows(count, seed + number, SHAPE) for number, count in enumerate(counts)]
    test = batches.pop()
    entry = h.cifar_entry(batches, test, shape=SHAPE)
    root = tmp_path_factory.mktemp("cifar")
    _lay_out_cifar(root, dict(zip([part.name for part in entry.parts], [*batches, test], strict=True)), form)
    collected = Collected(entry)
    assert from_folder(collected, root, "here") == []
    arrays = decode.to_arrays(entry, collected.contents)
    index = 0
    for batch, count in zip(batches, counts, strict=False):
        for row in range(count):
            label, planes = h.naive_batch_sample(batch, row, SHAPE)
            assert arrays["train-images"][index].tolist() == planes
            assert arrays["train-labels"][index] == label
            index += 1
    assert [content for _, content in parts_of(entry, arrays)] == [*batches, test]
    assert arrays["train-images"].flags.c_contiguous


def _lay_out_cifar(root: Path, files: dict[str, bytes], form: str) -> None:
    if form.startswith("py"):
        protocol = int(form[2]) if form[2].isdigit() else 2
        files = {name.removesuffix(".bin"): h.pickled(rows, protocol, SHAPE) for name, rows in files.items()}
        files = {name: h.as_python_2(raw) if protocol == 2 else raw for name, raw in files.items()}
    folder = "cifar-10-batches-py" if form.startswith("py") else "cifar-10-batches-bin"
    if form.endswith("tar"):
        name = "cifar-10-python.tar.gz" if form.startswith("py") else "cifar-10-binary.tar.gz"
        h.tar_gz(root / name, {f"{folder}/{member}": content for member, content in files.items()})
    else:
        h.lay_out(root / folder, files)


def test_python_2_pickle_of_bytes_is_read() -> None:
    """As the published archive has it: protocol 2, byte strings as keys, data and state."""
    raw = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01b\x87Rq\x05(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x06abcdeftbU\x06labelsq\x07]q\x08(K\x05K\x07eu."
    )
    data, labels = load_batch(raw)
    assert data.tolist() == [[97, 98, 99], [100, 101, 102]]
    assert labels == b"\x05\x07"


class _Exploit:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (os.system, "touch {}"),
        (eval, "open('{}','w')"),
        (exec, "open('{}','w')"),
        (os.mkdir, "{}"),
        (__import__, "os"),
    ],
)
def test_exploits_are_refused_before_anything_is_called(
    tmp_path: Path, function: Any, argument: str, protocol: int
) -> None:
    victim = tmp_path / "owned"
    raw = pickle.dumps({b"data": _Exploit(function, argument.format(victim))}, protocol)
    with pytest.raises(Rejected, match="asks for"):
        load_plain(raw)
    assert not victim.exists()


@pytest.mark.parametrize(
    "raw",
    [
        pickle.dumps(np.array([object()], dtype=object), 2),
        pickle.dumps(np.zeros(3, np.float64), 2),
        pickle.dumps(np.zeros(3, [("a", "u1"), ("b", "O")]), 2),
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(c__builtin__\neval\n(K\x00tS'b'\ntR.",
        b"c_codecs\nencode\n(Vabc\nVrot13\ntR.",
        b"Pouter\n.",
        b"\x80\x02c_codecs\nencode\nN}V__defaults__\nVx\ns\x86b.",  # sets attributes of what it was given
        b"\x80\x02cnumpy\nndarray\nN}Vshape\nVx\ns\x86b.",
        b"\x80\x02",
        b"\x80\x05garbage",
        b"",
    ],
)
def test_other_pickles_are_refused(raw: bytes) -> None:
    with pytest.raises(Rejected):
        load_plain(raw)


def test_a_pickle_that_asks_for_gigabytes_in_nine_bytes_is_rejected_at_once() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Rejected, match="value 1,073,741,824 is named"):
            load_plain(b"\x80\x02Nr\x00\x00\x00\x40.")
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_damaged_pickles_are_rejected_or_read_never_a_crash(garbage: bytes, place: int, patch: bytes) -> None:
    whole = h.as_python_2(h.pickled(h.cifar_rows(1, 3, SHAPE), 2, SHAPE))
    place %= len(whole)
    for raw in (b"\x80\x02" + garbage, whole[:place], whole[:place] + patch + whole[place + len(patch) :]):
        try:
            load_batch(raw)
        except Rejected:
            continue


def _tar(members: list[tuple[tarfile.TarInfo, bytes]]) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    stream.seek(0)
    return stream


def test_evil_members_are_passed_over_and_nothing_is_extracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    evil = [tarfile.TarInfo(name) for name in ("../good", "/good", "a/../../good", str(tmp_path / "good"))]
    link, hard = tarfile.TarInfo("good"), tarfile.TarInfo("b/good")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard.type, hard.linkname = tarfile.LNKTYPE, "../good"
    device = tarfile.TarInfo("c/good")
    device.type = tarfile.CHRTYPE
    entries = [(info, b"evil") for info in evil] + [(link, b""), (hard, b""), (device, b"")]
    entries.append((tarfile.TarInfo("./d/good"), b"fine"))
    assert list(decode.members(_tar(entries), {"good"})) == [("good", b"fine")]
    assert list(tmp_path.rglob("*")) == [inner]


def test_a_cut_archive_is_rejected() -> None:
    whole = _tar([(tarfile.TarInfo("good"), os.urandom(50_000))]).getvalue()
    for stop in (0, 5, 100, 30_000):
        with pytest.raises(Rejected, match="truncated"):
            list(decode.members(io.BytesIO(whole[:stop]), {"good"}))


def test_a_gzip_bomb_does_not_fill_the_memory() -> None:
    part = Part("x", 1000, h.digest(b"x"), "train", "images")
    bomb = gzip.compress(bytes(300_000_000), 1)
    with pytest.raises(Rejected, match="too long: 1,0"):
        decode.plain(bomb, part, "idx")


def test_gzip_with_several_members_and_padding_is_read() -> None:
    content = os.urandom(5000)
    part = Part("x", 5000, h.digest(content), "train", "images")
    raw = gzip.compress(content[:2000]) + gzip.compress(content[2000:]) + bytes(16)
    assert decode.plain(raw, part, "idx") == content


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not an IDX file"),
        (b"<html>captive portal</html>", "not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "not an IDX file"),
        (b"\0\0\x08\x03\0\0", "header is cut"),
        (h.idx((3,), b"ab"), "promises 3 values, the file has 2"),
        (h.idx((2,), b"abc"), "promises 2 values, the file has 3"),
        (h.idx((2**31, 0, 2**32 - 1, 2**31), b""), "no array has the shape 2147483648 x 0 x"),
        (h.idx((2**32 - 1, 2**32 - 1), b"abc"), "promises"),
    ],
)
def test_bad_idx_files_are_rejected_with_the_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        decode.read_idx(raw)


def test_labels_out_of_range_and_wrong_shapes_are_rejected() -> None:
    files = h.idx_files(4, 2, (3, 3), 10, seed=1)
    files["t10k-labels-idx1-ubyte"] = h.idx((2,), b"\x01\x0a")
    with pytest.raises(Rejected, match="label 10 with only 10 classes"):
        decode.to_arrays(h.idx_entry(files, 4, 2, (3, 3)), files)
    with pytest.raises(Rejected, match="train"):
        decode.to_arrays(h.idx_entry(files, 5, 2, (3, 3)), files)


def test_the_file_of_another_set_is_recognised(known: Any) -> None:
    entry, files = h.mini()
    known(entry)
    part = Part("train-labels-idx1-ubyte", entry.parts[1].size, h.digest(b"other"), "train", "labels")
    with pytest.raises(Rejected, match="file of mini"):
        decode.check(part, files["train-labels-idx1-ubyte"])
    with pytest.raises(Rejected, match="truncated: 3 of 60,008 bytes"):
        decode.check(MNIST.parts[1], b"abc")


def test_pictures_become_batches() -> None:
    from PIL import Image

    rows = h.cifar_rows(6, 11)
    table = np.frombuffer(rows, np.uint8).reshape(6, 3073)
    pixels = table[:, 1:].reshape(6, 3, 1024).transpose(0, 2, 1)
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG")
    assert decode.picture_rows(stream.getvalue(), table[:, 0].tobytes()) == rows
    with pytest.raises(Rejected, match="unexpected picture"):
        decode.picture_rows(stream.getvalue(), b"\x01")
    with pytest.raises(Rejected, match="damaged picture"):
        decode.picture_rows(stream.getvalue()[:3000], table[:, 0].tobytes())
    for text in (b"7", b"[300]", b"{", b'["a"]'):
        with pytest.raises(Rejected, match="not a list of labels"):
            decode.label_list(text)


# ---- files that are made to hold us up


def test_a_gzip_file_of_a_million_members_is_refused_at_once() -> None:
    part = MNIST.parts[0]
    with pytest.raises(Rejected, match="1000 members"):
        decode.plain(gzip.compress(b"") * 1_000_000, part, "idx")


def test_an_archive_of_chained_long_names_is_refused() -> None:
    link = tarfile.TarInfo("././@LongLink")
    link.type, link.size = tarfile.GNUTYPE_LONGNAME, 2
    chain = (link.tobuf(tarfile.GNU_FORMAT) + b"x\0".ljust(512, b"\0")) * 20_000
    with pytest.raises(Rejected, match="archive"):
        list(decode.members(io.BytesIO(chain), {"x"}))


def test_an_archive_that_unpacks_to_terabytes_is_refused() -> None:
    kinds = {"named": tarfile.GNUTYPE_LONGNAME, "extended": tarfile.XHDTYPE, "regular": tarfile.REGTYPE}
    for kind in kinds.values():
        member = tarfile.TarInfo("x")
        member.type, member.size = kind, 1 << 32
        with pytest.raises(Rejected):
            list(decode.members(io.BytesIO(member.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024), {"y"}))
    many = b"".join([tarfile.TarInfo(f"f{number}").tobuf() for number in range(10_001)])
    with pytest.raises(Rejected, match="far more"):
        list(decode.members(io.BytesIO(many + b"\0" * 1024), {"y"}))


def test_a_pickle_that_asks_for_zeros_by_number_is_refused() -> None:
    raw = (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x01K\x01\x86cnumpy\ndtype\nU\x02u1\x85R\x89J\x00\x8c\x86Gtb."
    )
    with pytest.raises(Rejected, match="array without bytes"):
        load_plain(raw)


def test_a_picture_that_unpacks_to_gigabytes_and_a_deep_list_are_refused() -> None:
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    with pytest.raises(Rejected, match="picture"):
        decode.picture_rows(b"\x89PNG\r\n\x1a\n" + chunk, b"\0" * 10)
    with pytest.raises(Rejected, match="labels"):
        decode.label_list(b"[" * 100_000)
