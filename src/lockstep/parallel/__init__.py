"""Ranks, process groups and strategies: how the work of a step is divided and put together again."""
