"""The hooks of `lockstep verify -- COMMAND`: what they see goes to the ledger. Public names of PyTorch alone are replaced, as for `attach`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from .ledger import Ledger
from .saved import Saved
from .standins import Iterators, in_place_of

SETTINGS = "settings.json"


class Hooks:
    """One for the process."""

    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, SETTINGS), encoding="utf-8") as file:
            self._settings: dict[str, Any] = json.load(file)
            began = os.fstat(file.fileno()).st_ctime_ns
        self._saved = Saved(folder, began)
        self._saved.watch()
        self.begin(folder)
        self._iterators = Iterators(self._fetching)
        os.register_at_fork(after_in_child=self._forked)
        self.by_module: dict[str, Callable[[Any], None]] = {
            "torch": self._torch,
            "torch.nn.modules.module": self._modules,
            "torch.nn.utils.clip_grad": self._clipping,
            "torch.autograd": self._autograd,
            "torch.amp.grad_scaler": self._scaler,
            "torch.optim.optimizer": self._optimizers,
            "torch.utils.data.sampler": self._samplers,
            "torch.utils.data.distributed": self._distributed,
            "torch.utils.data.dataloader": self._loaders,
            "safetensors.torch": self._safetensors,
        }

    def begin(self, folder: str) -> None:
        """A training begins: its records go to this folder."""
        self._ledger = Ledger(folder, self._settings)

    def _forked(self) -> None:
        """A forked child is not the rank that its parent is."""
        self._ledger.recording = False

    def imported(self, name: str, module: Any) -> None:
        self._guarded(self.by_module[name], module)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            self._ledger.give_up(error)

    def _before(self, function: Any, told: Callable[..., Any]) -> Any:
        """The function, with `told` called before it with the same arguments."""

        @in_place_of(function)
        def watched(*args: Any, **keywords: Any) -> Any:
            if self._ledger.recording:
                try:
                    told(*args, **keywords)
                except Exception as error:
                    self._ledger.give_up(error)
            return function(*args, **keywords)

        return watched

    def _torch(self, torch: Any) -> None:
        torch.save = self._saved.saves(torch.save)

    def _safetensors(self, module: Any) -> None:
        module.save_file = self._saved.saves(module.save_file)

    def _modules(self, module: Any) -> None:
        call, torch = module.Module.__call__, module.torch
        hooks = self

        @in_place_of(call)
        def watched(self: Any, *args: Any, **keywords: Any) -> Any:
            ledger = hooks._ledger
            if ledger.inside or not ledger.recording or torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return call(self, *args, **keywords)
            if not hooks._guarded(ledger.trains, self):
                return call(self, *args, **keywords)
            ledger.inside = True
            try:
                hooks._guarded(ledger.begin_pass, self, args, keywords)
                found = call(self, *args, **keywords)
                if ledger.recording:
                    hooks._guarded(ledger.end_pass)
                return found
            finally:
                ledger.inside = False

        module.Module.__call__ = watched

    def _autograd(self, module: Any) -> None:
        module.backward = self._before(module.backward, lambda tensors, *_, **__: self._ledger.loss(tensors))

    def _scaler(self, module: Any) -> None:
        kind = module.GradScaler
        kind.scale = self._before(kind.scale, lambda scaler, *_: self._ledger.scaled(float(scaler.get_scale())))

    def _clipping(self, module: Any) -> None:
        for name, kind, word in (("clip_grad_norm_", "norm", "max_norm"), ("clip_grad_value_", "value", "clip_value")):
            setattr(module, name, self._clip(getattr(module, name), kind, word))

    def _clip(self, function: Any, kind: str, word: str) -> Any:
        @in_place_of(function)
        def clip(*args: Any, **keywords: Any) -> Any:
            ledger = self._ledger
            if not ledger.recording:
                return function(*args, **keywords)
            limit = keywords.get(word, args[1] if len(args) > 1 else 0.0)
            self._guarded(ledger.clip, kind, float(limit))
            norm = function(*args, **keywords)
            self._guarded(ledger.clipped, norm)
            return norm

        return clip

    def _optimizers(self, module: Any) -> None:
        def before(optimizer: Any, args: Any, keywords: Any) -> Any:
            ledger = self._ledger
            if not ledger.recording or not self._guarded(ledger.before_step, optimizer):
                return None
            given = keywords.get("closure", args[1] if len(args) > 1 else None)
            if not callable(given):
                return None

            def closure() -> Any:  # gradients are there when it has been called, as L-BFGS and Lightning have it
                found = given()
                self._guarded(ledger.closure_called, optimizer)
                return found

            if "closure" in keywords:
                return args, {**keywords, "closure": closure}
            return (args[0], closure, *args[2:]), keywords

        def after(optimizer: Any, args: Any, keywords: Any) -> None:
            if self._ledger.recording:
                self._guarded(self._ledger.after_step, optimizer)

        module.register_optimizer_step_pre_hook(before)
        module.register_optimizer_step_post_hook(after)

    def _samplers(self, module: Any) -> None:
        made = module.BatchSampler.__init__

        @in_place_of(made)
        def init(self_: Any, sampler: Any, batch_size: Any, *args: Any, **keywords: Any) -> None:
            made(self_, sampler, self._ledger.batch_size(batch_size), *args, **keywords)

        module.BatchSampler.__init__ = init
        iterate = module.BatchSampler.__iter__

        @in_place_of(iterate)
        def batches(self_: Any) -> Any:
            yield from self._ledger.batches(self_, iterate(self_))

        module.BatchSampler.__iter__ = batches

    def _distributed(self, module: Any) -> None:
        kind = module.DistributedSampler

        def told(sampler: Any) -> None:
            if sampler.shuffle:
                self._ledger.shuffled(sampler.epoch)

        kind.__iter__ = self._before(kind.__iter__, told)

    def _loaders(self, module: Any) -> None:
        iterate = module.DataLoader.__iter__

        @in_place_of(iterate)
        def watched(loader: Any) -> Any:
            found = iterate(loader)
            self._iterators.meet(found)
            return found

        module.DataLoader.__iter__ = watched

    def _fetching(self, fetch: Any) -> Any:
        @in_place_of(fetch)
        def watched(iterator: Any) -> Any:
            found = fetch(iterator)
            if self._ledger.recording:
                self._ledger.fetched(found)
            return found

        return watched
