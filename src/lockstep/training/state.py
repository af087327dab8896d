"""A model's whole state, also where a strategy has divided it over the ranks."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and buffers by name. Collective: a strategy that shards weights needs all ranks to put them together."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        together = getattr(tensor, "full_tensor", None)
        state[name] = (together() if together else tensor).detach()
    return state


def digest(state: dict[str, torch.Tensor]) -> str:
    """One hash of all weights and buffers: equal digests mean bit-identical models."""
    found = hashlib.sha256()
    for name, tensor in state.items():
        found.update(name.encode())
        found.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
