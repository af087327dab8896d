"""Python runs this first in every process of an attached command. It does nothing until that process imports torch.

A `sitecustomize` that the user's environment has is run as if ours were not there.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

TYPE_CHECKING = False  # every Python process of the command would pay for importing typing
if TYPE_CHECKING:
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
RUN = "LOCKSTEP_ATTACH"
"""In the environment: the run folder."""
PROOF = "LOCKSTEP_VERIFY"
"""In the environment, instead of it: where `lockstep verify -- COMMAND` keeps its records."""
HOOKS = {RUN: "hooks", PROOF: "witness"}
"""The module of `Hooks` for each of the two."""
PACKAGE = "lockstep_attached"
"""What lockstep.inside is called here, where there may be no Lockstep, or another one."""
WATCHED = frozenset(
    [
        "torch",
        "torch.nn.modules.module",
        "torch.autograd",
        "torch.optim.optimizer",
        "torch.optim.lr_scheduler",
        "torch.profiler.profiler",
        "torch.utils.data.dataloader",
        "torch.distributed.distributed_c10d",
        "torch.distributed.checkpoint.state_dict_saver",
        "torch.utils.tensorboard.writer",
        "tensorboardX.writer",
        "safetensors.torch",
        "tqdm.std",
        "lightning.pytorch.trainer.trainer",
        "lightning.pytorch.callbacks.callback",
        "lightning.pytorch.core.module",
        "lightning.fabric.loggers.logger",
        "pytorch_lightning.trainer.trainer",
        "pytorch_lightning.callbacks.callback",
        "pytorch_lightning.core.module",
        "lightning_fabric.loggers.logger",
        "transformers.trainer",
        "transformers.trainer_callback",
        "accelerate.accelerator",
        "accelerate.data_loader",
        "accelerate.optimizer",
    ]
)
"""The modules that have a hook (hooks.py, frameworks.py). Some begin before torch is imported, and end after it."""
PROVEN = frozenset(
    [
        "torch",
        "torch.nn.modules.module",
        "torch.nn.utils.clip_grad",
        "torch.autograd",
        "torch.amp.grad_scaler",
        "torch.optim.optimizer",
        "torch.utils.data.sampler",
        "torch.utils.data.distributed",
        "torch.utils.data.dataloader",
        "safetensors.torch",
    ]
)
"""Those that have one of witness.py."""


class Watcher:
    """On the list of those whom Python asks for a module: it finds none itself, but is told when one has been imported."""

    def __init__(self, run: str, names: frozenset[str]) -> None:
        self._run, self._names = run, names
        self._hooks: Any = None
        self._early: list[tuple[str, Any]] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._names:
            return None
        if name == "torch":
            self._load()
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader
        run_module = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            run_module(module)
            if self._hooks is None:
                self._early.append((name, module))
            else:
                self._hooks.imported(name, module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _load(self) -> None:
        try:
            if self._hooks is None:
                self._hooks = _load().Hooks(self._run)
                for name, module in self._early:
                    self._hooks.imported(name, module)
        except Exception as error:
            sys.meta_path.remove(self)
            _complain(error)


def _complain(error: Exception) -> None:
    sys.stderr.write(
        f"lockstep {'verify' if _purpose() == PROOF else 'attach'}: this process is not recorded: {type(error).__name__}: {error}\n"
    )


def _load() -> Any:
    folder = os.path.dirname(HERE)
    spec = spec_from_file_location(PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    return import_module(f"{PACKAGE}.{HOOKS[_purpose()]}")


def _purpose() -> str:
    return PROOF if os.environ.get(PROOF) else RUN


def _watch() -> None:
    run = os.environ.get(_purpose())
    if run and "torch" not in sys.modules:
        sys.meta_path.insert(0, Watcher(run, PROVEN if _purpose() == PROOF else WATCHED))


def _run_the_users_own() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get(_purpose()):
    try:
        _watch()
    except Exception as problem:
        _complain(problem)
    _run_the_users_own()
