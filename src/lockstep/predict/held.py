"""What predictions are checked on: groups of placements that no fit has seen, each with the fit that predicts them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

NETS = Path(__file__).with_name("nets.py")
COMMON = ("threads=1", "test_limit=100", "seed=5")


class Held(NamedTuple):
    """A placement that no fit has seen."""

    kind: str
    """What has to be predicted about it."""
    words: tuple[str, ...]

    @property
    def emulated(self) -> bool:
        return any(word.startswith("hosts=emulated") for word in self.words)

    @property
    def ranks(self) -> int:
        return self.number("ranks")

    def number(self, key: str) -> int:
        return next(int(word.partition("=")[2]) for word in self.words if word.startswith(f"{key}="))


class Group(NamedTuple):
    """Placements that take their windows in the same rounds as what they are predicted from."""

    name: str
    fit: tuple[str, ...]
    """The words of what is fitted, with its global batch."""
    held: tuple[Held, ...]


def _link(hosts: int, link: str, batch: int, *more: str) -> tuple[str, ...]:
    return (f"hosts=emulated:{hosts}", f"ranks={hosts}", f"link={link}", f"global_batch={batch}", *more)


def _ranks(count: int, batch: int, *more: str) -> tuple[str, ...]:
    alone = ("strategy=single",) if count == 1 else ()
    return (f"ranks={count}", f"global_batch={batch}", *alone, *more)


MNIST = ("model=mnist-convnet", "data=embedded", "ranks=2", "global_batch=256", "strategy=ddp")
VGG = ("model=cifar-vgg", "data=embedded-color", "ranks=2", "global_batch=32")
RESNET = (f"model={NETS}:resnet", "data=embedded-color", "ranks=2", "global_batch=128")
TRANSFORMER = (f"model={NETS}:Transformer", "data=embedded", "ranks=2", "global_batch=128")
LOCAL = "strategy=local-sgd"


def _of_another_net(larger: int) -> tuple[Held, ...]:
    """One of each kind, and a batch that is larger than what was fitted."""
    return (
        Held("batch", _ranks(1, 24)),
        Held("ranks", _ranks(2, 48)),
        Held("ranks", _ranks(2, larger)),
        Held("accumulation", _ranks(2, 96, "accumulation=2")),
        Held("local SGD", _ranks(2, 48, LOCAL, "local_sgd.every=4")),
        Held("crowded", _ranks(4, 96)),
        Held("link", _link(2, "100mbit,2ms", 48)),
    )


GROUPS = (
    Group(
        "mnist-convnet, gloo",
        (*MNIST, "backend=gloo"),
        (
            Held("batch", _ranks(1, 48)),
            Held("batch", _ranks(1, 200)),
            Held("ranks", _ranks(2, 96)),
            Held("ranks", _ranks(2, 20)),
            Held("accumulation", _ranks(2, 192, "accumulation=4")),
            Held("accumulation", _ranks(1, 96, "accumulation=3")),
            Held("local SGD", _ranks(2, 96, LOCAL, "local_sgd.every=4")),
            Held("crowded", _ranks(3, 96)),
            Held("crowded", _ranks(4, 96)),
            Held("crowded", _ranks(8, 256)),
        ),
    ),
    Group(
        "mnist-convnet, links",
        (*MNIST, "backend=gloo"),
        (
            Held("link", _link(2, "100mbit,5ms", 96)),
            Held("link", _link(2, "1gbit,0.5ms", 96)),
            Held("link", _link(2, "10mbit,0ms", 96)),
            Held("link", _link(2, "10gbit,0.05ms", 192)),
            Held("link", _link(2, "1gbit,50ms", 64)),
            Held("link", _link(2, "100mbit,5ms", 96, LOCAL, "local_sgd.every=8")),
            Held("hosts", _link(3, "100mbit,5ms", 96)),
            Held("hosts", _link(4, "1gbit,2ms", 128)),
            Held("hosts", _link(6, "1gbit,1ms", 96)),
            Held("hosts", _link(8, "1gbit,1ms", 128)),
        ),
    ),
    Group(
        "mnist-convnet, shm",
        (*MNIST, "backend=shm"),
        (
            Held("ranks", _ranks(2, 96)),
            Held("ranks", _ranks(2, 20)),
            Held("accumulation", _ranks(2, 192, "accumulation=3")),
            Held("local SGD", _ranks(2, 96, LOCAL, "local_sgd.every=4")),
            Held("crowded", _ranks(4, 96)),
        ),
    ),
    Group(
        "cifar-vgg, gloo",
        (*VGG, "backend=gloo"),
        (
            Held("batch", _ranks(1, 12)),
            Held("ranks", _ranks(2, 24)),
            Held("accumulation", _ranks(2, 48, "accumulation=3")),
            Held("crowded", _ranks(4, 32)),
            Held("link", _link(2, "1gbit,0.5ms", 24)),
            Held("link", _link(2, "200mbit,1ms", 32)),
        ),
    ),
    Group("resnet, gloo", (*RESNET, "backend=gloo"), _of_another_net(160)),
    Group("transformer, gloo", (*TRANSFORMER, "backend=gloo"), _of_another_net(192)),
    Group(
        "mnist-convnet, fsdp",
        (*MNIST, "backend=gloo", "strategy=fsdp"),
        (
            Held("strategy", _ranks(2, 96)),
            Held("strategy", _ranks(4, 96)),
            Held("strategy", _link(2, "100mbit,5ms", 96)),
            Held("strategy", _link(4, "1gbit,1ms", 128)),
            Held("strategy", _link(8, "1gbit,1ms", 128)),
        ),
    ),
    Group(
        "mnist-convnet, synchronised batch norm",
        (*MNIST, "backend=gloo", "regularize.batch_norm=synchronised"),
        (
            Held("strategy", _ranks(2, 96)),
            Held("strategy", _ranks(3, 96)),
            Held("strategy", _link(4, "1gbit,1ms", 128)),
            Held("strategy", _link(6, "1gbit,1ms", 96)),
        ),
    ),
    Group(
        "transformer, zero",
        (*TRANSFORMER, "backend=gloo", "zero=true"),
        (
            Held("strategy", _ranks(2, 48)),
            Held("strategy", _ranks(4, 96)),
            Held("strategy", _link(4, "1gbit,1ms", 96)),
            Held("strategy", _link(6, "1gbit,1ms", 96)),
        ),
    ),
    Group(
        "transformer, powersgd",
        (*TRANSFORMER, "backend=gloo", "ddp.hook=powersgd"),
        (
            Held("strategy", _ranks(2, 48)),
            Held("strategy", _ranks(4, 96)),
            Held("strategy", _link(2, "100mbit,2ms", 48)),
            Held("strategy", _link(4, "1gbit,1ms", 96)),
        ),
    ),
    Group(
        "transformer, bf16",
        (*TRANSFORMER, "backend=gloo", "ddp.hook=bf16"),
        (
            Held("strategy", _ranks(2, 48)),
            Held("strategy", _ranks(3, 96)),
            Held("strategy", _link(2, "100mbit,2ms", 48)),
            Held("strategy", _link(8, "1gbit,1ms", 128)),
        ),
    ),
)
# A batch that was fitted, so that only the path between the hosts is unknown; a small one, so that it is visible.
NEXT_TO_NO_LINK = {hosts: _link(hosts, "0.1ms", 4 * hosts) for hosts in (2, 4)}
# Twice as many ranks as cores, with few samples: what the exchange takes longer where ranks take turns on the cores.
CROWDED_SAMPLES = 6
QUICK = (Group(GROUPS[0].name, GROUPS[0].fit, tuple(GROUPS[0].held[index] for index in (0, 2, 4))),)
