"""From files as people have them to the plain parts of the catalog, and from these to arrays.

Nothing here trusts its input: sizes are limited before memory is taken, archives are read member by member
and never extracted, pickles go through `unpickle`, and every part is checked against its published
checksum.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import math
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.data.catalog import CATALOG, Entry, Part
from lockstep.data.encode import as_batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CHUNK = 1 << 20
# A pickled batch of CIFAR-10 is 31 MB, a picture of one 23 MB; anything much larger is something else.
_LARGEST_FILE = 128 << 20
# A data set has a dozen files of 200 MB in all, gzipped in one piece. A small archive that unpacks to far more is meant to hold us up.
_MOST_MEMBERS = 10_000
_LARGEST_ARCHIVE = 2 << 30
_LONGEST_HEADER = 1 << 20
_GZIP = b"\x1f\x8b\x08"
_MOST_GZIP_MEMBERS = 1000


class Rejected(Exception):
    """A file that cannot be used; the text says why, whoever catches it says which file."""


def check(part: Part, content: bytes) -> None:
    """Raise Rejected unless `content` is exactly what was published as `part`."""
    if len(content) < part.size:
        raise Rejected(f"truncated: {len(content):,} of {part.size:,} bytes")
    if _is(part, content):
        return
    # MNIST and Fashion-MNIST use the same file names.
    owner = next((entry.name for entry in CATALOG.values() if any(_is(other, content) for other in entry.parts)), None)
    if owner:
        raise Rejected(f"this is the file of {owner}, not the one asked for")
    if len(content) > part.size:
        raise Rejected(f"too long: {len(content):,} bytes instead of {part.size:,}")
    raise Rejected(f"corrupt: it is {_digest(part, content)}, published is {part.digest}")


def _is(part: Part, content: bytes) -> bool:
    return len(content) == part.size and _digest(part, content) == part.digest


def _digest(part: Part, content: bytes) -> str:
    """By the function that the part's own digest was made with."""
    kind = part.digest.partition(":")[0]
    return f"{kind}:{hashlib.new(kind, content, usedforsecurity=False).hexdigest()}"


def read_part(path: Path, part: Part, kind: str) -> bytes:
    """The plain, checked content of a part from a file: plain, gzipped, or a pickled batch of CIFAR-10."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise Rejected("far too large")
        raw = path.read_bytes()
    except OSError as error:
        raise Rejected(f"cannot be read: {error.strerror or error}") from None
    return plain(raw, part, kind)


def plain(raw: bytes, part: Part, kind: str) -> bytes:
    """Bring the bytes of a file into the plain form of `part` and check them."""
    if raw.startswith(_GZIP):
        raw = _gunzip(raw, part.size)
    if kind == "cifar" and raw[:1] == b"\x80" and len(raw) != part.size:
        raw = _pickled_batch(raw)
    check(part, raw)
    return raw


def read_archive(path: Path, parts: Iterable[Part], kind: str) -> dict[str, bytes | Rejected]:
    """The parts found in a tar archive, by name; each is checked content, or why it is not."""
    with path.open("rb") as stream:
        wanted = {alias: part for part in parts for alias in file_names(part, kind)}
        found: dict[str, bytes | Rejected] = {}
        for name, content in members(stream, set(wanted)):
            part = wanted[name]
            try:
                found[part.name] = plain(content, part, kind)
            except Rejected as error:
                found[part.name] = Rejected(f"{name}: {error}")
    return found


def members(stream: io.BufferedIOBase, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """Regular files of a tar archive whose last name is wanted; nothing is ever written to disk.

    A name that leaves the archive (absolute, or with `..`), a link and a device are passed over: no honest
    archive of a data set has them.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r:*", tarinfo=_Member) as archive:
            whole = 0
            for number, member in enumerate(archive):
                whole += member.size
                if number >= _MOST_MEMBERS or whole > _LARGEST_ARCHIVE:
                    raise Rejected("an archive of far more than a data set")
                steps = member.name.split("/")
                if not member.isreg() or member.name.startswith("/") or ".." in steps or steps[-1] not in wanted:
                    continue
                if member.size > _LARGEST_FILE:
                    raise Rejected(f"{member.name}: far too large")
                opened = archive.extractfile(member)
                content = opened.read() if opened else b""
                if len(content) != member.size:
                    raise Rejected(f"truncated in {member.name}")
                yield steps[-1], content
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError, OverflowError) as error:
        raise Rejected(f"truncated or damaged archive ({error})") from None
    except RecursionError:  # each long name may be followed by another one
        raise Rejected("damaged archive (a chain of long names)") from None


class _Member(tarfile.TarInfo):
    """Headers that hold names are read into memory as a whole, however long they say that they are: not without a limit."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if not self.isreg() and self.size > _LONGEST_HEADER and self.type not in (tarfile.LNKTYPE, tarfile.SYMTYPE):
            raise tarfile.ReadError("a header of megabytes")
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return member


def picture_rows(png: bytes, labels: bytes) -> bytes:
    """A batch of CIFAR-10 from a picture that has one image per row, and its labels, one byte each."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as picture:
            if picture.size != (1024, len(labels)) or picture.mode != "RGB":
                raise Rejected(f"unexpected picture: {picture.size}, {picture.mode}")
            pixels = np.asarray(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Rejected(f"damaged picture ({error})") from None
    return as_batch(pixels.transpose(0, 2, 1), np.frombuffer(labels, np.uint8))


def label_list(text: bytes) -> bytes:
    """A JSON list of labels as bytes."""
    try:
        values = json.loads(text)
        if not isinstance(values, list):  # bytes(5) would be five zeros
            raise Rejected("not a list of labels")
        return bytes(values)
    except (ValueError, TypeError, RecursionError) as error:
        raise Rejected(f"not a list of labels ({error})") from None


def to_arrays(entry: Entry, contents: dict[str, bytes]) -> dict[str, NDArray[np.uint8]]:
    """The four resident arrays from the plain parts, with shapes and labels checked."""
    import numpy as np

    arrays: dict[str, NDArray[np.uint8]] = {}
    for split in ("train", "test"):
        parts = [part for part in entry.parts if part.split == split]
        if entry.kind == "idx":
            for part in parts:
                arrays[f"{split}-{part.role}"] = read_idx(contents[part.name])
        else:
            channels, height, width = entry.shape
            batches = [read_batch(contents[part.name], (channels, height, width)) for part in parts]
            arrays[f"{split}-images"] = np.concatenate([images for images, _ in batches])
            arrays[f"{split}-labels"] = np.concatenate([labels for _, labels in batches])
        count = entry.train if split == "train" else entry.test
        images = arrays[f"{split}-images"]
        arrays[f"{split}-images"] = images.reshape(len(images), *entry.shape) if images.size else images
        _validate(entry, arrays, split, count)
    return arrays


def read_idx(content: bytes) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes: two zero bytes, type 8, rank, sizes (big-endian), then the values."""
    import numpy as np

    if len(content) < 4 or content[:3] != b"\0\0\x08" or not 1 <= content[3] <= 4:
        raise Rejected(f"not an IDX file of bytes (it starts with {content[:4].hex(' ') or 'nothing'})")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise Rejected("truncated: the header is cut")
    sizes = struct.unpack(f">{content[3]}I", content[4:start])
    expected = math.prod(sizes)
    if len(content) - start != expected:
        raise Rejected(f"the header promises {expected:,} values, the file has {len(content) - start:,}")
    try:
        return np.frombuffer(content, np.uint8, offset=start).reshape(sizes)
    except ValueError:  # no values, since one size is 0, and others too large even so
        raise Rejected(f"no array has the shape {' x '.join(map(str, sizes))}") from None


def read_batch(content: bytes, shape: tuple[int, int, int]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images and labels of a binary CIFAR batch: per image one byte of label, then the R, G and B planes."""
    import numpy as np

    row = 1 + shape[0] * shape[1] * shape[2]
    if not content or len(content) % row:
        raise Rejected(f"{len(content):,} bytes are not a whole number of images of {row:,} bytes")
    table = np.frombuffer(content, np.uint8).reshape(-1, row)
    return table[:, 1:].reshape(-1, *shape), table[:, 0]


def _validate(entry: Entry, arrays: dict[str, NDArray[np.uint8]], split: str, count: int) -> None:
    images, labels = arrays[f"{split}-images"], arrays[f"{split}-labels"]
    if images.shape != (count, *entry.shape) or labels.shape != (count,):
        raise Rejected(f"{split}: images {images.shape}, labels {labels.shape}; expected {count} of {entry.shape}")
    if labels.max() >= entry.classes:
        raise Rejected(f"{split}: label {labels.max()} with only {entry.classes} classes")


def file_names(part: Part, kind: str) -> tuple[str, ...]:
    """The names under which people have the file of a part, most usual first."""
    if kind == "cifar":
        return part.name, part.name.removesuffix(".bin")
    dotted = part.name.replace("-idx", ".idx")  # as some archives unpack it
    return part.name, f"{part.name}.gz", dotted, f"{dotted}.gz"


def _gunzip(raw: bytes, size: int) -> bytes:
    """Unpack at most a little more than the part should have: a small file must not fill the memory."""
    # A million members would take a minute. The bytes that begin one occur by chance too: once in 16 MB.
    if raw.count(_GZIP) > _MOST_GZIP_MEMBERS:
        raise Rejected(f"a gzip file of more than {_MOST_GZIP_MEMBERS} members")
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as stream:
            # Piece by piece: asked for all at once, it holds much of it twice.
            out, most = io.BytesIO(), size + _CHUNK
            while piece := stream.read(min(_CHUNK, most - out.tell())):
                out.write(piece)
            return out.getvalue()
    except EOFError:
        raise Rejected("truncated gzip file") from None
    except (zlib.error, OSError) as error:
        raise Rejected(f"damaged gzip file ({error})") from None


def _pickled_batch(raw: bytes) -> bytes:
    import numpy as np

    from lockstep.data.unpickle import load_batch

    data, labels = load_batch(raw)
    return as_batch(data, np.frombuffer(labels, np.uint8))
