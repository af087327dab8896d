"""What runs inside a training that Lockstep did not start itself (`lockstep attach`, docs/attach.md): hooks, a clock, records.

witness.py, ledger.py and sketch.py see and write down what it computes, instead of when (`lockstep verify -- COMMAND`, docs/verify.md).
It is loaded into foreign processes, by path, whatever their environment has: it uses Python's own library alone, imports torch never by
itself, and works with Python 3.9 and later. Public parts of PyTorch are all that it touches.
May import nothing of Lockstep. Its doors are site/sitecustomize.py, which every Python process of an attached command runs first, and layout.py
and launchers.py, which the rest of Lockstep shares with it.
"""
