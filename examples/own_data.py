"""A data set of one's own: a callable that returns uint8 images (N, C, H, W) and labels for training and test.

lockstep run data=examples/own_data.py:stripes model=examples/own_model.py:Net ranks=2 global_batch=64
"""

import numpy as np


def stripes() -> dict[str, np.ndarray]:
    """Ten classes of stripes that differ in their distance, with noise."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, 3000)
    columns = np.arange(28)
    waves = np.sin(2 * np.pi * columns[None] / (3 + labels[:, None]) + generator.uniform(0, 6, (3000, 1)))
    images = 127 + 60 * waves[:, None, None, :] + generator.normal(0, 20, (3000, 1, 28, 28))
    images = np.clip(images, 0, 255).astype(np.uint8)
    return {
        "train_images": images[:2500],
        "train_labels": labels[:2500],
        "test_images": images[2500:],
        "test_labels": labels[2500:],
    }
