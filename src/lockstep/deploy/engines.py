"""The integer kernels of this machine, and the exported graph put on them.

`onednn`     oneDNN's kernels on ordinary byte tensors, called one by one: what inductor calls, without a compiler
`inductor`   torch.compile with frozen weights: the same kernels, and everything between them compiled
`vnni`       Lockstep's own kernels for CPUs with AVX512-VNNI (vnni.py): oneDNN's speed, without what a call of those costs
`winograd`   Lockstep's own 3x3 convolution for CPUs with AVX2 and without VNNI (winograd.py); oneDNN's for other layers
`qnnpack`    what document D used, to compare with: torch.ao's eager mode, on quantized tensors, which PyTorch has announced to remove

All compute the same graph; they differ in rounding. qnnpack gives bytes even where floats are wanted (the last layer), so that layer needs
a range too: it is taken from the calibration images.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from lockstep.deploy import graph, vnni, winograd
from lockstep.deploy.kernels import Kernels, LayerSpec, OneDnnKernels, QnnpackKernels, pair
from lockstep.errors import InputError
from lockstep.machine import inductor
from lockstep.quantize.layers import kernels_are_here
from lockstep.quantize.scheme import Numbers, Scheme, from_range
from lockstep.torch_private import inductor_settings, quantized_decomposed

ENGINES = ("onednn", "inductor", "vnni", "winograd", "qnnpack")
# Kernels that the graph is put on layer by layer, and why they may be missing.
OWN = {"vnni": (vnni.VnniKernels, vnni.why_not), "winograd": (winograd.WinogradKernels, winograd.why_not)}
DEFAULT = "onednn"

_decomposed = quantized_decomposed()
_aten = torch.ops.aten


def missing() -> dict[str, str]:
    """The engines that are not here, and why."""
    found: dict[str, str] = {}
    if not kernels_are_here():
        found = dict.fromkeys(("onednn", "inductor", *OWN), "this PyTorch was built without oneDNN's int8 kernels")
    elif not inductor.has_compiler():
        found["inductor"] = "it needs a C++ compiler (g++)"
    found |= {name: why for name, (_, why_not) in OWN.items() if name not in found and (why := why_not())}
    if not hasattr(torch, "quantize_per_tensor") or "qnnpack" not in torch.backends.quantized.supported_engines:
        found["qnnpack"] = "this PyTorch was built without it"
    return found


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
    """An int8 graph (graph.py) on an engine. `images` are calibration images, for qnnpack's last layer."""
    check(name)
    if name == "inductor":
        return compiled(module)
    if name != "qnnpack":
        return straight(lower(module, OWN[name][0] if name in OWN else OneDnnKernels, {}))
    torch.backends.quantized.engine = name
    with warnings.catch_warnings():
        # Each quantized tensor warns that it will be removed; docs/quantization.md says it once.
        warnings.simplefilter("ignore")
        return straight(lower(module, QnnpackKernels, _outputs(module, images)))


def compiled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module compiled by inductor, with frozen weights. Without freezing it computes the rounding in floats and calls no integer kernel."""
    inductor.choose_folder()
    settings, call = inductor_settings(), torch.compile(module, dynamic=False)

    def run(images: Tensor) -> Tensor:
        with settings.patch(freezing=True), torch.no_grad():
            result: Tensor = call(images)
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
        spec, last, behind = _layer_spec(module, node, outputs)
        name = f"int8_{number}"
        module.add_submodule(name, kernels.layer(spec, behind is not None))
        source: Any = node.args[0]
        with net.inserting_before(node):
            # Past the dequantize; a dynamic layer also past the quantize.
            new = net.call_module(name, (source.args[0] if spec.source else source.args[0].args[0],))
        (behind or last).replace_all_uses_with(new)
    net.eliminate_dead_code()  # what was taken over no longer counts as a user
    for number, node in enumerate(list(net.nodes)):
        if node.target is _decomposed.quantize_per_tensor.default and node.users:
            _put(module, node, f"bytes_{number}", kernels.quantize(_numbers(node)))
        elif node.target is _decomposed.dequantize_per_tensor.default and node.users:
            _put(module, node, f"floats_{number}", kernels.dequantize(_numbers(node)))
        elif node.target is _aten.view.default:
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
            _put(module, node, f"pool_{number}", kernels.pool(list(node.args[1:])))
    net.eliminate_dead_code()
    _drop_unused(module)
    module.recompile()
    return module


def straight(module: fx.GraphModule) -> Callable[[Tensor], Tensor]:
    """A graph in which each result goes to the next call only, as these calls one after the other: what a graph and its modules do around them takes
    a tenth of a small net's time. Other graphs stay as they are."""
    before, *nodes, end = module.graph.nodes
    calls: list[Callable[[Tensor], Tensor]] = []
    for node in nodes:
        if node.all_input_nodes != [before] or node.args[:1] != (before,) or len(before.users) != 1 or node.kwargs:
            return module
        if node.op == "call_module" and len(node.args) == 1:
            calls.append(module.get_submodule(str(node.target)).forward)
        elif node.op == "call_function" and callable(node.target):
            calls.append(_with(node.target, node.args[1:]))
        else:
            return module
        before = node
    if end.all_input_nodes != [before]:
        return module

    def run(images: Tensor) -> Tensor:
        for call in calls:
            images = call(images)
        return images

    return run


def _with(function: Callable[..., Tensor], rest: tuple[Any, ...]) -> Callable[[Tensor], Tensor]:
    return lambda values: function(values, *rest)


def _drop_unused(module: fx.GraphModule) -> None:
    """The kernels have packed weights of their own."""
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in [*dict(module.named_parameters()), *dict(module.named_buffers())]:
        if name not in used:
            owner, _, key = name.rpartition(".")
            delattr(module.get_submodule(owner), key)


def _put(module: fx.GraphModule, node: fx.Node, name: str, layer: nn.Module) -> None:
    """Replace a node of the graph by a layer."""
    module.add_submodule(name, layer)
    with module.graph.inserting_before(node):
        new = module.graph.call_module(name, (node.args[0],))
    new.meta["integer"] = _is_integer(node)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


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


def _layer_spec(
    module: fx.GraphModule, node: fx.Node, outputs: dict[str, Numbers]
) -> tuple[LayerSpec, fx.Node, fx.Node | None]:
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
    spec = LayerSpec(
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
    return spec, last, behind


def _outputs(module: fx.GraphModule, images: Tensor) -> dict[str, Numbers]:
    """The ranges of layers whose result stays in floats, over these images."""
    specs = (_layer_spec(module, node, {}) for node in graph.int8_nodes(module))
    wanted = {last.name for _, last, behind in specs if behind is None}
    found: dict[str, Numbers] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n.name in wanted:
                low, high = torch.aminmax(value)
                found[n.name] = from_range(low.item(), high.item(), Scheme(bits=8))
            return value

    with torch.no_grad():
        Watch(module).run(images)
    return found
