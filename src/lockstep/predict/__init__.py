"""What more ranks would give: a cost model fitted on this machine, its replay event by event, and its error on runs that it had not seen.

May import comms/, probe.py, launch/ and below. Its door is measure.py, which fits the model, fit.py, which keeps it, and
document.py, which asks it.
"""
