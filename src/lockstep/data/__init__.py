"""Data sets: found, checked, and held resident for all ranks of a host.

    data = open_data("mnist")
    data.train_images.shape      # (60000, 1, 28, 28), uint8, memory-mapped, read-only

May import machine/ and the files at the top; neither torch nor numpy is imported until a data set is opened. Its door is `open_data`, and
for training batches.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.data.catalog import Entry, check_name, find, known_data
from lockstep.plugins import is_spec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lockstep.data.resident import Resident

__all__ = ["DataSet", "Entry", "check_name", "known_data", "open_data"]


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set in its resident form."""

    name: str
    classes: int
    class_names: tuple[str, ...]
    train_images: NDArray[
        Any
    ]  # the (first) input of each sample: images are uint8 (N, C, H, W); a read-only memory map
    train_labels: NDArray[Any]  # the targets: classes are uint8 (N,), or int64 with more than 256 of them
    test_images: NDArray[Any]
    test_labels: NDArray[Any]
    mean: tuple[float, ...]  # of images, per channel, on the 0..1 scale, of the train set
    std: tuple[float, ...]
    origin: str  # one line: where it came from
    folder: Path
    train_more: tuple[NDArray[Any], ...] = ()  # the further inputs of a sample, where it has several
    test_more: tuple[NDArray[Any], ...] = ()
    keys: tuple[str, ...] = ()  # the names by which the model takes its inputs; none: in their order
    class_weights: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample's (first) input: channels, height and width of an image."""
        return tuple(self.train_images.shape[1:])

    @property
    def is_images(self) -> bool:
        """Whether its inputs are pictures in bytes, which Lockstep normalizes and augments."""
        return bool(self.mean) and not self.keys and not self.train_more


def open_data(
    name: str,
    data_root: Path | str | None = None,
    *,
    scratch: Path | None = None,
    offline: bool = False,
    quiet: bool = False,
) -> DataSet:
    """Open a known data set, or a user's own as `package.module:callable` or `file.py:callable`.

    A known set is looked for in `data_root`, in the cache, in system packages, at public mirrors and
    through package managers, and prepared once under a lock however many processes ask. A user's own set is
    laid down in `scratch`, which is to be a folder of the run (docs/data.md has the forms that it may have). `offline` (or LOCKSTEP_OFFLINE=1) forbids
    the network; `quiet` silences everything but warnings. Raises InputError for what the user can mend,
    DataError when the data cannot be had.
    """
    # Imported here, not above: they bring numpy with them, and `lockstep --help` has no use for it.
    from lockstep.data.logger import Logger

    logger = Logger(quiet)
    if is_spec(name):
        from lockstep.data.userdata import open_user

        found = open_user(name, scratch, logger)
        return _data_set(found, found.meta.origin)
    from lockstep.data.store import is_offline, open_entry

    root = Path(data_root) if data_root else None
    return _data_set(*open_entry(find(name), root, logger, is_offline(offline)))


def _data_set(found: Resident, origin: str) -> DataSet:
    meta, arrays = found.meta, found.arrays
    return DataSet(
        name=meta.name,
        classes=len(meta.class_names),
        class_names=tuple(meta.class_names),
        train_images=arrays["train-images"],
        train_labels=arrays["train-labels"],
        test_images=arrays["test-images"],
        test_labels=arrays["test-labels"],
        mean=tuple(meta.mean),
        std=tuple(meta.std),
        origin=origin,
        folder=found.folder,
        train_more=_further(arrays, "train"),
        test_more=_further(arrays, "test"),
        keys=tuple(meta.keys or ()),
        class_weights=tuple(meta.class_weights or ()),
    )


def _further(arrays: dict[str, Any], split: str) -> tuple[Any, ...]:
    names = [name for name in arrays if name.startswith(f"{split}-images-")]
    return tuple(arrays[name] for name in sorted(names, key=lambda name: int(name.rpartition("-")[2])))
