"""Reads the pickled batches of CIFAR-10 without giving a pickle the means to do anything.

A pickle is a program. This reader lets it build dicts, lists, numbers, text, bytes and flat arrays of
bytes, by functions of ours that stand in for numpy's; every other name that it asks for is refused before
anything is called.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.data.decode import Rejected

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class _Dtype:
    """Stands in for numpy.dtype: keeps the name, admits unsigned bytes only."""

    def __init__(self, name: Any, *_: Any) -> None:
        text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
        if text not in ("u1", "|u1", "uint8"):
            raise Rejected(f"array of {text!r}; only bytes are read")

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment mean nothing for bytes."""


class _Array:
    """Stands in for numpy.ndarray: holds a shape and bytes until we make the array ourselves."""

    shape: tuple[int, ...] = ()
    content: bytes = b""
    fortran = False

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Dtype):
            raise Rejected("array of an unknown type")
        if not isinstance(content, bytes | bytearray):  # of a number, bytes() would make as many zeros
            raise Rejected("array without bytes")
        self.shape, self.content, self.fortran = tuple(shape), bytes(content), bool(fortran)


class _Function:
    """A function that a pickle may call, and cannot change: the instruction that sets state is refused."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise Rejected("pickle tries to change a function")


def _reconstruct(kind: Any, *_: Any) -> _Array:
    if kind is not _Array:
        raise Rejected("array of an unknown class")
    return _Array()


def _frombuffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 spells bytes under Python 3; no other codec is needed, and none is given."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise Rejected("text in an unknown encoding")
    return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Function(_encode),
}
for _package in ("numpy.core", "numpy._core"):  # the path before and since numpy 2
    _ADMITTED[f"{_package}.multiarray", "_reconstruct"] = _Function(_reconstruct)
    _ADMITTED[f"{_package}.numeric", "_frombuffer"] = _Function(_frombuffer)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise Rejected(f"pickle asks for {module}.{name}, which a data set does not need") from None

    def persistent_load(self, pid: Any) -> Any:
        raise Rejected("pickle refers to something outside of itself")


def load_plain(raw: bytes) -> Any:
    """The object in a pickle made of nothing but plain values (and arrays, as our stand-in)."""
    try:
        _check_memo(raw)
        # Python 2 wrote these files: its strings come out as bytes.
        return _Reader(io.BytesIO(raw), encoding="bytes").load()
    except Rejected:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        text = " ".join(str(error).split())
        raise Rejected(f"damaged pickle ({type(error).__name__}: {text})") from None


def _check_memo(raw: bytes) -> None:
    """Refuse a pickle that numbers a value far beyond its values.

    Python's reader takes 16 bytes of memory for every number up to the largest: nine bytes of pickle can ask for 64 GiB.
    """
    for count, (opcode, argument, _) in enumerate(pickletools.genops(raw), start=1):
        if "PUT" in opcode.name and isinstance(argument, int) and argument > count:
            raise Rejected(f"damaged pickle (value {argument:,} is named after {count:,} steps)")


def load_batch(raw: bytes) -> tuple[NDArray[np.uint8], bytes]:
    """Pixels (one image per row) and labels of a pickled batch."""
    import numpy as np

    batch = load_plain(raw)
    if not isinstance(batch, dict):
        raise Rejected("the pickle holds no batch: not a dict")
    data = batch.get(b"data", batch.get("data"))
    labels = batch.get(b"labels", batch.get("labels"))
    if not isinstance(data, _Array) or not isinstance(labels, list) or len(data.shape) != 2:
        raise Rejected("the pickle holds no batch: no 'data' array of two dimensions with 'labels' as a list")
    rows, columns = data.shape
    if rows != len(labels) or rows * columns != len(data.content):
        raise Rejected(f"truncated batch: {len(labels)} labels, {rows} images, {len(data.content):,} bytes")
    try:
        flat = bytes(labels)
    except (ValueError, TypeError):
        raise Rejected("labels that are not numbers from 0 to 255") from None
    pixels = np.frombuffer(data.content, np.uint8)
    return (pixels.reshape(columns, rows).T if data.fortran else pixels.reshape(rows, columns)), flat
