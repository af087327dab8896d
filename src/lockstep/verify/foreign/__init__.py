"""`lockstep verify -- COMMAND`: the proof for a script that was not written for Lockstep (docs/verify.md).

What happens within its processes is in inside/witness.py. Here the command is run, with its ranks and as one process (observe.py, words.py), what it
does to files is undone (undo.py), and its records are read (records.py), compared (numbers.py, data.py, compared.py, tolerance.py, exchange.py) and
judged (judge.py). The door is prove.py.
"""
