"""The integer kernels of this machine, and the exported graph put on them.

`onednn`     oneDNN's kernels on ordinary byte tensors, called one by one: what inductor calls, without a compiler
`inductor`   torch.compile with frozen weights: the same kernels, and everything between them compiled
`winograd`   Lockstep's own 3x3 convolution for CPUs with AVX2 and without VNNI (own.py); oneDNN's for other layers
`x86`, `fbgemm`, `qnnpack`   PyTorch's older engines, on its quantized tensors, which it means to remove

All compute the same graph; they differ in rounding. The older ones give bytes even where floats are wanted (the last layer), so these need a range too: it is taken
from the calibration images.
"""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from lockstep.errors import InputError
from lockstep.quantize import graph, native
from lockstep.quantize.kernels import Kernels, OldKernels, OneDnnKernels, Spot, pair
from lockstep.quantize.layers import kernels_are_here
from lockstep.quantize.own import OwnKernels
from lockstep.quantize.scheme import Numbers, Scheme, from_range

OLD = ("x86", "fbgemm", "qnnpack")
ENGINES = ("onednn", "inductor", "winograd", *OLD)
DEFAULT = "onednn"

_decomposed = torch.ops.quantized_decomposed
_aten = torch.ops.aten


def missing() -> dict[str, str]:
    """The engines that are not here, and why."""
    found: dict[str, str] = {}
    if not kernels_are_here():
        for name in ("onednn", "inductor", "winograd"):
            found[name] = "this PyTorch was built without oneDNN's int8 kernels"
        return found | _old_missing()
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        found["inductor"] = "it needs a C++ compiler (g++)"
    why = native.why_not()
    if why:
        found["winograd"] = why
    return found | _old_missing()


def _old_missing() -> dict[str, str]:
    here = torch.backends.quantized.supported_engines if hasattr(torch, "quantize_per_tensor") else []
    return {name: "this PyTorch was built without it" for name in OLD if name not in here}


def available() -> list[str]:
    lacking = missing()
    return [name for name in ENGINES if name not in lacking]


def check(name: str) -> None:
    if name not in ENGINES:
        raise InputError(f"--engine {name}: no such engine; here are: {', '.join(available())}")
    why = missing().get(name)
    if why:
        raise InputError(f"--engine {name}: {why}; here are: {', '.join(available()) or 'none'}")


def build(name: str, module: fx.GraphModule, images: Tensor) -> Callable[[Tensor], Tensor]:
    """An int8 graph (graph.py) on an engine. `images` are calibration images, for the older engines' last layer."""
    check(name)
    if name == "inductor":
        return _compiled(module)
    if name in ("onednn", "winograd"):
        return lower(module, OneDnnKernels if name == "onednn" else OwnKernels, {})
    torch.backends.quantized.engine = name
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # each quantized tensor says that it will be removed; docs/quantization.md says it once
        return lower(module, OldKernels, _outputs(module, images))


def _compiled(module: fx.GraphModule) -> Callable[[Tensor], Tensor]:
    import torch._inductor.config as settings

    compiled = torch.compile(module, dynamic=False)

    def run(images: Tensor) -> Tensor:
        # Without freezing, inductor computes the rounding in floats and no integer kernel is called.
        with settings.patch(freezing=True), torch.no_grad():
            result: Tensor = compiled(images)
        return result

    return run


def lower(module: fx.GraphModule, kernels: type[Kernels], outputs: dict[str, Numbers]) -> fx.GraphModule:
    """Every int8 layer of the graph becomes one kernel, together with the ReLU and the quantize behind it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        module = copy.deepcopy(module)
    net = module.graph
    _carry_integers(net)
    for number, node in enumerate(graph.int8_nodes(module)):
        spot, last, behind = _spot(module, node, outputs)
        name = f"int8_{number}"
        module.add_submodule(name, kernels.layer(spot, behind is not None))
        source: Any = node.args[0]
        with net.inserting_before(node):
            # Past the dequantize; a dynamic layer also past the quantize.
            new = net.call_module(name, (source.args[0] if spot.source else source.args[0].args[0],))
        (behind or last).replace_all_uses_with(new)
    net.eliminate_dead_code()  # what was taken over no longer counts as a user
    for number, node in enumerate(list(net.nodes)):
        if node.target is _decomposed.quantize_per_tensor.default and node.users:
            module.add_submodule(f"bytes_{number}", kernels.quantize(_numbers(node)))
            _put(net, node, f"bytes_{number}")
        elif node.target is _decomposed.dequantize_per_tensor.default and node.users:
            module.add_submodule(f"floats_{number}", kernels.dequantize(_numbers(node)))
            _put(net, node, f"floats_{number}")
        elif node.target in (_aten.view.default,):
            node.target = _aten.reshape.default  # kernels answer channels-last, which a view may not flatten
        elif node.target is _aten.max_pool2d.default and _is_integer(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if source.op == "call_module" and len(source.users) == 1:
                layer = module.get_submodule(str(source.target))
                if kernels.takes_pool(layer, list(node.args[1:])):
                    node.replace_all_uses_with(source)
                    net.erase_node(node)
                    continue
            module.add_submodule(f"pool_{number}", kernels.pool(list(node.args[1:])))
            _put(net, node, f"pool_{number}")
    net.eliminate_dead_code()
    _drop_unused(module)
    module.recompile()
    return module


def _drop_unused(module: fx.GraphModule) -> None:
    """The kernels have packed weights of their own."""
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in [*dict(module.named_parameters()), *dict(module.named_buffers())]:
        if name not in used:
            owner, _, key = name.rpartition(".")
            delattr(module.get_submodule(owner), key)


def _put(net: fx.Graph, node: fx.Node, name: str) -> None:
    with net.inserting_before(node):
        new = net.call_module(name, (node.args[0],))
    new.meta["integer"] = _is_integer(node)
    node.replace_all_uses_with(new)
    net.erase_node(node)


def _carry_integers(net: fx.Graph) -> None:
    """dequantize, max-pool or reshape, quantize with the same numbers: the middle one takes the integers themselves."""
    for node in list(net.nodes):
        before: Any = node.args[0] if node.target in graph.CARRIES else None
        behind = graph.only_user(node) if before is not None else None
        if (
            behind is not None
            and before.target is _decomposed.dequantize_per_tensor.default
            and behind.target is _decomposed.quantize_per_tensor.default
            and before.args[1:] == behind.args[1:]
        ):
            node.replace_input_with(before, before.args[0])
            node.meta["integer"] = True
            behind.replace_all_uses_with(node)
            net.erase_node(behind)


def _is_integer(node: fx.Node) -> bool:
    return bool(node.meta.get("integer"))


def _numbers(node: fx.Node) -> Numbers:
    scale, zero, _, top = node.args[1:5]
    return Numbers(float(scale), int(zero), int(top))  # type: ignore[arg-type]


def _spot(module: fx.GraphModule, node: fx.Node, outputs: dict[str, Numbers]) -> tuple[Spot, fx.Node, fx.Node | None]:
    """What is to be taken over, its last node, and the quantize behind it."""
    floats: Any = node.args[0]
    weight: Any = node.args[1]
    after = graph.only_user(node)
    relu = after is not None and after.target in graph.RELUS
    last = after if relu and after is not None else node
    behind = graph.only_user(last)
    if behind is None or behind.target is not _decomposed.quantize_per_tensor.default:
        behind = None
    conv = node.target is _aten.conv2d.default
    given: list[Any] = list(node.args[3:])
    given += [[1, 1], [0, 0], [1, 1], 1][len(given) :]
    static = floats.target is _decomposed.dequantize_per_tensor.default
    bytes_, scales = (graph.constant(module, part) for part in weight.args[:2])
    assert bytes_ is not None
    assert scales is not None
    spot = Spot(
        conv=conv,
        weight=bytes_,
        scales=scales,
        bias=graph.constant(module, node.args[2]) if len(node.args) > 2 else None,
        arguments=[pair(value) for value in given[:3]] + [given[3]] if conv else [],
        source=_numbers(floats) if static else None,
        result=_numbers(behind) if behind is not None else outputs.get(last.name),
        relu=relu,
        top=int(floats.args[4]),
    )
    return spot, last, behind


def _outputs(module: fx.GraphModule, images: Tensor) -> dict[str, Numbers]:
    """The ranges of layers whose result stays in floats, over these images."""
    wanted = {}
    for node in graph.int8_nodes(module):
        _, last, behind = _spot(module, node, {})
        if behind is None:
            wanted[last.name] = Scheme(bits=8)
    found: dict[str, Numbers] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n.name in wanted:
                low, high = torch.aminmax(value)
                found[n.name] = from_range(low.item(), high.item(), wanted[n.name])
            return value

    with torch.no_grad():
        Watch(module).run(images)
    return found
