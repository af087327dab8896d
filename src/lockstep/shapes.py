"""The shapes of what a run folder's files hold, as far as anything reads them. Keys that are not here are kept, and nobody relies on them.

A key that may be missing is one that another version, a loop of the user's own, or a run that ended early does not write.
"""

from __future__ import annotations

from typing import Annotated, Literal, Required, TypedDict

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, lt=1e12)]
Moment = Annotated[float, Meta(ge=0, lt=1e11)]
"""Seconds since 1970; beyond this no calendar goes."""
Share = Annotated[float, Meta(ge=0, le=1)]
Number = Annotated[float, Meta(gt=-1e100, lt=1e100)]
"""Beyond what any number here can be, and small enough that squares and sums of many are still numbers."""
Pid = Annotated[int, Meta(ge=1, lt=1 << 31)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
State = Literal["planned", "starting", "running", "done", "failed", "stalled", "cancelled"]


class Status(TypedDict, total=False):
    """status.json of a run."""

    state: Required[State]
    since: Moment | None
    cause: str | None
    supervisor_pid: Pid | None
    host: str | None
    job: str | int | None
    rank: Rank | None
    step: Count | None


class CallSite(TypedDict, total=False):
    """Where a rank is (measure/callsite.py)."""

    file: str
    line: Count
    code: str
    collective: str
    of: str
    """Type and shape of what it exchanges there."""
    group: str
    """The group, where it is not that of all ranks."""
    calls: Count | None
    """Collectives that the rank has begun."""
    alone: str
    """What it does that takes as long as it takes."""


class Beat(TypedDict, total=False):
    """status.json of a rank: its last sign of life."""

    rank: Required[Rank]
    state: Required[str]
    time: Required[Moment]
    pid: Pid | None
    host: str | None
    waits: bool | None
    epoch: Count | None
    step: Count | None
    loss: Number | None
    images_per_second: Number | None
    site: CallSite | None
    """Where it is, if it has taken no step for a while."""
    slowest_s: Seconds | None
    """Of its last steps."""


class Hang(TypedDict, total=False):
    """hang.json: who held up the others while a run was under way (launch/hang.py)."""

    text: Required[str]
    rank: Rank | None
    time: Moment


class Failure(TypedDict, total=False):
    """failure.json of a rank: its own account of why it ended."""

    rank: Required[Rank]
    time: Required[Moment]
    kind: Required[str]
    message: Required[str]
    exit_code: Required[int]
    consequence: Required[bool]
    step: Count | None
    site: CallSite | None


class Exit(TypedDict, total=False):
    """How a process ended, told by whoever started it."""

    rank: Required[Rank]
    time: Required[Moment]
    exit_code: Required[Annotated[int, Meta(gt=-65, lt=1 << 31)]]


class Agent(TypedDict, total=False):
    """agent-N.json: what torchrun says of a host's ranks."""

    failures: list[Exit]


class Spent(TypedDict):
    """Processor seconds of a training, over all its threads and ranks (machine/starving.py)."""

    used: Number
    waited: Number
    """In which threads could have run and had no processor."""
    others: Number
    """What other processes of its machines ran meanwhile."""
    stolen: Number
    """What their hypervisors gave to other machines."""


class Results(TypedDict, total=False):
    """What an epoch or a run came to, and the time that it took."""

    train_loss: Number | None
    train_accuracy: Share | None
    test_loss: Number | None
    test_accuracy: Share | None
    test_top5: Share | None
    test_mae: Number | None
    test_perplexity: Number | None
    int8_loss: Number | None
    int8_accuracy: Share | None
    test_samples: Count | None
    train_seconds: Seconds | None
    train_cpu_seconds: Seconds | None
    eval_seconds: Seconds | None
    logging_seconds: Seconds | None
    images_per_second: Number | None


class Epoch(Results, total=False):
    """A line of epochs.jsonl, over all ranks or of one."""

    epoch: Required[Count]
    rank: Rank | None
    step: Count | None
    steps: Count | None
    samples: Count | None
    time: Moment | None
    delayed_seconds: Seconds | None
    """In which the rank's thread could have run and had no processor."""
    memory_growth_bytes: Count | None
    """The peak of a rank's epoch beyond its size at the start of training."""


class Logged(TypedDict):
    """A line of logged.jsonl of a rank: what an attached script has logged."""

    step: Count
    time: Moment
    values: dict[str, Number]


class Gradients(TypedDict):
    """gradients.json of a rank of an attached command: of each gradient its bytes, and the share of a backward pass after which it is there."""

    bytes: list[Count]
    ready: list[Share]
    """Empty where it is not known: of a compiled model."""


class Numbers(TypedDict, total=False):
    """What a 16-bit format has cost."""

    looks: Count
    gradient_not_finite_share: Share
    gradient_zero_share: Share
    gradient_subnormal_share: Share
    lost_update_share: Share
    skipped_steps: Count | None
    loss_scale: Number | None


class Summary(Results, total=False):
    """summary.json of a run."""

    epochs: Count | None
    steps: Count | None
    stopped_by: str | None
    best_epoch: Count | None
    train_images: Count | None
    checkpoint_seconds: Seconds | None
    compile_seconds: Seconds | None
    fit_seconds: Seconds | None
    cores_had: Share | None
    numbers: Numbers | None
    memory_growth_bytes: list[Count | None]
    weights_sha256: str | None
    ranks_agree: bool | None


class Strategy(TypedDict, total=False):
    """What DDP logs of itself."""

    avg_backward_comm_time: Number | None
    avg_backward_compute_comm_overlap_time: Number | None
    rebuilt_bucket_sizes: list[Count] | None
    bucket_sizes: list[Count] | None


class RankSummary(TypedDict, total=False):
    """summary.json of a rank."""

    rank: Rank | None
    memory_growth_bytes: Count | None
    weights_sha256: str | None
    strategy: Strategy | None


class Environment(TypedDict, total=False):
    """environment.json: what the run ran on."""

    host: str | None
    system: str | None
    cpu: str | None
    cores_usable: Count | None
    cpu_quota: Number | None
    cores_machine: Count | None
    memory_bytes: Number | None
    load_1min: Number | None
    python: str | None
    lockstep: str | None
    torch: str | None
    numpy: str | None
    cpu_capability: str | None
    gpu: str | None


class Operator(TypedDict, total=False):
    name: Required[str]
    calls: Required[Count]
    self_cpu_share: Required[Number]
    self_cpu_us: Required[Number]
    cpu_total_us: Required[Number]
    cpu_memory_bytes: Required[Number]


class Operators(TypedDict, total=False):
    """operators.json of a rank: what torch's profiler saw."""

    first_step: Required[Count]
    steps: Required[Count]
    between: Required[list[str]]
    operators: Required[list[Operator]]


class Args(TypedDict, total=False):
    step: Required[Count]


class Bucket(TypedDict, total=False):
    bucket: Required[Count]
    bytes: Required[Count]


class Event(TypedDict, total=False):
    """Any event of a trace."""

    ph: Required[str]
    ts: Number


class Span(TypedDict, total=False):
    """An event with a beginning and an end."""

    cat: Required[str]
    name: Required[str]
    ts: Required[Number]
    dur: Required[Seconds]
    args: Required[Args]


class TraceAbout(TypedDict, total=False):
    format: Required[int]
    run: Required[str]
    strategy: Required[str]
    host: Required[str]
    clock: Required[str]


class TraceInfo(TypedDict, total=False):
    backend: str
    rank: Rank


class TraceFile(TypedDict, total=False):
    """trace.json of a rank."""

    traceEvents: Required[list[Event]]
    lockstep: Required[TraceAbout]
    distributedInfo: TraceInfo


class Round(TypedDict, total=False):
    """How far a probe has come."""

    round: Required[Count]
    rounds: Required[Count]


class BesideTurns(TypedDict):
    """What the steps of a training took in turns, right before and after it."""

    before: Number
    """Seconds for an image."""
    after: Number
    evaluation: Number
    """Seconds of one, before it."""


class StudyLine(TypedDict, total=False):
    """A line of a study's log.jsonl: a run that begins, or how it ended; or a proof."""

    cell: str | None
    repeat: Count | None
    seed: Count | None
    digest: str | None
    run: str | None
    state: str | None
    cause: str | None
    began: Moment
    ended: Moment
    fit_s: Number
    prepare_s: Number
    start_s: Number
    finish_s: Number
    beside: BesideTurns | None
    """None where its windows say nothing."""
    checked_s: Number
    """Seconds of that check: another start of the cell, and its windows before and after the training."""
    proven: str
    """A cell that was proven, for so many `seconds`: a line of its own."""
    seconds: Number
