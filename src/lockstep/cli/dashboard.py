"""`lockstep dashboard`: runs and studies in the browser, live."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.options import json_option, runs_option
from lockstep.cli.output import note, print_json
from lockstep.errors import InputError
from lockstep.reading import is_dir
from lockstep.run import runs_root

if TYPE_CHECKING:
    from lockstep.dashboard.server import Server

PORT = 8765

EPILOG = """\b
Examples:
  lockstep dashboard                          the runs of ./runs; opens the browser where there is one
  lockstep dashboard --runs /data/runs --port 9000 --no-open
  lockstep dashboard --host 0.0.0.0           for other machines too: they need the token that is printed

Over ssh, keep it on this machine and forward the port:  ssh -L 8765:localhost:8765 HOST
docs/dashboard.md says what is on it.
"""


@click.command("dashboard", epilog=EPILOG)
@runs_option
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help="0: any that is free.")
@click.option("--host", default="127.0.0.1", help="The address to listen at.")
@click.option("--open/--no-open", "opens", default=True, help="Open the browser, where there is a desktop.")
@json_option
def command(runs: Path | None, port: int, host: str, opens: bool, as_json: bool) -> None:
    """Watch runs and studies in the browser: list, live curves, every rank, logs; compare and stop runs."""
    from lockstep.dashboard.server import Server

    root = runs_root(runs)
    if not is_dir(root):
        raise InputError(
            f"--runs {root}: there is no such folder yet: start a run with 'lockstep run', or name another"
        )
    server = Server(root, host, port)
    _say(server, root, as_json)
    if opens:
        open_browser(server.address)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.serve()
    except KeyboardInterrupt:
        note("the dashboard has ended; runs go on")


def _say(server: Server, root: Path, as_json: bool) -> None:
    guard = server.app.guard
    if as_json:
        print_json({"address": server.address, "port": server.server_port, "token": guard.token, "runs": str(root)})
    else:
        click.echo(f"Dashboard of {root}: {server.address}")
        note("Ctrl-C ends it; runs go on. The token in the address is what stops a run: keep it to yourself.")
    if guard.open:
        note(
            "it can be reached from other machines, without encryption: where you do not trust the network, use ssh -L"
        )
    sys.stdout.flush()


def open_browser(address: str) -> None:
    """Where there is a desktop; never in CI or over ssh."""
    import webbrowser

    desktop = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if desktop and not os.environ.get("CI") and not os.environ.get("SSH_CONNECTION"):
        webbrowser.open(address)
