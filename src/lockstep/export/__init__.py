"""Runs as tables, and tables as files that other tools open.

May import measure/ and the files at the top, and reads run folders only. Its door is tables.py for files of rows, and mlflow.py,
tensorboard.py, wandb.py, trackio.py and perfetto.py for those tools.
"""
