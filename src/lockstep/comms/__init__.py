"""What an exchange costs on this machine: every collective, backend and message size, measured and checked.

May import launch/ and below. Its door is measure.py: `measure` goes round by round over all backends. pool.py starts the ranks of one
backend, worker.py is what each of them does with the cases of collectives.py, and capabilities.py tries which collective works where. What is
measured, how it is kept, and what `backend=auto` makes of it is in backends/costs/.
"""
