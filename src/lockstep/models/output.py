"""Models that return more than scores: a tuple, a list, a dictionary, a data class with `logits`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.errors import InputError


def only_scores(model: nn.Module, inputs: Any, output: Any) -> Tensor:
    """A forward hook, where the loss is one of ours."""
    return scores_of(output)


def scores_of(output: Any) -> Tensor:
    """Pick the scores from a model's output. Other parts (auxiliary heads, features) are not trained on: a loss of the user's own gets them."""
    if isinstance(output, Tensor):
        return output
    found, kind = None, type(output).__name__
    if isinstance(output, Mapping):
        found = output.get("logits", next(iter(output.values())) if len(output) == 1 else None)
        kind = f"{kind} with the keys {', '.join(map(str, output))}" if output else f"an empty {kind}"
    elif hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    if isinstance(found, Tensor):
        return found
    raise InputError(
        f"the model answers {kind}, and which part of it are the scores is not known: "
        "return a tensor, a tuple that begins with it, or a dictionary with the key 'logits'"
    )
