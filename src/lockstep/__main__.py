"""`python -m lockstep`: the command line, where its console script is not on the path (a notebook's kernel)."""

from __future__ import annotations

from lockstep.cli import main

if __name__ == "__main__":
    main()
