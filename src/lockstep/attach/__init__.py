"""`lockstep attach`: time a training that was not written for Lockstep, by any launch command (docs/attach.md).

What happens within its processes is in inside/. Here are the folder, the start and the end of the command, and what is made of its records.
May import turns/ (for its guard of foreign programs), launch/ and what is below them. Its door is command.py: `attach`.
"""
