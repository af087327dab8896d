"""Clocks, step records, memory, environment: what is measured, and how it is kept."""
