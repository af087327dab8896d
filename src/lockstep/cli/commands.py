"""The command line: a click group that imports a command's module only when that command runs.

`lockstep --help` therefore costs little more than starting Python, and never imports torch.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import click

from lockstep.errors import InputError, LockstepError, RunCancelled
from lockstep.text import is_text

# In the order of work: name and one-line help. Each command is `command` in the module of its name.
COMMANDS = {
    "demo": "Train the published MNIST net with one process and with two ranks; compare.",
    "doctor": "Say what this machine can do, what is missing and how to get it.",
    "data": "List, fetch, verify and look at data sets.",
    "models": "List the models with parameters, FLOPs and input shape.",
    "recipes": "List the published recipes, or print one.",
    "comms": "Measure every collective on every backend; see which backend can do what.",
    "preflight": "Try every node, core and link of an allocation; name what is slow or wrong.",
    "run": "Train a recipe on a placement; a run folder comes out.",
    "attach": "Time any training command, unedited: where do its steps go?",
    "follow": "Go back to a run that is under way, and see it to its end.",
    "runs": "List the runs.",
    "show": "Show one run: results, where the time went, every rank.",
    "verify": "Prove that N ranks compute the same as one process.",
    "race": "Find out which of several placements is fastest, in turns.",
    "tune": "Find the fastest way to train a recipe on this machine.",
    "study": "Vary factors, repeat every cell in turns, compare.",
    "compare": "Compare runs, or the cells of a study.",
    "explain": "Say where the time of a run or study went, and what to do next.",
    "predict": "Predict what more ranks, another batch or another link would give.",
    "report": "Make one page of runs or studies: findings, curves, tables.",
    "dashboard": "Watch runs and studies in the browser, live.",
    "quantize": "Turn a finished run's model into 8-bit integers; test, write and measure it.",
    "kernels": "Compile the fused convolution kernels, and measure them against PyTorch's own.",
    "lab": "Labs for a class: predict, measure, hand in, grade.",
    "export": "Write runs for other tools: CSV, JSON, Parquet, MLflow, TensorBoard, W&B, trackio, Perfetto.",
    "schema": "Print the JSON Schema of recipe and study files, for editors.",
    "completion": "Print the shell completion script.",
}

EPILOG = """\b
Examples:
  lockstep demo
  lockstep run ranks=2 global_batch=256 epochs=3
  lockstep run recipe.toml optimizer.lr=0.001 --dry-run
  lockstep verify ranks=2

Exit codes: 0 done, 2 wrong input, 3 a run failed, 4 data cannot be had, 130 stopped by Ctrl-C.
"""


class Help(click.HelpFormatter):
    """Examples fit the window too, which click leaves as they are: where what is said of one does not fit beside it, all of it stands below."""

    def write_text(self, text: str) -> None:
        parts = text.split("\n\n")
        super().write_text("\n\n".join(self._fitted(part) if part.startswith("\b") else part for part in parts))

    def _fitted(self, block: str) -> str:
        lines = block.split("\n")
        if all(len(line) <= self.width - self.current_indent for line in lines):
            return block
        if not any(line.startswith(" ") for line in lines):  # no examples
            return block.removeprefix("\b\n")
        found = []
        for line in lines:
            first = line[: len(line) - len(line.lstrip())]
            command, _, what = line.lstrip().partition("  ")
            found += [first + command, *([f"{first}    {what.strip()}"] if what else [])]
        return "\n".join(found)


class Context(click.Context):
    formatter_class = Help


class LazyGroup(click.Group):
    """Lists commands from the table and imports one only when it is asked for."""

    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"lockstep.cli.{cmd_name}").command
        for each in (command, *getattr(command, "commands", {}).values()):
            each.context_class = Context
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else " See 'lockstep --help'."
            raise click.UsageError(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(package_name="lockstep-bench", prog_name="lockstep")
def cli() -> None:
    """A lab bench for data-parallel training on PyTorch.

    One command trains a recipe in any distributed way this machine offers, proves that N workers compute the
    same as one, and shows where the time went.
    """


def start(words: Sequence[str]) -> int:
    """The whole life of the process: returns the exit code."""
    _open_closed()
    # A terminal or pipe that cannot show a character gets its escape, not an error.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code = call(words)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: nothing is left to stop
    for stream in (sys.stdout, sys.stderr):
        _let_go(stream)
    return code


def _open_closed() -> None:
    """A stream that was closed by whoever started us is None: what is printed to it is dropped, and nobody has to ask."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115


def _let_go(stream: TextIO) -> None:
    """What nobody can read any more is dropped here; at its very end the interpreter would complain and change the exit code."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def call(words: Sequence[str]) -> int:
    """Run the command line and turn every expected error into one line and an exit code."""
    color = False if os.environ.get("NO_COLOR") else None
    try:
        _check_text(words)
        # standalone_mode=False: we map errors to exit codes ourselves (click would exit 1 on Ctrl-C).
        code = cli.main(list(words), standalone_mode=False, color=color)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        _say(error.format_message())
        code = 2
    except click.ClickException as error:
        _say(f"lockstep: {_problem(error)}")
        code = 2
    except LockstepError as error:
        _say(f"lockstep: {error}")
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("lockstep: stopped")
        code = RunCancelled.exit_code
    except RuntimeError as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps what is raised while a class is made
            raise
        _say("lockstep: stopped")
        code = RunCancelled.exit_code
    except BrokenPipeError:
        code = 0  # the reader of stdout went away (`lockstep runs | head`): not an error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        _say(f"lockstep: cannot write the output: {error.strerror}")
        code = InputError.exit_code
    return code if isinstance(code, int) else 0


def _problem(error: click.ClickException) -> str:
    """In one line, with the command that it is about."""
    context, names = getattr(error, "ctx", None), list[str]()
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    said = " ".join(error.format_message().split())
    return f"{' '.join(names)}: {said[:1].lower()}{said[1:]}" if names else said


def _say(text: str) -> None:
    from lockstep.report.terminal import note

    note(text)


def _check_text(words: Sequence[str]) -> None:
    """Run folders, plans and pages are UTF-8: a word that is not could be written into none of them."""
    for word in words:
        if not is_text(word) or "\0" in word:
            raise InputError(f"'{word}' is not valid text (UTF-8): give the file or folder another name")
