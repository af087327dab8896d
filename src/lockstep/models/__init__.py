"""The published nets, and import of the user's own. Seed to weights is the same on every placement.

May import data/ (for what models are called with) and the files at the top. Its door is `build`.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep import offered
from lockstep.errors import InputError, first_line
from lockstep.plugins import is_spec, load_object
from lockstep.recipe import Recipe
from lockstep.task import is_own

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.data.inputs import Inputs

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """A model of the catalogue; its class is imported only when it is built."""

    name: str
    builder: str
    shape: Shape
    parameters: int
    """The number of parameters with the default arguments, known without torch; a test counts them."""
    data: str
    about: str
    batch_norm: bool = False
    """It has batch norm whatever the recipe says; the recipe says whose samples it is over."""


CATALOGUE = {
    info.name: info
    for info in (
        ModelInfo(
            name="mnist-convnet",
            builder="lockstep.models.nets:mnist_convnet",
            shape=(1, 28, 28),
            parameters=4_266,
            data="mnist",
            about="document D: two small convolutions",
        ),
        ModelInfo(
            name="cifar-vgg",
            builder="lockstep.models.nets:cifar_vgg",
            shape=(3, 32, 32),
            parameters=2_625_962,
            data="cifar10",
            about="document A: VGG-like, six convolutions",
        ),
        ModelInfo(
            name="tied-conv",
            builder="lockstep.models.nets:TiedConv",
            shape=(1, 28, 28),
            parameters=260_458,
            data="mnist",
            about="document C: one convolution applied k times",
        ),
        ModelInfo(
            name="resnet20",
            builder="lockstep.models.resnet:resnet20",
            shape=(3, 32, 32),
            parameters=269_722,
            data="cifar10",
            about="He et al. 2015: residual net of 20 layers, with batch norm",
            batch_norm=True,
        ),
        ModelInfo(
            name="gpt",
            builder="lockstep.models.gpt:Gpt",
            shape=(64,),
            parameters=366_432,
            data="embedded-text",
            about="decoder-only transformer on characters, with loss=next-token",
        ),
    )
}


def check_name(name: str) -> None:
    """A model's name is in the catalogue, offered by another package, or has the form of the user's own; InputError if none of these."""
    _builder(name)


def _builder(name: str) -> str:
    """What builds a model, as package.module:callable or path/to/file.py:callable."""
    if name in CATALOGUE:
        return CATALOGUE[name].builder
    if is_spec(name):
        return name
    if offer := offered.find("model", name):
        return offer.spec
    known = [*CATALOGUE, *offered.names("model")]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}; your own: path/to/file.py:callable"
    raise InputError(f"model={name}: no such model; {hint}")


def blank(shape: Shape) -> Tensor:
    """Two samples of a known set: blank images, or sequences of the first token."""
    import torch

    return torch.zeros(2, *shape, dtype=torch.float32 if len(shape) == 3 else torch.int64)


def build(recipe: Recipe, example: Inputs | None = None) -> nn.Module:
    """The recipe's model with weights that depend on nothing but the seed.

    `example`: some samples, which lazy layers need to create their weights.
    """
    from torch import nn

    from lockstep.models.layers import prepare
    from lockstep.models.output import only_scores
    from lockstep.seeding import seed_all, seeded

    info, named = CATALOGUE.get(recipe.model), _builder(recipe.model)
    # A user's module may draw random numbers on import, and a model may draw from any of three generators.
    with seeded(recipe.seed):
        builder = load_object(named, option="model")
        arguments = {**recipe.model_args, **_regularizers(recipe, builder)}
        seed_all(recipe.seed)  # again: it must not matter whether the module was imported just now or before
        try:
            model = builder(**arguments)
        except TypeError as error:
            raise InputError(f"model={recipe.model} with {arguments or 'no model_args'}: {error}") from None
        except Exception as error:  # a user's code may raise anything; one line says where it came from
            raise InputError(f"model={recipe.model} could not be built: {type(error).__name__}: {error}") from error
        if not isinstance(model, nn.Module):
            raise InputError(f"model={recipe.model} returned {type(model).__name__}, not a torch.nn.Module")
        if is_lazy(model) and example is not None:
            _try(model, recipe, example)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained or not (is_lazy(model) or any(p.numel() for p in trained)):
        raise InputError(f"model={recipe.model} has no parameters to train")
    prepare(model)
    if info is None and not is_own(recipe):
        model.register_forward_hook(only_scores)
    return model


def is_lazy(model: nn.Module) -> bool:
    """Whether it has layers that learn their sizes from the first batch."""
    from torch.nn.parameter import is_lazy as unknown

    return any(unknown(tensor) for tensor in (*model.parameters(), *model.buffers()))


def published_size(recipe: Recipe) -> tuple[int, int] | None:
    """Trained parameters, and their bytes, of an unchanged published net; None for all that would have to be built."""
    info = CATALOGUE.get(recipe.model)
    if info and not recipe.model_args and (info.batch_norm or recipe.regularize.batch_norm == "off"):
        return info.parameters, 4 * info.parameters
    return None


def trained_size(recipe: Recipe) -> tuple[int, int] | None:
    """Trained parameters, and their bytes; None for lazy layers on data that are not known yet.

    What is not an unchanged published net is built, which takes torch's import of two seconds.
    """
    from lockstep.data.catalog import find

    if known := published_size(recipe):
        return known
    model = build(recipe, None if is_spec(recipe.data) else blank(find(recipe.data).shape))
    if is_lazy(model):
        return None
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(p.numel() for p in trained), sum(p.numel() * p.element_size() for p in trained)


# By argument: the layer that a user's own model can contain if its builder does not take the argument.
_LAYERS = {"dropout": "Dropout", "batch_norm": "BatchNorm2d"}


def _regularizers(recipe: Recipe, builder: Callable[..., Any]) -> dict[str, Any]:
    """The recipe's dropout and batch norm as arguments of the builder; a user's own one need not take them."""
    chosen = {"dropout": recipe.regularize.dropout, "batch_norm": recipe.regularize.batch_norm}
    chosen = {key: value for key, value in chosen.items() if value not in (0, "off")}
    try:
        taken = inspect.signature(builder).parameters.values() if chosen else ()
    except (TypeError, ValueError):  # some callables written in C have no signature
        taken = ()
    names = {parameter.name for parameter in taken}
    for key, value in chosen.items():
        if key in recipe.model_args:
            raise InputError(f"regularize.{key}={value} and model_args.{key} say the same: leave one of them out")
        if key not in names and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
            hint = f"put lockstep.models.layers.{_LAYERS[key]} into the model, or let it take {key}="
            if recipe.model in CATALOGUE:
                hint = "leave it out"
            raise InputError(f"regularize.{key}={value}: model={recipe.model} takes no argument '{key}': {hint}")
    return chosen


def _try(model: nn.Module, recipe: Recipe, inputs: Inputs) -> Any:
    """The model's output for some samples, in eval mode; an InputError with the reason if it fails."""
    import torch

    from lockstep.data.inputs import leaves
    from lockstep.models.calling import call, cast, number_type

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return call(model, cast(inputs, number_type(model)))
    except InputError:
        raise
    except Exception as error:
        info, first = CATALOGUE.get(recipe.model), leaves(inputs)[0]
        shape = tuple(first.shape[1:])
        size, are_images = "x".join(map(str, shape)), len(shape) == 3 and isinstance(inputs, torch.Tensor)
        what = f"{size} images" if are_images else f"inputs ({', '.join(_kind(one) for one in leaves(inputs))})"
        reason = first_line(error)
        if info and info.shape != shape:
            reason = f"it takes {'x'.join(map(str, info.shape))}; choose data={info.data} or another model"
        raise InputError(f"model={recipe.model} cannot take the {what} of data={recipe.data}: {reason}") from None
    finally:
        model.train(training)


def _kind(samples: Tensor) -> str:
    return f"{str(samples.dtype).removeprefix('torch.')} {'x'.join(map(str, samples.shape[1:])) or 'one number'}"


def check_fits(model: nn.Module, recipe: Recipe, inputs: Inputs, classes: int, targets: Tensor | None = None) -> None:
    """Try a few samples: a model that does not fit the data, or has another output shape, is refused before training.

    What a loss of the user's own makes of the output is its own affair.
    """
    import torch

    from lockstep.data.inputs import samples

    output = _try(model, recipe, inputs)
    if is_own(recipe):
        return
    count, got = samples(inputs), tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if not isinstance(output, torch.Tensor):
        raise InputError(f"model={recipe.model} answers {got} for {count} samples, not a tensor")
    if recipe.loss not in ("cross-entropy", "next-token"):
        if targets is not None and output.numel() != targets.numel():
            raise InputError(
                f"model={recipe.model} answers {got} for {count} samples, but the targets of data={recipe.data} are {tuple(targets.shape)}"
            )
        return
    of_each = () if targets is None else tuple(targets.shape[1:])
    wanted = (count, *of_each, classes) if recipe.loss == "next-token" else (count, classes, *of_each)
    place = -1 if recipe.loss == "next-token" else 1
    if (
        output.dim() != len(wanted)
        or output.shape[0] != count
        or output.numel() // output.shape[place] != count * math.prod(of_each)
    ):
        shown = str(tuple("classes" if at == place % len(wanted) else size for at, size in enumerate(wanted))).replace(
            "'", ""
        )
        what = "images" if not of_each else "samples"
        hint = "; is it loss=next-token?" if of_each and recipe.loss == "cross-entropy" else ""
        raise InputError(f"model={recipe.model} answers {got} for {count} {what}, not {shown}{hint}")
    if output.shape[place] < classes:
        raise InputError(
            f"model={recipe.model} answers {output.shape[place]} classes, but data={recipe.data} has labels 0 to {classes - 1}"
        )
