"""`lockstep completion`: the script that teaches a shell our commands and keys."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  lockstep completion bash >> ~/.bashrc
  lockstep completion zsh >> ~/.zshrc
  lockstep completion fish > ~/.config/fish/completions/lockstep.fish
"""
# A key is followed by its value, not by a space; and a description may have commas.
_MENDED = {
    "bash": ("COMPREPLY+=($value)", "COMPREPLY+=($value)\n            [[ $value == *= ]] && compopt -o nospace"),
    "zsh": (
        "compadd -U -V unsorted -a completions",
        "local -a keys=(${(M)completions:#*=}) words=(${completions:#*=})\n"
        "        compadd -U -V unsorted -S '' -a keys\n        compadd -U -V unsorted -a words",
    ),
    "fish": ('string split ","', 'string split --max 1 ","'),
}


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell."""
    from click.shell_completion import get_completion_class

    from lockstep.cli.commands import cli

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "lockstep", "_LOCKSTEP_COMPLETE").source()
    click.echo(script.replace(*_MENDED[shell]))
