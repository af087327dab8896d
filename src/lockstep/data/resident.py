"""The form in which every rank reads a data set: .npy files, memory-mapped, and `meta.json` beside them.

There are four, and more where a sample has several inputs: train-images.npy, train-images-1.npy, … Inputs that are no images are called so too.

The pages are shared by all ranks of a host. `meta.json` is written last and removed first, so a folder
without it is not a data set; sizes and shapes are checked against it on every open, hashes only by
`verify`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.files import write_atomically

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = 1
META = "meta.json"
ARRAYS = ("train-images", "train-labels", "test-images", "test-labels")
_FURTHER = re.compile(r"((?:train|test)-images-[1-9]\d{0,3})\.npy")


class FileFact(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int
    sha256: str
    shape: tuple[int, ...]
    dtype: str


class RootFact(msgspec.Struct, forbid_unknown_fields=True):
    """What was found out about a data root, so that its files are read again only when they change."""

    stamp: list[tuple[str, int, int]]  # path, size, time of change of each file that we would read
    origin: str = ""  # where the content came from, if it was good
    problem: str = ""  # why it was not used


class Meta(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    classes: int
    class_names: list[str]
    counts: dict[str, int]  # samples per split
    shape: tuple[int, ...]  # of a sample's first input
    mean: list[float]
    std: list[float]
    origin: str
    files: dict[str, FileFact]
    format: int = FORMAT
    edition: int = 0  # of the program that drew it, for sets that are drawn
    roots: dict[str, RootFact] = msgspec.field(default_factory=dict)
    # Not written where they are not set: versions that do not know them share the cache.
    keys: list[str] | msgspec.UnsetType = msgspec.UNSET  # by which the model takes its inputs
    class_weights: list[float] | msgspec.UnsetType = msgspec.UNSET

    @property
    def arrays(self) -> list[str]:
        """The names of its files, without .npy."""
        return [*ARRAYS, *(found[1] for name in self.files if (found := _FURTHER.fullmatch(name)))]


@dataclass(frozen=True)
class Damage:
    """Why a resident folder cannot be used; `file` is the one to blame."""

    file: Path
    reason: str


@dataclass(frozen=True)
class Resident:
    folder: Path
    meta: Meta
    arrays: dict[str, Any]


def describe(name: str, class_names: Sequence[str], arrays: Mapping[str, NDArray[Any]], origin: str) -> Meta:
    """What `meta.json` says about arrays, as far as it does not depend on their files."""
    images = arrays["train-images"]
    mean, std = statistics(images) if is_images(images) else ([], [])
    return Meta(
        name=name,
        classes=len(class_names),
        class_names=list(class_names),
        counts={"train": len(images), "test": len(arrays["test-images"])},
        shape=images.shape[1:],
        mean=mean,
        std=std,
        origin=origin,
        files={},
    )


def is_images(array: NDArray[Any]) -> bool:
    """Bytes of shape (N, C, H, W). They are normalized and augmented; everything else goes to the model as it is."""
    return array.dtype.name == "uint8" and array.ndim == 4


def write(folder: Path, meta: Meta, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the arrays and `meta.json` into an empty folder and make them reach the disk."""
    import numpy as np

    for name, given in arrays.items():
        path = folder / f"{name}.npy"
        with path.open("wb") as stream:
            array = np.ascontiguousarray(given)
            # Not np.save: on a full disk it does not say that the disk is full.
            np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
            stream.write(array.data)
            stream.flush()
            os.fsync(stream.fileno())
        meta.files[path.name] = FileFact(path.stat().st_size, hash_file(path), array.shape, array.dtype.str)
    write_meta(folder, meta)


def write_meta(folder: Path, meta: Meta) -> None:
    """Replace `meta.json` in one step."""
    write_atomically(folder / META, msgspec.json.format(msgspec.json.encode(meta), indent=2))


def install(made: Path, folder: Path) -> None:
    """Move a finished data set into its place. A kill at any moment leaves no `meta.json` or a whole set."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / META).unlink(missing_ok=True)
    for path in made.glob("*.npy"):
        path.replace(folder / path.name)
    (made / META).replace(folder / META)


def read_meta(folder: Path) -> Meta | Damage | None:
    """`meta.json`, None where there is none, or what is wrong with it."""
    path = folder / META
    try:
        meta = msgspec.json.decode(path.read_bytes(), type=Meta)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return Damage(folder, "not a folder")
    except (OSError, msgspec.MsgspecError) as error:
        return Damage(path, f"cannot be read ({error})")
    if meta.format != FORMAT:
        return Damage(path, f"of format {meta.format}, this version reads {FORMAT}")
    return meta


def inspect(folder: Path) -> Meta | Damage | None:
    """As `read_meta`, with the size of every file checked; opens no array, so it is quick."""
    meta = read_meta(folder)
    if not isinstance(meta, Meta):
        return meta
    for name in meta.arrays:
        path = folder / f"{name}.npy"
        fact = meta.files.get(path.name)
        if fact is None:
            return Damage(folder / META, f"says nothing about {path.name}")
        try:
            size = path.stat().st_size
        except OSError as error:
            return Damage(path, f"{error.strerror or error}")
        if size != fact.bytes:
            state = "truncated" if size < fact.bytes else "too long"
            return Damage(path, f"{state}: {size:,} bytes instead of {fact.bytes:,}")
    return meta


def open_folder(folder: Path) -> Resident | Damage | None:
    """Map the arrays of a resident folder; None where there is none."""
    import numpy as np

    meta = inspect(folder)
    if not isinstance(meta, Meta):
        return meta
    arrays: dict[str, Any] = {}
    for name in meta.arrays:
        path = folder / f"{name}.npy"
        fact = meta.files[path.name]
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            return Damage(path, f"cannot be opened ({error})")
        if array.shape != fact.shape or array.dtype.str != fact.dtype:
            return Damage(path, f"holds {array.dtype} {array.shape}, {META} says {fact.dtype} {fact.shape}")
        arrays[name] = array
    if read_meta(folder) != meta:
        # Another process replaced the set while we were opening it; what we hold may be a mixture.
        return open_folder(folder)
    return Resident(folder, meta, arrays)


def hash_damage(resident: Resident) -> list[Damage]:
    """Every file whose content is not what was written."""
    bad = []
    for name, fact in resident.meta.files.items():
        actual = hash_file(resident.folder / name)
        if actual != fact.sha256:
            bad.append(Damage(resident.folder / name, f"corrupt: sha256 is {actual}, written was {fact.sha256}"))
    return bad


def statistics(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel on the 0..1 scale.

    From a histogram, in whole numbers: exact, the same on every machine, and without a copy in floating
    point.
    """
    import numpy as np

    mean, std = [], []
    for channel in range(images.shape[1]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(images), 4096):
            counts += np.bincount(images[start : start + 4096, channel].reshape(-1), minlength=256)
        numbers = [int(count) for count in counts]
        total = sum(numbers)
        first = sum(value * count for value, count in enumerate(numbers))
        second = sum(value * value * count for value, count in enumerate(numbers))
        mean.append(first / total / 255)
        std.append(((second * total - first * first) ** 0.5) / total / 255)
    return mean, std


def hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
