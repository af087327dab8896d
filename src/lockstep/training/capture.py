"""What is kept of a model: its weights at the end."""

from __future__ import annotations

import torch

from lockstep.run import Run, folder_error
from lockstep.training.checkpoint import save_whole


def weights(run: Run, state: dict[str, torch.Tensor]) -> None:
    """The trained weights, whole or not at all."""
    try:
        save_whole(run.folder / "model.pt", {name: tensor.cpu().contiguous() for name, tensor in state.items()})
    except OSError as error:
        raise folder_error(run.folder, error) from None
