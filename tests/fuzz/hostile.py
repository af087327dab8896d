"""What people, scripts and broken tools write where a setting, a name, a number or a path is expected."""

from __future__ import annotations

import click
from hypothesis import strategies as st

from lockstep.cli.commands import cli
from lockstep.settings import all_keys

NUMBERS = [
    "0", "1", "2", "3", "7", "-1", "1.5", "1e3", "1e999", "-1e999", "inf", "-inf", "nan", "1_000", "0x10", "0b1", "1e-320", "٣", "²", "", " ", "1000000000000",
    "1000000000001", "999999999989", "20000000", "9223372036854775807", "9223372036854775808", "9" * 30, "9" * 5000, "+5", "01", "1.", ".5", "true", "none", "null",
]  # fmt: skip
TEXTS = [
    "x", "none", "auto", "[/bold]", "[red]x[/red]", "\x1b[2J", "\u202e", "\ud800", "a\0b", "n" * 300, "../../../etc/passwd", "/dev/zero", "/dev/null", "/", ".", "..", "~",
    "'", '"', '"x', "[", "]", "{", "}", "[[[[", "[" * 3000, "{a=" * 500, "\n", "\t", "%s%n", "$(id)", "`id`", "; id", "日本", "é" * 130, "💥", "=", "==", "a=b", "--", "-", "--help",
    "2020-01-01", "2020-01-01T00:00:00Z", "07:32:00", '"2020"', "[1, 2]", '["a", 1]', "[[]]", "{}", "{a = 1}", "emulated:2", "emulated:0", "emulated:-1", "emulated:99999999999",
    "1gbit,0.5ms", "1gbit", "0bit,0ms", "99999gbit,9s,100%", "nets.py:Net", "nowhere.py:X", ":", "a:b:c", "torch:nn", "mnist-convnet", "embedded", "mnist", "cifar10", "tied-conv",
    "single", "spawn", "torchrun", "mpirun", "slurm", "gloo", "nccl", "mpi", "shm", "cuda", "cpu", "ddp", "fsdp", "local-sgd", "diloco", "flat", "naive", "adam", "sgd", "cosine",
    "bf16", "fp16", "pure-fp16", "qat", "last", "mine", "failed", "study-", "published", "machine", "batch-size", "workers", "no-such", "host:port", "localhost:1", ":::1", "[::1]:5",
]  # fmt: skip
any_text = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.text(max_size=30),
    st.text("0123456789.e-[]{}\"'=,", max_size=20),
)
KEYS = [
    *all_keys(),
    "model_args.k",
    "placement.ranks",
    "recipe.epochs",
    "lr",
    "batch",
    "",
    "a.b.c.d",
    "optimizer",
    "optimizer.",
    ".lr",
    "x" * 400,
    "\ud800",
    "ranks ",
]
# Mostly what is meant, so that inputs get beyond the first check.
SANE = {
    "data": ["embedded"], "train_limit": ["64"], "test_limit": ["32"], "ranks": ["1", "2", "3", "4"], "global_batch": ["32", "64", "48", "1000000000000"],
    "micro_batch": ["1", "7", "8", "13"], "accumulation": ["1", "2", "3"], "epochs": ["1", "2"], "threads": ["1", "2"], "hosts": ["1", "2", "emulated:2"],
    "launcher": ["auto", "single", "spawn", "torchrun", "mpirun", "slurm"], "strategy": ["auto", "ddp", "flat", "fsdp", "diloco"], "backend": ["auto", "gloo", "shm", "mpi"],
}  # fmt: skip


@st.composite
def words(draw: st.DrawFn) -> list[str]:
    """key=value words."""
    found = [
        f"{key}={draw(st.sampled_from(SANE[key]))}" for key in draw(st.lists(st.sampled_from(list(SANE)), max_size=4))
    ]
    for _ in range(draw(st.integers(0, 3))):
        found.append(f"{draw(st.sampled_from(KEYS))}={draw(any_text)}")
    if draw(st.integers(0, 9)) == 0:
        found.append(draw(any_text))
    return found


TOML_VALUES = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from(TEXTS).map(lambda text: f'"{text}"'), st.sampled_from(TEXTS), any_text
)
TABLES = [
    "placement",
    "recipe",
    "optimizer",
    "placement.ddp",
    "factors",
    "factors.launch.a",
    "cells.a",
    "cells",
    "quick",
    "published",
    "a" + ".a" * 200,
    "x",
    "schedule",
    "slurm",
]


@st.composite
def toml(draw: st.DrawFn, keys: list[str]) -> str:
    """The text of a file that is nearly TOML."""
    lines = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.integers(0, 9))
        if kind == 0:
            name = draw(st.sampled_from(TABLES))
            lines.append(f"[[{name}]]" if draw(st.booleans()) else f"[{name}]")
        elif kind == 1:
            lines.append(draw(any_text))
        elif kind == 2:
            lines.append(f"{draw(st.sampled_from(keys))} = [{draw(TOML_VALUES)}, {draw(TOML_VALUES)}]")
        else:
            lines.append(f"{draw(st.sampled_from(keys))} = {draw(TOML_VALUES)}")
    return "\n".join(lines)


STUDY_KEYS = ["repeats", "seeds", "baseline", "metrics", "budget_minutes", "target_accuracy", "name", "about", "files", "recipe.data", "recipe.epochs", "factors.ranks",
              "factors.global_batch", "placement.ranks", "cells.a.ranks", "cells.b.seed", "quick.repeats", "quick.epochs", "published", "base", "x"]  # fmt: skip


def every_command() -> dict[str, click.Command]:
    """By its words, subcommands too."""
    found: dict[str, click.Command] = {}
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                each = command.get_command(context, inner)
                assert each is not None
                found[f"{name} {inner}"] = each
        else:
            found[name] = command
    return found


# Takes seconds each time, and takes no input but where runs are.
SLOW = ("doctor", "demo", "kernels build")
# Measures for minutes, in this process, where all its options are right.
MINUTES = ("kernels bench",)
COMMANDS = {name: command for name, command in every_command().items() if name not in SLOW}


@st.composite
def command_line(draw: st.DrawFn, names: list[str]) -> list[str]:
    """Any command with any of its options, some of them as they should be. `names`: runs, studies and files that are there."""
    name = draw(st.sampled_from(sorted(COMMANDS.keys() - set(MINUTES))))
    found = name.split()
    for option in draw(st.lists(st.sampled_from(COMMANDS[name].params), max_size=4)):
        if isinstance(option, click.Argument):
            for _ in range(draw(st.integers(0, 3))):
                found.append(
                    draw(st.one_of(st.sampled_from(names), words().map(lambda w: w[0] if w else "x"), any_text))
                )
            continue
        assert isinstance(option, click.Option)
        found.append(draw(st.sampled_from(option.opts + option.secondary_opts)))
        if not option.is_flag and draw(st.integers(0, 9)):
            good = list(option.type.choices) if isinstance(option.type, click.Choice) else ["1", "2", *names]
            found.append(draw(st.one_of(st.sampled_from([str(each) for each in good]), any_text)))
    if draw(st.integers(0, 3)) == 0:
        found.append(draw(any_text))
    return found
