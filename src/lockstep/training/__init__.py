"""Training: one session for recipes and for a user's own loop, with steps, epochs, optimizers, evaluation and checkpoints.

May import strategies/, backends/, data/, models/, kernels/, quantize/, measure/ and machine/. Its doors are assemble.py (a recipe) and
start.py (a script). One step is recipe_step.py (what the recipe does) on step.py (the gradient of a global batch, timed).
"""
