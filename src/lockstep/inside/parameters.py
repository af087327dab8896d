"""The parameters of a training for `lockstep verify -- COMMAND`: their names, their gradients on the way to the update, and what the update does.

Parameters that `fully_shard` has divided are written down as each rank's part of the sketch: sketches add up, so those of all ranks together are
the sketch of the whole, and nobody has to gather anything while the script runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from .sketch import coarse, digest, part_of, sketch

# A parameter's sketch has at most so many numbers: a step of 160 parameters takes 3 MB.
SIZE = 512
# It flattens the parameters of several layers into one before it divides them.
FLATTENS = "FullyShardedDataParallel"


class Parameter:
    """One parameter: its name, what it was when it was first seen, and what is known of its gradient in this step."""

    def __init__(self, tensor: Any) -> None:
        self.name, self.tensor = "", tensor
        self.origin = digest(tensor)
        self.watched = False
        """Its own gradients are seen, from the pass on in which it can have one."""
        self.own: list[Any] | None = None
        """Sketch, absolute values, and the coarse format, of this rank's own gradient: the sum of its passes."""
        self.arrived = False
        """It has got a gradient in this step."""
        self.clipped: tuple[Any, str] | None = None
        """The sketch of the gradient when it was first clipped, and its coarse format."""


class Parameters:
    """All of them, of modules and of optimizers, whichever come first."""

    def __init__(self, give_up: Callable[[BaseException], None]) -> None:
        self.watching = True
        self.unknown = False
        """Ranks hold parts of the parameters, and which ones cannot be told."""
        self._give_up = give_up
        self._known: dict[int, Parameter] = {}

    def meet(self, module: Any, perturb: float) -> bool:
        """A module that may learn, seen for the first time: it tells the names. Whether it has anything to learn."""
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        flat = any(kind.__name__ == FLATTENS for part in module.modules() for kind in type(part).__mro__)
        divided = [tensor for _, tensor in named if hasattr(tensor, "device_mesh")]
        self.unknown = self.unknown or flat or not all(part_of(tensor) for tensor in divided)
        taken = {parameter.name for parameter in self._known.values()}
        for number, (name, tensor) in enumerate(named):
            found = self.know(tensor)
            if not found.name:
                name = name.replace("_orig_mod.", "").removeprefix("module.")
                found.name = name if name not in taken else f"{type(module).__name__}.{name}"
                if perturb:
                    _perturb(tensor, perturb, number)
        return bool(named)

    def know(self, tensor: Any) -> Parameter:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = Parameter(tensor)
        found = self._known[id(tensor)]
        if tensor.requires_grad and not found.watched:  # a frozen one cannot have a hook, and may be freed later
            found.watched = True
            tensor.register_hook(lambda gradient, of=tensor: self._arrived(of, gradient))
        return found

    def _arrived(self, tensor: Any, gradient: Any) -> None:
        """This rank's own gradient, before it is added to what was there, and before any exchange. Autograd passes it on as it is."""
        if not self.watching:
            return
        try:
            parameter = self._known[id(tensor)]
            values, sizes = sketch(gradient, SIZE)
            parameter.arrived = True
            fresh = tensor.grad is None or not bool(sketch(tensor.grad, SIZE)[1].any())
            if fresh or parameter.own is None:
                parameter.own = [values, sizes, coarse(gradient)]
            else:
                parameter.own[0] += values
                parameter.own[1] += sizes
        except Exception as error:
            self._give_up(error)

    def clips(self) -> None:
        """Gradients are about to be clipped for the first time in this step."""
        for parameter in self._known.values():
            gradient = parameter.tensor.grad
            if gradient is not None:
                parameter.clipped = sketch(gradient, SIZE)[0], coarse(gradient)

    def before(self, tensors: Iterable[Any]) -> dict[str, list[Any]]:
        """What an update of these gets: sketches of gradients and weights, and a line for each."""
        found: dict[str, list[Any]] = {
            "layout": [], "final": [], "exchanged": [], "own": [], "size": [], "weights": []
        }  # fmt: skip
        for tensor in tensors:
            self._add(found, self.know(tensor))
        return found

    def _add(self, found: dict[str, list[Any]], parameter: Parameter) -> None:
        torch = sys.modules["torch"]
        tensor = parameter.tensor
        divided = hasattr(tensor, "device_mesh")
        weights = sketch(tensor, SIZE)[0]
        nothing = torch.zeros_like(weights)
        final = nothing if tensor.grad is None else sketch(tensor.grad, SIZE)[0]
        own = parameter.own if parameter.own is not None and parameter.arrived else [nothing, nothing, ""]
        found["weights"].append(weights)
        found["final"].append(final)
        exchanged = parameter.clipped or (final, "" if tensor.grad is None else coarse(tensor.grad))
        found["exchanged"].append(exchanged[0])
        found["own"].append(own[0])
        found["size"].append(own[1])
        found["layout"].append(
            {
                "name": parameter.name or f"parameter {len(found['layout']) + 1}",
                "length": len(weights),
                "type": str(tensor.dtype).removeprefix("torch."),
                "origin": parameter.origin,
                "before": digest(tensor),
                "after": "",
                "divided": divided,
                # What `fully_shard` divides has a gradient of its own only within PyTorch.
                "seen": not divided and (parameter.arrived or tensor.grad is None),
                "own_format": own[2],
                "format": exchanged[1],
            }
        )

    def after(self, tensors: Iterable[Any], before: dict[str, list[Any]]) -> list[Any]:
        """What the update has changed, as sketches; the next step begins."""
        updates = []
        for tensor, was, entry in zip(tensors, before["weights"], before["layout"]):  # noqa: B905  # Python 3.9 has no strict
            updates.append(sketch(tensor, SIZE)[0] - was)
            entry["after"] = digest(tensor)
            self._known[id(tensor)].arrived = False
        for parameter in self._known.values():
            parameter.clipped = None
        return updates


def _perturb(tensor: Any, size: float, seed: int) -> None:
    """Change every weight by a random share of itself: what rounding may do, on purpose."""
    torch = sys.modules["torch"]
    held = tensor.detach()
    held = held.to_local() if hasattr(held, "to_local") else held
    noise = torch.rand(held.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    with torch.no_grad():
        held.mul_((1 + size * noise).to(held.dtype).to(held.device))
