"""A user's own data set: a callable that returns arrays or Datasets (forms.py), called once per host and laid down for all ranks.

Pictures in bytes are images, which Lockstep normalizes and augments. Everything else goes to the model as it is. Whole numbers as targets are
classes, numbers with a point are what they are.
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

from lockstep.data import forms, resident
from lockstep.data.forms import Split
from lockstep.data.logger import Logger
from lockstep.data.resident import Resident
from lockstep.data.workspace import working_folder
from lockstep.errors import InputError
from lockstep.files import locked
from lockstep.plugins import load_object, one_line
from lockstep.task import IGNORED

Array = NDArray[Any]
# What torch has no tensors of, as what it has.
_WIDER = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


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
            _make(spec, work, logger)
            resident.install(work, folder)
            found = resident.open_folder(folder)
    except OSError as error:
        raise InputError(f"data '{spec}' cannot be laid down in {scratch}: {error.strerror or error}") from None
    if not isinstance(found, Resident):
        raise InputError(f"data '{spec}' was laid down in {folder} and cannot be read back")
    return found


def _make(spec: str, work: Path, logger: Logger) -> None:
    label = f"data '{spec}'"
    given = forms.read(_call(spec, label), label, logger)
    arrays: dict[str, Array] = {}
    for name, split in (("train", given.train), ("test", given.test)):
        inputs = _inputs(split, f"{label}: {name}")
        targets = _targets(split.targets, f"{label}: {name}_labels")
        for number, one in enumerate(inputs):
            if len(one) != len(targets):
                raise InputError(f"{label}: {len(one):,} {name}_images and {len(targets):,} {name}_labels")
            arrays[f"{name}-images" + (f"-{number}" if number else "")] = one
        arrays[f"{name}-labels"] = targets
    if len(given.train.inputs) != len(given.test.inputs) or given.train.keys != given.test.keys:
        raise InputError(f"{label}: train and test have different inputs")
    for name in [name.removeprefix("train-") for name in arrays if name.startswith("train-")]:
        _check_same(arrays[f"train-{name}"], arrays[f"test-{name}"], f"{label}: train and test {name}")
    names = _class_names(given.more.get("classes"), arrays, label)
    if names:
        for name in ("train-labels", "test-labels"):
            kind = np.uint8 if len(names) <= 256 and arrays[name].min() >= 0 else np.int64
            arrays[name] = arrays[name].astype(kind)
    meta = resident.describe(spec, names, arrays, f"your own: {spec}")
    if given.train.keys:
        meta.keys = given.train.keys
    if "class_weights" in given.more:
        meta.class_weights = _class_weights(given.more["class_weights"], len(names), label)
    resident.write(work, meta, arrays)


def _call(spec: str, label: str) -> Any:
    function = load_object(spec, "data")
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's code raises, one line
        code = getattr(function, "__code__", None)
        raise InputError(f"{label} raised {one_line(error, code.co_filename if code else None)}") from None


def _array(value: Any, label: str) -> Array:
    found = forms.array(value, label)
    if found.size == 0:
        raise InputError(f"{label} is empty")
    if found.dtype.kind not in "fiubc" or found.dtype.name in ("float128", "complex256"):
        raise InputError(f"{label} is {found.dtype}; give numbers, of at most 64 bits")
    return found.astype(_WIDER.get(found.dtype.name, found.dtype.newbyteorder("=")), copy=False)


def _inputs(split: Split, label: str) -> list[Array]:
    names = split.keys or [""] * len(split.inputs)
    found = [
        _array(one, f"{label}_images" + (f" '{name}'" if name else ""))
        for one, name in zip(split.inputs, names, strict=True)
    ]
    if not found:
        raise InputError(f"{label} has targets and no inputs")
    if len(found) == 1 and not split.keys and found[0].dtype == np.uint8 and found[0].ndim in (3, 4):
        return [_images(found[0], f"{label}_images")]
    return found


def _images(array: Array, label: str) -> NDArray[np.uint8]:
    if array.ndim == 3:
        array = array[:, None]
    if _looks_channels_last(array.shape):
        raise InputError(f"{label} has shape {array.shape}, which looks like (N, H, W, C); give (N, C, H, W)")
    return array


def _looks_channels_last(shape: tuple[int, ...]) -> bool:
    """One or three channels at the end, and before them the height and width of a picture. A long strip such as (N, 12, 500, 1) is not a
    picture but a signal with 12 channels."""
    _, height, width, channels = shape
    return channels in (1, 3) and height not in (1, 3) and max(height, width) <= 4 * min(height, width)


def _targets(value: Any, label: str) -> Array:
    array = _array(value, label)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InputError(
            f"{label} has {np.count_nonzero(~np.isfinite(array)):,} values that are not finite (NaN or infinite)"
        )
    if array.dtype.kind in "iu":
        negative = array[(array < 0) & ((array != IGNORED) | (array.ndim == 1))]
        if negative.size:
            raise InputError(
                f"{label} has the negative label {negative.min()}; classes count from 0, and other numbers are written with a point (float)"
            )
    return array.astype(np.uint8) if array.dtype.kind == "b" else array


def _check_same(train: Array, test: Array, label: str) -> None:
    if train.shape[1:] != test.shape[1:]:
        raise InputError(f"{label} differ in shape: {train.shape[1:]} and {test.shape[1:]}")
    if (train.dtype.kind in "fc") != (test.dtype.kind in "fc"):
        raise InputError(f"{label} differ in type: {train.dtype} and {test.dtype}")


def _class_names(given: Any, arrays: Mapping[str, Array], label: str) -> list[str]:
    """From `classes` (a number, or the names), else one more than the largest label; none for targets that are no whole numbers."""
    if arrays["train-labels"].dtype.kind not in "iu":
        if given is not None:
            raise InputError(f"{label}: 'classes' is stated, but train_labels is {arrays['train-labels'].dtype}")
        return []
    held = {name: array for name, array in arrays.items() if name.endswith("-labels")}
    if _are_tokens(arrays):
        held |= {name: array for name, array in arrays.items() if name.endswith("-images")}
    largest = {name.replace("-", "_"): int(array.max()) for name, array in held.items()}
    if given is None:
        count = max(largest.values()) + 1
        if count > 100_000:
            raise InputError(
                f"{label}: labels up to {count - 1:,}; state 'classes' if that is meant, or give floats to predict numbers"
            )
        return [str(number) for number in range(count)]
    if isinstance(given, list | tuple) and given:
        names = [str(name) for name in given]
    elif isinstance(given, int) and not isinstance(given, bool) and given > 0:
        names = [str(number) for number in range(given)]
    else:
        raise InputError(f"{label}: 'classes' must be a number above 0 or the list of names, not {given!r}")
    for name, top in largest.items():
        if top >= len(names):
            what = "token" if _are_tokens(arrays) else "label"
            raise InputError(f"{label}: {name} has {what} {top}, but the classes are 0 to {len(names) - 1}")
    return names


def _are_tokens(arrays: Mapping[str, Array]) -> bool:
    """Whole numbers, and for each of them one that is its target."""
    inputs, targets = arrays["train-images"], arrays["train-labels"]
    return inputs.dtype.kind in "iu" and inputs.ndim == 2 and inputs.shape == targets.shape


def _class_weights(given: Any, classes: int, label: str) -> list[float]:
    try:
        found = [float(weight) for weight in given]
    except (TypeError, ValueError):
        raise InputError(f"{label}: 'class_weights' must be a list of numbers, one for each class") from None
    if len(found) != classes or not classes:
        raise InputError(f"{label}: {len(found)} class_weights for {classes} classes")
    if not all(0 <= weight < float("inf") for weight in found) or not any(found):
        raise InputError(f"{label}: 'class_weights' must be numbers from 0 on, and not all of them 0")
    return found
