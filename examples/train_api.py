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


def main() -> None:
    for placement in (lockstep.Placement(ranks=1, threads=1), lockstep.Placement(ranks=2, threads=1)):
        run = lockstep.train(recipe, placement)
        summary = run.summary()
        assert summary is not None
        print(
            f"ranks={placement.ranks}: test accuracy {summary['test_accuracy']:.2%}, "
            f"{summary['images_per_second']:,.0f} images/s, {run.folder}"
        )


if __name__ == "__main__":
    main()
