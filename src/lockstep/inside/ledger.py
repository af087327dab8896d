"""What a rank writes down of each step for `lockstep verify -- COMMAND`: its samples, losses, gradients on their way, settings and updates.

proof_files.py says which files it goes into.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from .orders import Orders
from .parameters import Parameters
from .proof_files import ProofFiles
from .sketch import content, digest, samples

# A loader may be some batches ahead of the model.
AHEAD = 4


class Ledger:
    """Of one training, from its first pass to the last step that is asked for."""

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        self._files, self._settings = ProofFiles(folder), settings
        self.recording = True
        self.inside = False
        """Within a module's call: modules called now are parts of it."""
        self._modules: dict[int, tuple[Any, bool]] = {}
        self._parameters = Parameters(self.give_up)
        self._batches: list[Any] = []
        self._optimizers: list[Any] = []
        self._stepping: Any = None
        self._steps = 0
        self._sizes: list[int] = []
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
        learns = self._parameters.meet(module, float(self._settings["perturb"]))
        if self._settings["no_dropout"]:
            for part in module.modules():
                for name in _dropout_rates(part):
                    with suppress(AttributeError):  # a property that cannot be set
                        setattr(part, name, 0.0)
        return learns

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
                "dropout": sum(bool(part.training and _dropout_rates(part)) for part in parts),
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
            self._parameters.clips()
        self._clips.append({"kind": kind, "limit": limit, "norm": None})

    def clipped(self, norm: Any) -> None:
        if (
            self._clips and norm is not None and not hasattr(norm, "to_local")
        ):  # a divided one would have to be gathered
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
        self._before = self._parameters.before(_updated(optimizer))

    closure_called = _look

    def after_step(self, optimizer: Any) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        torch = sys.modules["torch"]
        before = self._before
        updates = self._parameters.after(_updated(optimizer), before)
        self._steps += 1
        quantities = [*(before[name] for name in ("own", "size", "exchanged", "final")), updates, before["weights"]]
        self._files.write_step(
            content(torch.cat([torch.cat(each) for each in quantities])) if updates else b"",
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
                "unknown": self._parameters.unknown,
                "epochs": self._epochs,
                "orders": self._orders.seen,
            },
        )
        self._begin()
        if self._steps >= self._settings["steps"]:
            self.recording = self._parameters.watching = False
            self._files.write_done()
            if self._settings["park"]:  # until all ranks are here: they are ended together
                self._files.wait_until_over()

    def _buffers(self) -> dict[str, str]:
        named = [pair for module, trains in self._modules.values() if trains for pair in module.named_buffers()]
        return {name.removeprefix("module."): digest(buffer) for name, buffer in named}

    def give_up(self, error: BaseException) -> None:
        """Whatever is wrong with us is not the script's business: it goes on, unseen."""
        if self.recording:
            self.recording = self._parameters.watching = False
            self._files.write_problem(error)


# By these names modules that are no dropout themselves have the rate of theirs: RNNs, nn.MultiheadAttention, transformers' models.
RATES = ("dropout", "attention_dropout")


def _dropout_rates(part: Any) -> list[str]:
    """The attributes of a module that are rates of dropout, and not 0."""
    nn = sys.modules["torch"].nn
    kinds = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
    names = ("p",) if isinstance(part, kinds) else RATES
    rates = {name: getattr(part, name, None) for name in names}
    return [name for name, rate in rates.items() if isinstance(rate, float) and rate > 0.0]


def _updated(optimizer: Any) -> list[Any]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


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
