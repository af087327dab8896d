"""`python -m lockstep`: the same as `lockstep`."""

from lockstep.cli import main

if __name__ == "__main__":
    main()
