"""Clocks, step records, memory, environment: what is measured, and how it is kept.

May import machine/ and the files at the top. Its door is recorder.py for a rank that writes, and view.py for all that read: one cached
view of a run.
"""
