"""What an exchange costs on this machine: the cells that `lockstep comms` measured, kept, fitted, and asked by backend=auto.

Its door is choose.py; what was measured between hosts is in between.py; comms/ measures.
"""
