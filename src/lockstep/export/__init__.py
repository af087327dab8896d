"""Runs as tables, and tables as files that other tools open. Only reads run folders."""
