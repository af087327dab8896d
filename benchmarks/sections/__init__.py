"""One file per question; each has `measure(settings) -> Section`, and `run.py` only ties them together."""
