"""Which messages a strategy sends in a step, when each can start, and how much of them is exposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.predict.exchange import Cost

MIB = 1 << 20
# DDP's first bucket if no size is stated: a small one, so that the exchange begins early.
FIRST_BUCKET = MIB
DEFAULT_BUCKET_MB = 25.0
KNOWN = ("ddp", "flat", "naive", "local-sgd", "diloco")
ROUNDS = ("local-sgd", "diloco")


class Gradient(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter's gradient."""

    bytes: int
    ready: float
    """The share of the backward pass after which it is computed, 0 to 1."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One all-reduce of a step."""

    bytes: float
    ready: float
    """The share of the last backward pass after which it can start."""


def check_known(placement: Placement) -> None:
    """Refuse what the model does not cover."""
    if placement.strategy not in KNOWN:
        raise InputError(
            f"strategy={placement.strategy} cannot be predicted: choose one of {', '.join(KNOWN)} for the prediction"
        )
    if placement.zero:
        raise InputError("zero=true cannot be predicted (its broadcast of weights is not modelled): add zero=false")
    if placement.shares is not None:
        raise InputError("unequal shares cannot be predicted: leave shares out")
    if placement.strategy == "ddp" and placement.ddp.hook == "powersgd":
        raise InputError("ddp.hook=powersgd cannot be predicted: choose ddp.hook=none, fp16 or bf16")


def messages(placement: Placement, gradients: Sequence[Gradient]) -> list[Message]:
    """Messages in the order they are sent; for local-sgd and diloco, those at the end of a round."""
    strategy = placement.strategy
    if strategy == "naive":
        return [Message(bytes=gradient.bytes, ready=1.0) for gradient in gradients]
    if strategy not in ("ddp", "single"):  # with one rank per host the ranks would use ddp
        return [Message(bytes=sum(gradient.bytes for gradient in gradients), ready=1.0)]
    halved = 2 if placement.ddp.hook in ("fp16", "bf16") else 1
    order = sorted(gradients, key=lambda gradient: gradient.ready)
    return [
        Message(
            bytes=sum(order[index].bytes for index in bucket) / halved,
            ready=max(order[index].ready for index in bucket),
        )
        for bucket in buckets([gradient.bytes for gradient in order], placement.ddp.bucket_mb)
    ]


def buckets(sizes: Sequence[int], bucket_mb: float) -> list[list[int]]:
    """DDP's buckets, filled in the order in which gradients arrive: a bucket is full once it has reached its size."""
    limits = [bucket_mb * MIB]
    if bucket_mb == DEFAULT_BUCKET_MB:
        limits = [FIRST_BUCKET, *limits]
    found: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        found[-1].append(index)
        filled += size
        if filled >= limits[min(len(found), len(limits)) - 1]:
            found.append([])
            filled = 0
    return [bucket for bucket in found if bucket]


def exposed(sent: Sequence[Message], backward: float, cost: Callable[[float], Cost]) -> float:
    """Seconds of exchange that outlast a backward pass of `backward` seconds: messages go one after the other, each once it is ready.

    The processor time of a message is never hidden, because that processor is computing.
    """
    end = busy = 0.0
    for message in sent:
        took = cost(message.bytes)
        end = max(end, message.ready * backward) + took.seconds
        busy += took.busy
    return max(end - backward, busy)
