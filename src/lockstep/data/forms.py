"""The forms in which people hand over data, each brought to one: arrays of inputs and an array of targets, for each split.

Arrays, mappings of arrays, a Dataset, an IterableDataset with a length, or a DataLoader's parts. They are told apart by what they can do, so
torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.data.logger import Logger
from lockstep.errors import InputError
from lockstep.plugins import one_line

Array = NDArray[Any]
KEYS = ("train_images", "train_labels", "test_images", "test_labels")
# The same for what are no images.
_SYNONYMS = {"train_inputs": KEYS[0], "train_targets": KEYS[1], "test_inputs": KEYS[2], "test_targets": KEYS[3]}
_MORE = ("classes", "class_weights")
_WANTED = "a mapping or a tuple (train_images, train_labels, test_images, test_labels), or (train, test), two Datasets"
# In a mapping of one sample's arrays, as Hugging Face has them.
TARGET = "labels"
# So many samples of a Dataset are read twice more, to see whether they are the same.
READ_AGAIN = 8


class Split(NamedTuple):
    """The inputs and targets of a split: arrays whose first dimension is the samples."""

    inputs: list[Any]
    keys: list[str]
    """By which the model takes its inputs; empty where it takes them in their order."""
    targets: Any


class Given(NamedTuple):
    train: Split
    test: Split
    more: dict[str, Any]
    """`classes` and `class_weights`, where they were stated."""


def read(result: Any, label: str, logger: Logger) -> Given:
    """What a user's callable returned."""
    if isinstance(result, Mapping):
        return _by_name(result, label, logger)
    if isinstance(result, tuple | list):
        if len(result) in (4, 5):
            return _by_name(dict(zip((*KEYS, "classes"), result, strict=False)), label, logger)
        if len(result) == 2:
            return _by_name(dict(zip(("train", "test"), result, strict=True)), label, logger)
    got = f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
    raise InputError(f"{label} must return {_WANTED}, and returned {got}")


def _by_name(result: Mapping[str, Any], label: str, logger: Logger) -> Given:
    found = {_SYNONYMS.get(key, key): value for key, value in result.items()}
    wanted = ("train", "test") if found.keys() & {"train", "test"} else KEYS
    absent = [key for key in wanted if key not in found]
    if absent:
        raise InputError(f"{label} returned a mapping without {', '.join(absent)}; it needs {', '.join(wanted)}")
    unknown = [str(key) for key in found if key not in (*wanted, *_MORE)]
    if unknown:
        known = ", ".join((*wanted, *_MORE))
        raise InputError(f"{label} returned unknown keys {', '.join(unknown)}; known: {known}")
    more = {key: found[key] for key in _MORE if found.get(key) is not None}
    if wanted == KEYS:
        train, test = (_split((found[images], found[labels]), label) for images, labels in (KEYS[:2], KEYS[2:]))
    else:
        train, test = (_read(found[split], f"{label}: {split}", logger) for split in ("train", "test"))
    return Given(train, test, more)


def _read(value: Any, label: str, logger: Logger) -> Split:
    """A split, in whatever form."""
    if hasattr(value, "dataset") and hasattr(value, "collate_fn"):
        logger.info(
            f"{label}: of a DataLoader its collate_fn and the samples that its sampler picks are used; global_batch, shuffle and seed say "
            "what its batch_size, shuffle and the sampler's order said"
        )
        picked, collate = _picked(value, label), value.collate_fn
        if _is_torchs(collate):
            return _stacked(picked, label, logger)

        def collated(items: list[Any]) -> Split:
            return _split(_called(lambda: collate(items), f"{label}: collate_fn"), label)

        # Of all samples at once, so that what it pads has one length.
        found = collated(list(islice(_items(picked, label), _length(picked, label))))
        _warn_of_chance(picked, lambda items: [collated(items)], label, logger)
        return found
    if isinstance(value, tuple | list | Mapping) or _is_array(value):
        return _split(value, label)
    return _stacked(value, label, logger)


def _is_torchs(thing: Any) -> bool:
    """A function or a class of PyTorch's loaders, not one of the user's own."""
    return str(getattr(thing, "__module__", "")).startswith("torch.utils.data")


class _Picked:
    """Some samples of a Dataset."""

    def __init__(self, dataset: Any, numbers: Sequence[int]) -> None:
        self._dataset, self._numbers = dataset, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> Any:
        return self._dataset[self._numbers[number]]


def _picked(loader: Any, label: str) -> Any:
    """The samples of a DataLoader's dataset that its sampler hands out in an epoch, in the dataset's order."""
    dataset, sampler, batches = loader.dataset, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    if batches is not None and loader.batch_size is None:
        # PyTorch's own may drop the last batch, and is no choice. One of the user's own may choose, whatever sampler it has.
        sampler = batches.sampler if _is_torchs(type(batches)) else batches
    # A DistributedSampler's share is not a choice: Lockstep gives every rank its own.
    if sampler is None or hasattr(sampler, "num_replicas"):
        return dataset
    count, numbers = _length(dataset, label), chain.from_iterable if sampler is batches else iter

    def epoch() -> list[int]:
        """Not for ever: the sampler of an IterableDataset hands out None without an end."""
        found = list(islice(numbers(sampler), count + 1))
        return list(range(count)) if found[:1] == [None] else sorted(map(int, found))

    picked, again = (_called(epoch, f"{label}: {type(sampler).__name__}") for _ in range(2))
    if getattr(sampler, "replacement", False) or len(set(picked)) < len(picked) or picked != again:
        raise InputError(
            f"{label}: its {type(sampler).__name__} takes samples more than once, or others in every epoch, and Lockstep takes each once: "
            "give the Dataset itself, or a Subset of it (class_weights weigh classes)"
        )
    return dataset if len(picked) == count else _Picked(dataset, picked)


def _split(value: Any, label: str, sample: bool = False) -> Split:
    """Arrays of samples, or of one sample: (inputs, targets), a mapping with `labels`, or sequences of tokens, each of which is followed
    by its target."""
    if isinstance(value, Mapping):
        if TARGET not in value:
            raise InputError(f"{label} is a mapping without '{TARGET}': name the targets so, or give (inputs, targets)")
        value = ({key: one for key, one in value.items() if key != TARGET}, value[TARGET])
    elif _is_array(value) or (isinstance(value, tuple | list) and len(value) == 1):
        return _tokens(value if _is_array(value) else value[0], label, sample)
    elif not isinstance(value, tuple | list) or not value:
        raise InputError(f"{label} is {type(value).__name__}; give (inputs, targets), or a mapping with '{TARGET}'")
    *inputs, targets = value
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return Split(list(inputs[0].values()), [str(key) for key in inputs[0]], targets)
    if len(inputs) == 1 and isinstance(inputs[0], tuple):
        inputs = list(inputs[0])
    return Split(inputs, [], targets)


def _tokens(value: Any, label: str, sample: bool) -> Split:
    tokens = array(value, label)
    if tokens.dtype.kind not in "iu" or tokens.ndim != (1 if sample else 2) or tokens.shape[-1] < 2:
        raise InputError(
            f"{label} has no targets: give (inputs, targets); alone stand only sequences of tokens, whole numbers of shape (N, T + 1)"
        )
    return Split([tokens[..., :-1]], [], tokens[..., 1:])


def _stacked(dataset: Any, label: str, logger: Logger) -> Split:
    """Every sample of a Dataset, once."""
    arrays: list[Array] = []
    keys: list[str] = []
    count, number = _length(dataset, label), -1
    for number, item in enumerate(_items(dataset, label)):
        if number == count:
            raise InputError(f"{label} has the length {count:,} and gave more samples")
        one = _split(item, f"{label}: sample {number}", sample=True)
        values = [_plain(value, f"{label}: sample {number}") for value in (*one.inputs, one.targets)]
        if number == 0:
            keys, arrays = one.keys, [np.empty((count, *value.shape), value.dtype) for value in values]
        _check_alike(values, one.keys, arrays, keys, f"{label}: sample {number}")
        for whole, value in zip(arrays, values, strict=True):
            whole[number] = value
    if number + 1 != count:
        raise InputError(f"{label} has the length {count:,} and gave {number + 1:,} samples")
    if not arrays:
        raise InputError(f"{label} is empty")
    _warn_of_chance(dataset, lambda items: [_split(item, label, sample=True) for item in items], label, logger)
    return Split(list(arrays[:-1]), keys, arrays[-1])


def _warn_of_chance(dataset: Any, taken: Callable[[list[Any]], list[Split]], label: str, logger: Logger) -> None:
    """Where the first samples are others each time they are read. One alone would not do: a flip leaves every second one as it is."""
    first = range(min(READ_AGAIN, len(dataset)))
    try:
        once, again = (
            [_plain(value, label).tobytes() for one in taken(items) for value in (*one.inputs, one.targets)]
            for items in ([dataset[number] for number in first] for _ in range(2))
        )
    except Exception:  # it is not read by number, or once alone; another pass of an iterable could begin a download
        return
    if once != again:
        logger.warning(
            f"{label}: a sample is another one each time it is read: a random transform is frozen, since each sample is read once; leave it "
            "out and set augment"
        )


def _check_alike(
    values: Sequence[Array], keys: list[str], arrays: Sequence[Array], first: list[str], label: str
) -> None:
    if len(values) != len(arrays) or keys != first:
        raise InputError(f"{label} has {len(values) - 1} inputs ({', '.join(keys)}), and sample 0 {len(arrays) - 1}")
    for value, whole in zip(values, arrays, strict=True):
        if (value.shape, value.dtype) != (whole.shape[1:], whole.dtype):
            raise InputError(
                f"{label} is {value.dtype} {value.shape}, and sample 0 {whole.dtype} {whole.shape[1:]}: all samples must be alike; pad them"
            )


def _length(dataset: Any, label: str) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise InputError(
            f"{label} is {type(dataset).__name__} without a length: give it __len__, so that every rank knows its share"
        ) from None
    except Exception as error:  # a user's code may raise anything
        raise InputError(f"{label}: len() raised {one_line(error)}") from None


def _items(dataset: Any, label: str) -> Iterator[Any]:
    count = _length(dataset, label)
    # An IterableDataset inherits a __getitem__ that only raises.
    if hasattr(dataset, "__iter__"):
        found: Iterable[Any] = dataset
    elif hasattr(dataset, "__getitem__"):
        found = (dataset[number] for number in range(count))
    else:
        raise InputError(f"{label} is {type(dataset).__name__}; give arrays, a Dataset or a DataLoader")
    steps = iter(found)
    number = 0
    while True:
        try:
            item = next(steps)
        except StopIteration:
            return
        except Exception as error:
            raise InputError(f"{label}: sample {number} raised {one_line(error)}") from None
        yield item
        number += 1


def _called(function: Any, label: str) -> Any:
    try:
        return function()
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{label} raised {one_line(error)}") from None


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "numpy")


def array(value: Any, label: str) -> Array:
    """numpy's own, or whatever can become it."""
    if hasattr(value, "numpy") and not isinstance(value, np.ndarray):
        try:
            if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # which numpy does not have
                value = value.float()
            value = value.detach().cpu().numpy() if hasattr(value, "detach") else value.numpy()
        except Exception as error:
            raise InputError(f"{label}: cannot become a numpy array: {one_line(error)}") from None
    if not isinstance(value, np.ndarray):
        raise InputError(f"{label} is {type(value).__name__}; give a numpy array or a tensor")
    return value


def _plain(value: Any, label: str) -> Array:
    """One sample's array; numbers and pictures may stand for one."""
    if _is_array(value):
        return array(value, label)
    try:
        found = np.asarray(value)
    except Exception as error:
        raise InputError(f"{label}: {type(value).__name__} cannot become an array: {one_line(error)}") from None
    if found.dtype == object:
        raise InputError(f"{label}: {type(value).__name__} cannot become an array: give numbers, arrays or tensors")
    return found
