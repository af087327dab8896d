"""What this machine really does, found by trying it: number formats, instruction sets, cores (docs/machine.md).

May import the files at the top; nothing here imports torch but the child. Its door is facts.py. A virtual machine may advertise
instructions and trap on them, so small cases run in child processes, once for each machine, kernel, torch and setting. A child that dies,
hangs or gives wrong numbers is an answer.
"""
