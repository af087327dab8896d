"""Which messages a strategy sends in a step, when each can start, and how much of them is exposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from lockstep.errors import InputError
from lockstep.placement import DEFAULT_BUCKET_MB, FIRST_BUCKET_BYTES, Placement
from lockstep.predict.exchange import Cost
from lockstep.predict.protocol import protocol_of

MIB = 1 << 20
KNOWN = ("ddp", "flat", "naive", "fsdp", "local-sgd", "diloco")
ROUNDS = ("local-sgd", "diloco")
# PyTorch's PowerSGD leaves a gradient whole where its two factors are not smaller than it by this factor.
LEAST_COMPRESSION = 2
# Synchronised batch norm adds up in float64.
DOUBLE = 8


class Gradient(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter's gradient."""

    bytes: int
    ready: float
    """The share of the backward pass after which it is computed, 0 to 1."""
    rows: int = 1
    """The parameter's first dimension; `columns` are all others."""
    columns: int = 1
    unit: int = 0
    """What FSDP puts together with it: a child of the model, or what is in none."""


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of synchronised batch norm."""

    channels: int
    ready: float
    """The share of the backward pass after which its ranks exchange."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of a step."""

    bytes: float
    ready: float
    """The share of the last backward pass after which it can start. What computing waits for before that is at 0: where does not matter."""
    collective: str = "all_reduce"
    number: int = 4
    """Bytes of one of its numbers."""
    waits: bool = False
    """Whether computing stops until it is there."""
    after_others: bool = False
    """Whether computing stops until those before it are there."""
    beside: int = 1
    """How many like it are under way at a time, each in a direction of its own."""
    follows: bool = False
    """Whether as many are under way already."""


def check_known(placement: Placement, synchronised: bool = False) -> None:
    """Refuse what the model does not cover."""
    if placement.strategy not in KNOWN:
        raise InputError(
            f"strategy={placement.strategy} cannot be predicted: choose one of {', '.join(KNOWN)} for the prediction"
        )
    if placement.strategy == "fsdp" and placement.fsdp.replicas > 1:
        raise InputError("fsdp.replicas (HSDP) cannot be predicted: leave it out for the prediction")
    if placement.shares is not None:
        raise InputError("unequal shares cannot be predicted: leave shares out")
    if synchronised and placement.strategy in ROUNDS:
        raise InputError(
            f"regularize.batch_norm=synchronised with strategy={placement.strategy} cannot be predicted (some layers "
            "exchange in every step, the rest now and then): choose regularize.batch_norm=per-rank"
        )


def messages(
    placement: Placement,
    gradients: Sequence[Gradient],
    norms: Sequence[Norm] = (),
    passes: int = 1,
    clips: bool = False,
) -> list[Message]:
    """Messages of `placement.ranks` ranks in the order they are sent; for local-sgd and diloco, those at the end of a round."""
    found = [*_of_norms(norms, passes), *_of_strategy(placement, gradients, passes)]
    found.sort(key=lambda message: message.ready)
    if clips and placement.strategy == "fsdp":
        found.append(Message(bytes=4, ready=1.0))  # the gradient's norm
    if placement.zero:
        # Each owner sends the weights that it has updated. Owners are chosen so that they have about as much.
        owners = min(placement.ranks, len(gradients))
        part = sum(gradient.bytes for gradient in gradients) / owners
        beside = min(owners, protocol_of(placement.backend).at_once)
        one = Message(bytes=part, ready=1.0, collective="broadcast", beside=beside)
        follower = msgspec.structs.replace(one, follows=beside > 1)
        found += [one] * beside + [follower] * (owners - beside)
    return found


def _of_strategy(placement: Placement, gradients: Sequence[Gradient], passes: int) -> Iterator[Message]:
    strategy, hook = placement.strategy, placement.ddp.hook
    if strategy == "naive":
        yield from (Message(bytes=gradient.bytes, ready=1.0) for gradient in gradients)
    elif strategy == "fsdp":
        yield from _of_units(gradients, placement.ranks, passes)
    elif strategy not in ("ddp", "single"):  # with one rank per host the ranks would use ddp
        yield Message(bytes=sum(gradient.bytes for gradient in gradients), ready=1.0)
    else:
        order = sorted(gradients, key=lambda gradient: gradient.ready)
        for bucket in buckets([gradient.bytes for gradient in order], placement.ddp.bucket_mb):
            inside = [order[index] for index in bucket]
            ready = max(gradient.ready for gradient in inside)
            if hook == "powersgd":
                # One after the other, and a bucket waits for the one before (strategies/powersgd.py).
                for number, size in enumerate(low_rank(inside, placement.ddp.powersgd_rank)):
                    yield Message(bytes=size, ready=ready, after_others=number == 0)
            else:
                half = hook in ("fp16", "bf16")
                size = sum(gradient.bytes for gradient in inside) / (2 if half else 1)
                yield Message(bytes=size, ready=ready, number=2 if half else 4)


def _of_units(gradients: Sequence[Gradient], ranks: int, passes: int) -> Iterator[Message]:
    """FSDP puts a unit's weights together before its forward and once more before its backward, and divides its gradients at once.

    On a CPU computing waits for each. With several passes weights stay whole from the first to the last.
    """
    for unit in dict.fromkeys(gradient.unit for gradient in gradients):
        inside = [gradient for gradient in gradients if gradient.unit == unit]
        # Rows are divided, and the last ranks' parts filled up.
        size = sum(-(-one.rows // ranks) * ranks * one.bytes / one.rows for one in inside)
        first, last = min(one.ready for one in inside), max(one.ready for one in inside)
        yield Message(bytes=size, ready=0.0, collective="all_gather", waits=True)
        if passes == 1:
            yield Message(bytes=size, ready=first, collective="all_gather", waits=True)
        yield Message(bytes=size, ready=last, collective="reduce_scatter", waits=True)


def _of_norms(norms: Sequence[Norm], passes: int) -> Iterator[Message]:
    """Sums and sums of squares, and the count, in every forward; two sums in every backward."""
    for norm in norms:
        forward = Message(bytes=(2 * norm.channels + 1) * DOUBLE, ready=0.0, number=DOUBLE, waits=True)
        backward = Message(bytes=2 * norm.channels * DOUBLE, ready=0.0, number=DOUBLE, waits=True)
        yield from [forward] * passes
        yield from [backward] * (passes - 1)
        yield msgspec.structs.replace(backward, ready=norm.ready)


def low_rank(gradients: Sequence[Gradient], rank: int) -> tuple[float, float, float]:
    """Bytes of PowerSGD's three messages: what stays whole, and the two factors of the rest."""
    whole = left = right = 0.0
    for one in gradients:
        thin = min(one.rows, one.columns, rank)
        if thin * (one.rows + one.columns) * LEAST_COMPRESSION < one.rows * one.columns:
            left += one.bytes * thin / one.columns
            right += one.bytes * thin / one.rows
        else:
            whole += one.bytes
    return whole, left, right


def buckets(sizes: Sequence[int], bucket_mb: float) -> list[list[int]]:
    """DDP's buckets, filled in the order in which gradients arrive: a bucket is full once it has reached its size."""
    limits = [bucket_mb * MIB]
    if bucket_mb == DEFAULT_BUCKET_MB:
        limits = [FIRST_BUCKET_BYTES, *limits]
    found: list[list[int]] = [[]]
    filled = 0
    for index, size in enumerate(sizes):
        found[-1].append(index)
        filled += size
        if filled >= limits[min(len(found), len(limits)) - 1]:
            found.append([])
            filled = 0
    return [bucket for bucket in found if bucket]


def exposed(sent: Sequence[Message], backward: float, cost: Callable[[Message], Cost]) -> float:
    """Seconds of exchange that outlast a backward pass of `backward` seconds: messages go one after the other, each once it is ready.

    The processor time of a message is never hidden, because that processor is computing.
    """
    end = busy = paused = 0.0
    for message in sent:
        took = cost(message)
        now = message.ready * backward + paused
        start = max(end, now)
        end = start + took.seconds
        if message.waits:
            paused += end - now
        else:
            busy += took.busy
            paused += start - now if message.after_others else 0.0
    return max(end - backward, paused + busy)
