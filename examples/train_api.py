"""Training from Python: one recipe on two placements, compared. `lockstep show last` shows the second run again.

python examples/train_api.py
"""

import lockstep

recipe = lockstep.Recipe(
    model="mnist-convnet",
    data="embedded",
    global_batch=64,
    epochs=1,
    optimizer=lockstep.Optimizer(name="adam", lr=2e-3),
)
for ranks in (1, 2):
    run = lockstep.run(recipe, ranks=ranks, threads=1)
    print(f"ranks={ranks}: {run}")
