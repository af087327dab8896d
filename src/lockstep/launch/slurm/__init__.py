"""Runs as Slurm jobs: submitted, followed, or started inside an allocation. Its door is launcher.py."""
