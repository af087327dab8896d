"""When gradients come: the last one of a backward pass that DDP exchanges, and once, for `lockstep predict`, all of them with their sizes."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any
from weakref import ref

FILE = "gradients.json"
"""In the folder of a rank: bytes of each gradient, and the share of a backward pass after which it is there."""


# In the first N backward passes, all parameters of a model in DDP that looks for unused ones are watched: one may be used now and then.
LOOKED_AT = 32


class LastGradient:
    """Tells the clock when the last gradient of a backward pass is there. All parameters are watched until a pass has shown whose comes last.

    Where DDP looks for unused parameters, `seen` gets the number of passes that were looked at, and in how many it found any.
    """

    def __init__(self, module: Any, clock: Any, seen: dict[str, Any]) -> None:
        self._clock, self._told = clock, seen
        self._model = ref(module)
        self._latest: Any = None
        self._to_look_at = LOOKED_AT if module.find_unused_parameters else 0
        self._came: set[int] = set()
        self._handles = [
            (parameter, parameter.register_post_accumulate_grad_hook(self._seen))
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def _seen(self, parameter: Any) -> None:
        self._latest = parameter
        if self._to_look_at:
            self._came.add(id(parameter))
        self._clock.ready = perf_counter_ns()

    def before_forward(self) -> bool:
        """DDP decides in its forward pass whether the backward pass exchanges."""
        exchanges = bool(getattr(self._model(), "require_backward_grad_sync", False))
        if self._came:
            self._look()
        if self._latest is not None and len(self._handles) > 1 and not self._to_look_at:
            for parameter, handle in self._handles:
                if parameter is not self._latest:
                    handle.remove()
            self._handles = self._handles[:1]
        return exchanges

    def _look(self) -> None:
        """A backward pass is over: did every parameter get a gradient?"""
        looked, unused = self._told.get("unused", (0, 0))
        self._told["unused"] = looked + 1, unused + (len(self._came) < len(self._handles))
        self._to_look_at -= 1
        self._came = set()


class Arrivals:
    """All gradients of one step, a few steps after the beginning. A compiled model is left alone: its gradients have sizes, and no times."""

    def __init__(self) -> None:
        self.watching = self.compiled = False
        self._parameters: dict[int, Any] = {}
        self._handles: list[Any] = []
        self._came: dict[int, int] = {}
        self._began = 0

    def know(self, optimizer: Any) -> None:
        """The parameters of an optimizer that has taken a step."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._parameters[id(parameter)] = parameter

    def watch(self) -> None:
        self.watching = True
        if not self.compiled:
            for parameter in self._parameters.values():  # one by one: what is there when one fails is removed too
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._seen))

    def _seen(self, parameter: Any) -> None:
        self._came[id(parameter)] = perf_counter_ns()

    def backward_begins(self) -> None:
        """Of several passes in the step, the last one counts."""
        self._came.clear()
        self._began = perf_counter_ns()

    def told(self) -> dict[str, Any]:
        """The step is over: bytes and times of all, in the order of the parameters."""
        self.watching = False
        for handle in self._handles:
            handle.remove()
        parameters, came = list(self._parameters.values()), self._came
        whole = max(came.values(), default=0) - self._began
        found = {
            "bytes": [_bytes(parameter) for parameter in parameters],
            "ready": [(came.get(id(parameter), whole + self._began) - self._began) / whole for parameter in parameters]
            if whole > 0
            else [],
        }
        self._parameters, self._handles, self._came = {}, [], {}
        return found


def _bytes(parameter: Any) -> int:
    """Of its gradient, as a dense one."""
    gradient = parameter if parameter.grad is None else parameter.grad
    return int(gradient.numel()) * int(gradient.element_size())
