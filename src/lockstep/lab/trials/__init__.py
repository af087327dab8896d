"""What tries a student's code: right first, by the proofs that Lockstep has for its own, then fast, by a race against the reference.

Started as `python -m lockstep.lab.trials FOLDER`; FOLDER has request.json, and verdict.json is written beside it.
"""

from __future__ import annotations


class Failed(Exception):
    """The code raised or hung: it came to no result that could be judged."""
