"""What an exchange costs on this machine: every collective, backend and message size, measured and checked.

plan.py says what is measured; crew.py starts the ranks of one backend, worker.py is what each of them does with the
cases of collectives.py; measure.py goes round by round over all backends; fit.py, report.py and chart.py make it readable; store.py
keeps it; choose.py answers `backend=auto` from it; capabilities.py tries which collective works where.
"""
