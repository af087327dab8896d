"""From a trained model to an int8 one: which layers, with which ranges, and what is left as it was and why."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from lockstep.errors import InputError, first_line
from lockstep.quantize.fake import FAKES, REAL, fakes, make_real
from lockstep.quantize.fold import fold_batch_norm, replace
from lockstep.quantize.layers import Int8Conv2d, Int8Linear, padding_of
from lockstep.quantize.scheme import Numbers, Scheme

Method = Literal["dynamic", "static", "qat"]
# They take integers as they take floats: the largest of four, or another shape, is the same with or without a scale.
_AS_THEY_ARE = (nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Identity, nn.Dropout, nn.Unflatten)


@dataclass
class Row:
    """One layer, and what became of it."""

    layer: str
    kind: str
    parameters: int
    quantized: bool
    why: str = ""
    """Why not; or what else there is to say."""
    input_low: float | None = None
    input_high: float | None = None
    scale: float | None = None
    zero: int | None = None


@dataclass
class Prepared:
    """A model in fp32, ready to be converted: batch norm folded, and what is known of its layers' inputs."""

    model: nn.Module
    rows: list[Row]
    scheme: Scheme
    ranges: dict[str, Numbers] = field(default_factory=dict)

    @property
    def chosen(self) -> list[str]:
        return [row.layer for row in self.rows if row.quantized]

    def keep_ranged(self) -> None:
        """Leave out layers whose inputs training never saw."""
        for row in self.rows:
            if row.quantized and row.layer not in self.ranges:
                row.quantized, row.why = False, "no image came through it in training"


def prepare(model: nn.Module, example: Tensor, method: Method, scheme: Scheme) -> Prepared:
    """A copy without fake layers and batch norm, and the table of its layers. `model` stays as it is."""
    model = copy.deepcopy(model).eval()
    ranges = {}
    for name, layer in fakes(model).items():
        numbers = make_real(layer)
        if numbers is not None:
            ranges[name] = numbers
    model, folded = fold_batch_norm(model, example)
    rows = [_row(name, layer, method, folded) for name, layer in model.named_modules() if _is_leaf(layer)]
    rows += _loose_parameters(model)
    prepared = Prepared(model, rows, scheme, ranges)
    if not prepared.chosen:
        reasons = (
            "; ".join(dict.fromkeys(f"{row.kind}: {row.why}" for row in rows if row.parameters)) or "it has no layers"
        )
        raise InputError(f"nothing of this model can be quantized ({reasons})")
    if ranges:
        enter_numbers(prepared)
    return prepared


def leave_out_broken(prepared: Prepared, example: Tensor) -> None:
    """A model may reach for a layer's weights itself (another function's argument, a type that it checks), and bytes are not what it expects.
    Such a layer stays as it is, and the table says what the model said."""
    if not _fails(convert(prepared), example):
        return
    for row in prepared.rows:
        problem = _fails(convert(prepared, only=[row.layer]), example) if row.quantized else ""
        if problem:
            row.quantized, row.why = False, f"the model does not work with its weights as bytes: {problem}"
    problem = _fails(convert(prepared), example) if prepared.chosen else "no layer is left"
    if problem:
        raise InputError(f"nothing of this model can be quantized ({problem})")


def _fails(model: nn.Module, example: Tensor) -> str:
    try:
        with torch.no_grad():
            model(example)
    except Exception as error:  # whatever a user's model says
        return first_line(error)
    return ""


def convert(prepared: Prepared, only: Iterable[str] | None = None) -> nn.Module:
    """The int8 model: a copy with the chosen layers (or only these of them) as bytes."""
    model, scheme = copy.deepcopy(prepared.model), prepared.scheme
    names = prepared.chosen if only is None else list(only)
    replaced: dict[int, nn.Module] = {}
    for name in names:
        layer = model.get_submodule(name)
        numbers = prepared.ranges.get(name)
        if isinstance(layer, nn.Conv2d):
            assert numbers is not None
            replaced[id(layer)] = Int8Conv2d(layer, numbers, scheme)
        else:
            assert isinstance(layer, nn.Linear)
            replaced[id(layer)] = Int8Linear(layer, numbers, scheme)
    return replace(model, replaced).eval()


def _is_leaf(layer: nn.Module) -> bool:
    return not any(True for _ in layer.children())


def _row(name: str, layer: nn.Module, method: Method, folded: Mapping[str, str]) -> Row:
    count = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
    why = why_not(layer, method)
    quantized = not why
    if isinstance(layer, _AS_THEY_ARE):
        quantized, why = False, "works on integers as it is"
    if name in folded:
        quantized, why = False, f"folded into {folded[name]}"
    return Row(name, type(layer).__name__, count, quantized, why)


def why_not(layer: nn.Module, method: Method) -> str:
    """Why a layer cannot be quantized; nothing where it can."""
    kind = type(layer)
    if kind not in FAKES and kind not in REAL:
        return "no int8 kernel for it" if any(True for _ in layer.parameters(recurse=False)) else "computed in fp32"
    if any(parameter.dtype != torch.float32 for parameter in layer.parameters(recurse=False)):
        return "its weights are not fp32"
    if isinstance(layer, nn.Conv2d):
        if method == "dynamic":
            return "no int8 kernel for a convolution with the range of each batch"
        if layer.padding_mode != "zeros":
            return f"padding_mode={layer.padding_mode}: the kernels pad with zeros"
        if not padding_of(layer):
            return "padding='same' of an even kernel: the kernels pad both sides alike"
    return ""


def _loose_parameters(model: nn.Module) -> list[Row]:
    """Parameters that a module with parts of its own holds itself, for a function to use: there is no layer to replace."""
    return [
        Row(
            f"{name}.{key}" if name else key, "Parameter", parameter.numel(), False, "not a layer's: used by a function"
        )
        for name, module in model.named_modules()
        if not _is_leaf(module)
        for key, parameter in module.named_parameters(recurse=False)
    ]


def enter_numbers(prepared: Prepared) -> None:
    for row in prepared.rows:
        numbers = prepared.ranges.get(row.layer) if row.quantized else None
        if numbers is not None:
            row.scale, row.zero = numbers.scale, numbers.zero
            if row.input_low is None:
                row.input_low = -numbers.zero * numbers.scale
                row.input_high = (numbers.top - numbers.zero) * numbers.scale
