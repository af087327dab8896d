"""Labs for a class: tasks to hand out, predictions before measuring, one file to hand in, and grading from the records (docs/labs.md).

May import report/, study/, verify/, turns/ and below. Its door is folder.py (a student's lab folder), hand_in.py (its one file) and
grade.py, which grades such files (given.py: whatever a teacher names). chain.py keeps the order of predictions and runs, inspect.py reads a
run's records without trusting its summary, and own_code.py starts the processes that try a student's strategy, all-reduce, kernel or loop.
"""
