"""`lockstep completion`: the script that teaches a shell our commands and keys."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  lockstep completion bash >> ~/.bashrc
  lockstep completion zsh >> ~/.zshrc
  lockstep completion fish > ~/.config/fish/completions/lockstep.fish
"""
_ADDS = "COMPREPLY+=($value)"


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell."""
    from click.shell_completion import get_completion_class

    from lockstep.cli.commands import cli

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "lockstep", "_LOCKSTEP_COMPLETE").source()
    # In bash a key is followed by its value, not by a space.
    click.echo(script.replace(_ADDS, f"{_ADDS}\n            [[ $value == *= ]] && compopt -o nospace"))
