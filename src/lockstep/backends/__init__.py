"""Joining a process group, our own backends (shm/, mpi/), and what exchanges cost on this machine (costs/).

May import machine/, measure/ and the files at the top. Its door is group.py: `join`, `leave` and the small exchanges.
"""
