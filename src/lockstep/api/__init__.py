"""Lockstep from Python: what `import lockstep` offers, as functions whose results show themselves in a notebook (docs/python.md).

May import report/ and below. Its door is calls.py: `run`, `race`, `explain`, `verify` and `study`; results.py has what they return.
"""
