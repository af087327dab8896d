"""Hooks at the public functions of Lightning, Accelerate, transformers, TensorBoard and tqdm: what they log, and what time is their own.

Within `Trainer.fit` and `Trainer.train`, what belongs to no part of a step is the framework's; methods of the user's own that it calls (callbacks)
are told apart from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import get_ident
from types import FunctionType
from typing import Any

from .clock import CALLBACKS, FRAMEWORK, LOGGING, PROGRESS
from .recorder import Recorder
from .standins import in_place_of

FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate")
WRITES = (
    "add_histogram",
    "add_image",
    "add_images",
    "add_figure",
    "add_text",
    "add_graph",
    "add_embedding",
    "add_pr_curve",
    "add_video",
    "flush",
)
BARS = ("update", "refresh", "set_postfix", "set_description", "reset")


class Frameworks:
    """`by_module` says what is done to each of their modules."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._clock = recorder, recorder.clock
        lightning = {
            "pytorch.trainer.trainer": self._fit,
            "pytorch.callbacks.callback": self._callbacks,
            "pytorch.core.module": self._lightning_module,
        }
        self.by_module: dict[str, Callable[[Any], None]] = {
            **{f"lightning.{name}": hook for name, hook in lightning.items()},
            **{name.replace("pytorch", "pytorch_lightning", 1): hook for name, hook in lightning.items()},
            "lightning.fabric.loggers.logger": self._loggers,
            "lightning_fabric.loggers.logger": self._loggers,
            "transformers.trainer": self._trainer,
            "transformers.trainer_callback": self._trainer_callbacks,
            "accelerate.accelerator": self._accelerator,
            "accelerate.data_loader": self._accelerated_loaders,
            "accelerate.optimizer": self._accelerated_optimizer,
            "torch.utils.tensorboard.writer": self._writer,
            "tensorboardX.writer": self._writer,
            "tqdm.std": self._bars,
        }

    def _loop(self, function: Any) -> Any:
        """A framework's own loop."""
        clock = self._clock

        @in_place_of(function)
        def loop(*args: Any, **keywords: Any) -> Any:
            if get_ident() != clock.thread:
                return function(*args, **keywords)
            before, clock.rest = clock.rest, FRAMEWORK
            try:
                return function(*args, **keywords)
            finally:
                clock.rest = before

        return loop

    def _fit(self, module: Any) -> None:
        module.Trainer.fit = self._loop(module.Trainer.fit)

    def _trainer(self, module: Any) -> None:
        module.Trainer.train = self._loop(module.Trainer.train)
        module.Trainer.log = self._recorder.logging(module.Trainer.log, _logs)

    def _callbacks(self, module: Any) -> None:
        self._methods_of_the_user(module.Callback)

    def _lightning_module(self, module: Any) -> None:
        self._methods_of_the_user(module.LightningModule)

    def _trainer_callbacks(self, module: Any) -> None:
        self._methods_of_the_user(module.TrainerCallback)

    def _methods_of_the_user(self, base: Any) -> None:
        def own(kind: Any, name: str) -> bool:
            return name.startswith("on_") and kind.__module__.partition(".")[0] not in FRAMEWORKS

        _subclasses(base, own, lambda function: self._recorder.inset(function, CALLBACKS))

    def _loggers(self, module: Any) -> None:
        _subclasses(
            module.Logger,
            lambda kind, name: name == "log_metrics",
            lambda function: self._recorder.logging(function, _metrics),
        )

    def _accelerator(self, module: Any) -> None:
        accelerator, accumulate, clock = module.Accelerator, module.Accelerator.accumulate, self._clock
        accelerator.log = self._recorder.logging(accelerator.log, _values)

        @in_place_of(accumulate)
        def accumulating(*args: Any, **keywords: Any) -> Any:
            return _Context(accumulate(*args, **keywords), clock)

        accelerator.accumulate = accumulating

    def _accelerated_optimizer(self, module: Any) -> None:
        """Its step has PyTorch's within, which ends ours; what it does with gradients between is the framework's."""
        module.AcceleratedOptimizer.zero_grad = self._recorder.inset(module.AcceleratedOptimizer.zero_grad, FRAMEWORK)

    def _accelerated_loaders(self, module: Any) -> None:
        """They fetch one batch ahead, bring it to its device and agree on random numbers, in a generator around PyTorch's."""
        clock = self._clock

        def fetching(iterate: Any) -> Any:
            @in_place_of(iterate)
            def batches(loader: Any) -> Any:
                return _Batches(iterate(loader), clock)

            return batches

        for name in ("DataLoaderShard", "DataLoaderDispatcher"):
            kind = getattr(module, name)
            kind.__iter__ = fetching(kind.__iter__)

    def _writer(self, module: Any) -> None:
        writer = module.SummaryWriter
        writer.add_scalar = self._recorder.logging(writer.add_scalar, _scalar)
        writer.add_scalars = self._recorder.logging(writer.add_scalars, _scalars)
        for name in WRITES:
            if hasattr(writer, name):
                setattr(writer, name, self._recorder.inset(getattr(writer, name), LOGGING))

    def _bars(self, module: Any) -> None:
        for name in BARS:
            setattr(module.tqdm, name, self._recorder.inset(getattr(module.tqdm, name), PROGRESS))


class _Context:
    """A context whose beginning and end are the framework's own time."""

    def __init__(self, context: Any, clock: Any) -> None:
        self._context, self._clock = context, clock

    def __enter__(self) -> Any:
        return self._timed(self._context.__enter__)

    def __exit__(self, *error: Any) -> Any:
        return self._timed(self._context.__exit__, *error)

    def _timed(self, function: Any, *args: Any) -> Any:
        clock = self._clock
        if get_ident() != clock.thread:
            return function(*args)
        clock.inset(FRAMEWORK)
        try:
            return function(*args)
        finally:
            clock.leave()


class _Batches:
    """An iterator whose every step is data."""

    def __init__(self, batches: Any, clock: Any) -> None:
        self._batches, self._clock = batches, clock

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        clock = self._clock
        if clock.busy or get_ident() != clock.thread:
            return next(self._batches)
        clock.fetch()
        clock.busy = False  # PyTorch's own loader, within, is looked at as well
        try:
            return next(self._batches)
        except StopIteration:
            clock.no_more_batches()
            raise
        finally:
            clock.leave()


def _subclasses(base: Any, chosen: Callable[[Any, str], bool], replace: Callable[[Any], Any]) -> None:
    """Replace the chosen methods of every class that inherits from this one from now on."""
    before = vars(base).get("__init_subclass__")

    def init_subclass(cls: Any, /, **keywords: Any) -> None:
        if before is not None:
            before.__func__(cls, **keywords)
        else:
            super(base, cls).__init_subclass__(**keywords)
        for name, function in list(vars(cls).items()):
            if isinstance(function, FunctionType) and chosen(
                cls, name
            ):  # no static methods: what stands in for them would be bound
                setattr(cls, name, replace(function))

    base.__init_subclass__ = classmethod(init_subclass)


def _logs(trainer: Any, logs: Mapping[str, Any], *_: Any, **__: Any) -> Mapping[str, Any]:
    return logs


def _metrics(logger: Any, metrics: Mapping[str, Any], *_: Any, **__: Any) -> Mapping[str, Any]:
    return metrics


def _values(accelerator: Any, values: Mapping[str, Any], *_: Any, **__: Any) -> Mapping[str, Any]:
    return values


def _scalar(writer: Any, tag: str, scalar_value: Any, *_: Any, **__: Any) -> Mapping[str, Any]:
    return {tag: scalar_value}


def _scalars(writer: Any, main_tag: str, tag_scalar_dict: Mapping[str, Any], *_: Any, **__: Any) -> Mapping[str, Any]:
    return {f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}
