"""Speed against peers and limits, as ratios within one run. Start with `python -m benchmarks.run`."""
