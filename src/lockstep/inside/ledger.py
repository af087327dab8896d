"""What a rank writes down of each step for `lockstep verify -- COMMAND`: its samples, losses, gradients on their way, settings and updates.

ranks/0001/steps.jsonl    a line for each step, written when the step is done
ranks/0001/3.f64          the sketches of step 3: own gradient, its absolute values, exchanged gradient, final gradient, update
ranks/0001/done           all steps that were asked for are there
problems/PID              why not
"""

from __future__ import annotations

import sys
from typing import Any

from .orders import Orders
from .proof_files import ProofFiles
from .sketch import coarse, content, digest, samples, sketch

# A parameter's sketch has at most so many numbers: a step of 160 parameters takes 3 MB.
SIZE = 512
# Modules whose ranks hold parts of the parameters.
SHARDS = ("FullyShardedDataParallel", "FSDPModule")
# A loader may be some batches ahead of the model.
AHEAD = 4


class Parameter:
    """One parameter: its name, what it was when it was first seen, and what is known of its gradient in this step."""

    def __init__(self, tensor: Any) -> None:
        self.name, self.tensor = "", tensor
        self.origin = digest(tensor)
        self.own: list[Any] | None = None
        """Sketch, absolute values, and the coarse format, of this rank's own gradient: the sum of its passes."""
        self.arrived = False
        """It has got a gradient in this step."""
        self.clipped: tuple[Any, str] | None = None
        """The sketch of the gradient when it was first clipped, and its coarse format."""


class Ledger:
    """Of one training, from its first pass to the last step that is asked for."""

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        self._files, self._settings = ProofFiles(folder), settings
        self.recording = True
        self.inside = False
        """Within a module's call: modules called now are parts of it."""
        self._modules: dict[int, tuple[Any, bool]] = {}
        self._known: dict[int, Parameter] = {}
        self._batches: list[Any] = []
        self._optimizers: list[Any] = []
        self._stepping: Any = None
        self._steps = 0
        self._sizes: list[int] = []
        self._sharded = False
        self._epochs: list[list[int]] = []
        self._orders = Orders(settings["replay"])
        self._before: dict[str, Any] = {}
        self._begin()

    def _begin(self) -> None:
        """A step begins."""
        self._passes: list[dict[str, Any]] = []
        self._losses: list[float | None] = []
        self._clips: list[dict[str, Any]] = []
        self._scale = 1.0
        self._autocast = False

    # --- the model ---

    def trains(self, module: Any) -> bool:
        """Whether a module has anything to learn. Called for every outermost call with gradients, so it is looked up."""
        found = self._modules.get(id(module))
        if found is None:
            found = self._modules[id(module)] = (module, self._meet(module))
        return found[1]

    def _meet(self, module: Any) -> bool:
        torch = sys.modules["torch"]
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._sharded = self._sharded or any(
            kind.__name__ in SHARDS for part in module.modules() for kind in type(part).__mro__
        )
        taken = {parameter.name for parameter in self._known.values()}
        for number, (name, tensor) in enumerate(named):
            found = self._know(tensor)
            if not found.name:
                name = name.replace("_orig_mod.", "").removeprefix("module.")
                found.name = name if name not in taken else f"{type(module).__name__}.{name}"
                if self._settings["perturb"]:
                    _perturb(tensor, float(self._settings["perturb"]), number)
        if self._settings["no_dropout"]:
            for part in module.modules():
                if isinstance(part, _dropouts(torch.nn)):
                    part.p = 0.0
                elif isinstance(part, torch.nn.RNNBase):
                    part.dropout = 0.0
        return bool(named)

    def _know(self, tensor: Any) -> Parameter:
        """A parameter of a module or of an optimizer, whichever comes first. A module tells its name."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = Parameter(tensor)
            tensor.register_hook(lambda gradient, of=tensor: self._arrived(of, gradient))
        return self._known[id(tensor)]

    def _arrived(self, tensor: Any, gradient: Any) -> None:
        """This rank's own gradient, before it is added to what was there, and before any exchange. Autograd passes it on as it is."""
        if not self.recording:
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
            self.give_up(error)

    def begin_pass(self, module: Any, args: Any, keywords: Any) -> None:
        torch = sys.modules["torch"]
        inputs, labels = samples([args, keywords])
        parts = list(module.modules())
        norms = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d
        self._autocast = self._autocast or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self._passes.append(
            {
                "inputs": inputs,
                "labels": self._labels(inputs) or labels,
                "dropout": sum(
                    isinstance(part, _dropouts(torch.nn)) and part.training and part.p > 0.0 for part in parts
                ),
                "batch_norm": sum(isinstance(part, norms) and part.training for part in parts),
                "random": digest(torch.get_rng_state()),
                "draws": False,
            }
        )

    def _labels(self, inputs: list[str]) -> list[str]:
        """What came from the loader with these inputs; with the newest batch of their number, where the script has changed them."""
        near: list[str] = []
        for batch in reversed(self._batches):
            found, labels = samples(batch)
            if found == inputs:
                return labels
            if len(found) == len(inputs):
                near = near or labels
        return near

    def end_pass(self) -> None:
        last = self._passes[-1]
        last["draws"] = digest(sys.modules["torch"].get_rng_state()) != last["random"]

    # --- data ---

    def fetched(self, batch: Any) -> None:
        self._batches = [*self._batches[1 - AHEAD :], batch]

    def batch_size(self, size: Any) -> Any:
        """A loader is made for batches of this size. One process in place of N ranks gets the batches of all of them."""
        if self.recording and isinstance(size, int) and size not in self._sizes:
            self._sizes.append(size)
        asked = self._settings["stretch"]
        return asked[1] if asked and size == asked[0] else size

    def batches(self, sampler: Any, own: Any) -> Any:
        """What a sampler of batches hands out."""
        return self._orders.batches(sampler, own) if self.recording else own

    def shuffled(self, epoch: int) -> None:
        """A sampler that shuffles by its epoch begins to hand out samples."""
        self._epochs.append([int(epoch), self._steps])

    # --- backward and what follows it ---

    def loss(self, given: Any) -> None:
        torch = sys.modules["torch"]
        single = isinstance(given, torch.Tensor) and given.numel() == 1
        self._losses.append(float(given.detach()) if single else None)

    def scaled(self, scale: float) -> None:
        self._scale = scale

    def clip(self, kind: str, limit: float) -> None:
        if not self._clips:
            for parameter in self._known.values():
                if parameter.tensor.grad is not None:
                    gradient = parameter.tensor.grad
                    parameter.clipped = sketch(gradient, SIZE)[0], coarse(gradient)
        self._clips.append({"kind": kind, "limit": limit, "norm": None})

    def clipped(self, norm: Any) -> None:
        if self._clips and norm is not None:
            self._clips[-1]["norm"] = float(norm)

    # --- the update ---

    def before_step(self, optimizer: Any) -> bool:
        """Whether this is a step of its own, not one within another optimizer's."""
        if self._stepping is not None and self._stepping is not optimizer:
            return False
        self._stepping = optimizer
        self._look(optimizer)
        return True

    def _look(self, optimizer: Any) -> None:
        """The gradients that the update gets, and the weights that it changes. A closure may be called several times: the last time counts."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        found: dict[str, Any] = {"layout": [], "final": [], "exchanged": [], "own": [], "size": [], "weights": []}
        for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            self._add(found, self._know(tensor))
        self._before = found

    closure_called = _look

    def _add(self, found: dict[str, Any], parameter: Parameter) -> None:
        torch = sys.modules["torch"]
        tensor = parameter.tensor
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
                "seen": parameter.arrived or tensor.grad is None,
                "own_format": own[2],
                "format": exchanged[1],
            }
        )

    def after_step(self, optimizer: Any) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        torch = sys.modules["torch"]
        before, updates = self._before, []
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for tensor, was, entry in zip(tensors, before["weights"], before["layout"]):  # noqa: B905
            updates.append(sketch(tensor, SIZE)[0] - was)
            entry["after"] = digest(tensor)
            self._known[id(tensor)].arrived = False
        self._steps += 1
        quantities = [before["own"], before["size"], before["exchanged"], before["final"], updates]
        self._files.write_step(
            content(torch.cat([torch.cat(each) for each in quantities])) if tensors else b"",
            {
                "step": self._steps,
                "optimizer": self._optimizers.index(optimizer),
                "settings": [_numbers(group) for group in optimizer.param_groups],
                "passes": self._passes,
                "losses": self._losses,
                "scale": self._scale,
                "autocast": self._autocast,
                "clips": self._clips,
                "layout": before["layout"],
                "buffers": self._buffers(),
                "batch_sizes": self._sizes,
                "sharded": self._sharded,
                "epochs": self._epochs,
                "orders": self._orders.seen,
            },
        )
        for parameter in self._known.values():
            parameter.clipped = None
        self._begin()
        if self._steps >= self._settings["steps"]:
            self.recording = False
            self._files.write_done()
            if self._settings["park"]:  # until all ranks are here: they are ended together
                self._files.wait_until_over()

    def _buffers(self) -> dict[str, str]:
        named = [pair for module, trains in self._modules.values() if trains for pair in module.named_buffers()]
        return {name.removeprefix("module."): digest(buffer) for name, buffer in named}

    def give_up(self, error: BaseException) -> None:
        """Whatever is wrong with us is not the script's business: it goes on, unseen."""
        if self.recording:
            self.recording = False
            self._files.write_problem(error)


def _dropouts(nn: Any) -> Any:
    return nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


def _perturb(tensor: Any, size: float, seed: int) -> None:
    """Change every weight by a random share of itself: what rounding may do, on purpose."""
    torch = sys.modules["torch"]
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    with torch.no_grad():
        tensor.mul_((1 + size * noise).to(tensor.dtype).to(tensor.device))


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """Learning rate, momentum, decay and what else of a parameter group is a number."""
    torch = sys.modules["torch"]
    found: dict[str, float] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = float(value)
        if key == "betas":
            found["beta1"], found["beta2"] = map(float, value)
        elif isinstance(value, (int, float)):
            found[key] = float(value)
    return found
