"""The proof that N ranks compute what one process computes (docs/verify.md).

May import attach/, turns/, launch/ and below. Its door is prove.py. judge.py compares what training/witness.py wrote down, verified.py
keeps what was proven. foreign/ does it for scripts that were not written for Lockstep.
"""
