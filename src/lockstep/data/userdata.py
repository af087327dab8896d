"""A user's own data set: a callable that returns arrays, called once per host and laid down for all ranks.

Arrays may be numpy's or tensors: whatever has `.numpy()` is asked for it, so torch is not imported here.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data import resident
from lockstep.data.logger import Logger
from lockstep.data.resident import Resident
from lockstep.data.workspace import working_folder
from lockstep.errors import InputError
from lockstep.files import locked
from lockstep.plugins import load_object, one_line

_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
_WANTED = "a mapping or a tuple (train_images, train_labels, test_images, test_labels)"


def open_user(spec: str, scratch: Path | None, logger: Logger) -> Resident:
    """The resident form of a user's data set in `scratch`; without one, in a folder that goes when we end."""
    if scratch is None:
        scratch = Path(tempfile.mkdtemp(prefix="lockstep-data-"))
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    scratch = scratch.absolute()
    folder = scratch / "user"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with locked(scratch / ".lock", f"preparing {spec}", logger.info), working_folder(scratch / ".tmp") as work:
            found = resident.open_folder(folder)
            if isinstance(found, Resident) and found.meta.name == spec:
                return found
            _make(spec, work)
            resident.install(work, folder)
            found = resident.open_folder(folder)
    except OSError as error:
        raise InputError(f"data '{spec}' cannot be laid down in {scratch}: {error.strerror or error}") from None
    if not isinstance(found, Resident):
        raise InputError(f"data '{spec}' was laid down in {folder} and cannot be read back")
    return found


def _make(spec: str, work: Path) -> None:
    label = f"data '{spec}'"
    values = _by_name(_call(spec, label), label)
    arrays: dict[str, NDArray[Any]] = {}
    for split in ("train", "test"):
        images = _images(values[f"{split}_images"], f"{label}: {split}_images")
        labels = _labels(values[f"{split}_labels"], f"{label}: {split}_labels")
        if len(images) != len(labels):
            raise InputError(f"{label}: {len(images):,} {split}_images and {len(labels):,} {split}_labels")
        arrays[f"{split}-images"], arrays[f"{split}-labels"] = images, labels
    shapes = {arrays[f"{split}-images"].shape[1:] for split in ("train", "test")}
    if len(shapes) > 1:
        raise InputError(f"{label}: train and test images differ in shape: {' and '.join(map(str, sorted(shapes)))}")
    names = _class_names(values, arrays, label)
    for split in ("train", "test"):
        kind = np.uint8 if len(names) <= 256 else np.int64
        arrays[f"{split}-labels"] = arrays[f"{split}-labels"].astype(kind)
    resident.write(work, resident.describe(spec, names, arrays, f"your own: {spec}"), arrays)


def _call(spec: str, label: str) -> Any:
    function = load_object(spec, "data")
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's code raises, one line
        code = getattr(function, "__code__", None)
        raise InputError(f"{label} raised {one_line(error, code.co_filename if code else None)}") from None


def _by_name(result: Any, label: str) -> dict[str, Any]:
    if isinstance(result, Mapping):
        absent = [key for key in _KEYS if key not in result]
        if absent:
            raise InputError(f"{label} returned a mapping without {', '.join(absent)}; it needs {', '.join(_KEYS)}")
        unknown = [str(key) for key in result if key not in (*_KEYS, "classes")]
        if unknown:
            raise InputError(f"{label} returned unknown keys {', '.join(unknown)}; known: {', '.join(_KEYS)}, classes")
        return dict(result)
    if isinstance(result, tuple | list) and len(result) in (4, 5):
        return dict(zip((*_KEYS, "classes"), result, strict=False))
    got = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
    raise InputError(f"{label} must return {_WANTED}, and returned {got}")


def _array(value: Any, label: str) -> NDArray[Any]:
    if hasattr(value, "numpy") and not isinstance(value, np.ndarray):
        try:
            value = value.detach().cpu().numpy() if hasattr(value, "detach") else value.numpy()
        except Exception as error:
            raise InputError(f"{label}: cannot become a numpy array: {one_line(error)}") from None
    if not isinstance(value, np.ndarray):
        raise InputError(f"{label} is {type(value).__name__}; give a numpy array or a tensor")
    if value.size == 0:
        raise InputError(f"{label} is empty")
    return value


def _images(value: Any, label: str) -> NDArray[np.uint8]:
    array = _array(value, label)
    if array.dtype != np.uint8:
        hint = " (x * 255).round().astype('uint8') for values from 0 to 1;" if array.dtype.kind == "f" else ""
        raise InputError(f"{label} is {array.dtype}; give uint8 from 0 to 255:{hint} Lockstep normalizes it itself")
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim != 4:
        raise InputError(f"{label} has shape {array.shape}; give (N, C, H, W) or (N, H, W)")
    if _looks_channels_last(array.shape):
        raise InputError(f"{label} has shape {array.shape}, which looks like (N, H, W, C); give (N, C, H, W)")
    return array


def _looks_channels_last(shape: tuple[int, ...]) -> bool:
    """One or three channels at the end, and before them the height and width of a picture. A long strip such as (N, 12, 500, 1) is not a
    picture but a signal with 12 channels."""
    _, height, width, channels = shape
    return channels in (1, 3) and height not in (1, 3) and max(height, width) <= 4 * min(height, width)


def _labels(value: Any, label: str) -> NDArray[Any]:
    array = _array(value, label)
    if array.dtype.kind not in "iu":
        raise InputError(f"{label} is {array.dtype}; give whole numbers (classes from 0)")
    if array.ndim != 1:
        raise InputError(f"{label} has shape {array.shape}; give one class per image, shape (N,)")
    if array.min() < 0:
        raise InputError(f"{label} has the negative label {array.min()}; classes count from 0")
    return array


def _class_names(values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], label: str) -> list[str]:
    """From `classes` (a number, or the names), else one more than the largest label."""
    given = values.get("classes")
    largest = {split: int(arrays[f"{split}-labels"].max()) for split in ("train", "test")}
    if given is None:
        count = max(largest.values()) + 1
        if count > 100_000:
            raise InputError(f"{label}: labels up to {count - 1:,}; state 'classes' if that is meant")
        return [str(number) for number in range(count)]
    if isinstance(given, list | tuple) and given:
        names = [str(name) for name in given]
    elif isinstance(given, int) and not isinstance(given, bool) and given > 0:
        names = [str(number) for number in range(given)]
    else:
        raise InputError(f"{label}: 'classes' must be a number above 0 or the list of names, not {given!r}")
    for split, top in largest.items():
        if top >= len(names):
            raise InputError(f"{label}: {split}_labels has label {top}, but the classes are 0 to {len(names) - 1}")
    return names
