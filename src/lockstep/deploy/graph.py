"""The int8 model as an exported graph, put in order so that integers stay integers between layers.

torch.export writes every layer as quantize, dequantize, compute. Three things then stand in the way of a kernel that takes bytes and gives bytes, and are
moved; none changes a result:

- max-pool before ReLU (Lockstep's own nets, models/nets.py) becomes ReLU before max-pool, which is what kernels can fuse with a convolution;
- a quantize behind a max-pool or a reshape moves before it: the largest of four bytes is the byte of the largest of four;
- dropout, which does nothing here, goes.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from lockstep.errors import InputError, first_line
from lockstep.torch_private import quantized_decomposed

aten = torch.ops.aten
decomposed = quantized_decomposed()
RELUS = (aten.relu.default, aten.relu_.default)
RESHAPES = (aten.flatten.using_ints, aten.view.default, aten.reshape.default)
CARRIES = (aten.max_pool2d.default, *RESHAPES)


def exported(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The model as a program for any number of images, in order."""
    module = _export(model, example).module(check_guards=False)
    tidy(module)
    return _export(module, example)


def _export(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    many = torch.cat([example, example])[:2]  # a program for one image would be for one image only
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(model, (many,), dynamic_shapes=shapes)
    except Exception as error:  # whatever the compiler says about a user's model
        raise InputError(f"torch.export cannot follow this model: {first_line(error)}") from None


def tidy(module: fx.GraphModule) -> None:
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in (aten.dropout.default, aten.dropout_.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target in RELUS:
            _before_pool(graph, node)
    for node in list(graph.nodes):
        if node.target is decomposed.quantize_per_tensor.default:
            _before_carries(graph, node)
    graph.eliminate_dead_code()
    module.recompile()


def _before_pool(graph: fx.Graph, relu: fx.Node) -> None:
    pool = relu.args[0]
    if not (isinstance(pool, fx.Node) and pool.target is aten.max_pool2d.default and len(pool.users) == 1):
        return
    source = pool.args[0]
    assert isinstance(source, fx.Node)
    with graph.inserting_before(pool):
        first = graph.call_function(aten.relu.default, (source,))
    pool.replace_input_with(source, first)
    relu.replace_all_uses_with(pool)
    graph.erase_node(relu)


def _before_carries(graph: fx.Graph, quantize: fx.Node) -> None:
    """Between each max-pool or reshape that leads here and what is before it: quantize and dequantize, the same ones."""
    numbers = quantize.args[1:]
    carry = quantize.args[0]
    while isinstance(carry, fx.Node) and carry.target in CARRIES and len(carry.users) == 1:
        source = carry.args[0]
        assert isinstance(source, fx.Node)
        with graph.inserting_before(carry):
            integers = graph.call_function(decomposed.quantize_per_tensor.default, (source, *numbers))
            floats = graph.call_function(decomposed.dequantize_per_tensor.default, (integers, *numbers))
        carry.replace_input_with(source, floats)
        carry = source


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def int8_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The convolutions and linear layers whose weights are bytes."""
    for node in list(module.graph.nodes):
        if node.target in (aten.conv2d.default, aten.linear.default):
            weight: Any = node.args[1]
            if weight.target is decomposed.dequantize_per_channel.default:
                yield node


def in_floats(module: fx.GraphModule) -> list[str]:
    """What is computed in floats between the int8 layers, by its name in PyTorch."""
    integer = set(int8_nodes(module))
    found: dict[str, None] = {}
    for node in module.graph.nodes:
        name = str(node.target)
        if node.op == "call_function" and node not in integer and node.target not in (*RELUS, *CARRIES):
            kind, _, rest = name.partition(".")
            # Sizes and checks compute nothing.
            if kind == "aten" and not rest.startswith(("sym_", "_assert")):
                found[rest.partition(".")[0]] = None
    return list(found)


def constant(module: fx.GraphModule, node: Any) -> Tensor | None:
    """The tensor that a node of the graph stands for."""
    if node is None:
        return None
    assert node.op == "get_attr", node
    found = operator.attrgetter(node.target)(module)
    assert isinstance(found, Tensor)
    return found.detach()
