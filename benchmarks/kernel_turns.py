"""One group of contenders of the section `kernels`, in turns, in a process of its own; prints one line of JSON.

Nothing but the standard library is imported until a group is chosen: ONNX Runtime may live in an interpreter without PyTorch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

EAGER, LAST, FUSED, COMPILED = "eager", "channels-last", "fused", "torch.compile"
SAME_ADAM, TUNED = "eager, fused Adam", "channels-last, pool before ReLU, fused Adam"
ONNX = "ONNX Runtime"
LAYERS, STEP, CIFAR, ANSWER = "layers", "step", "cifar", "answer"
BATCHES, STEP_BATCHES, CIFAR_BATCH, ANSWER_BATCH = (1, 32, 128), (32, 256), 32, 128
CIFAR_NETS: dict[str, dict[str, Any]] = {
    "CIFAR step": {"model": "cifar-vgg"},
    "CIFAR step with batch norm": {"model": "cifar-vgg", "model_args": {"batch_norm": "per-rank"}},
    "ResNet-20 step": {"model": "resnet20"},
}
SPAN_S = 0.04

Call = Callable[[], Any]
Timed = dict[str, tuple[int, float, float]]
"""Contender -> calls, wall and CPU seconds."""


def named_as(what: str, who: str) -> str:
    return f"{what}: {who}"


def timed(call: Call, count: int) -> tuple[int, float, float]:
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(count):
        call()
    return count, time.perf_counter() - wall, time.thread_time() - cpu


def count_for(call: Call) -> int:
    call()
    _, seconds, _ = timed(call, 1)
    return max(1, min(500, int(SPAN_S / max(seconds, 1e-6))))


def difference(found: Iterable[Any], wanted: Iterable[Any]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def layers(rounds: int) -> tuple[list[Timed], dict[str, float]]:
    """Every published layer: forward and backward apart, with and without the gradient of x as in its net."""
    from lockstep.kernels.candidates import PUBLISHED

    times: list[Timed] = [{} for _ in range(rounds)]
    errors: dict[str, float] = {}
    for shape in PUBLISHED:
        for batch in () if shape.channels_last else BATCHES:  # channels-last is a contender
            one_layer(shape, batch, times, errors)
    return times, errors


def one_layer(shape: Any, batch: int, times: list[Timed], errors: dict[str, float]) -> None:
    import torch
    from torch import nn

    from lockstep.kernels import fuse
    from lockstep.rounds import rounds

    def made(last: bool, fused: bool) -> tuple[Call, Any, Any, Any]:
        torch.manual_seed(1)
        layout = torch.channels_last if last else torch.contiguous_format
        behind = [nn.ReLU(), *([nn.MaxPool2d(2)] if shape.pool else [])]
        net = nn.Sequential(nn.Conv2d(shape.channels, shape.out_channels, 3, padding=1), *behind).to(
            memory_format=layout
        )
        # Without the empty places that fusing leaves: each contender is what one would write.
        module = fuse(net)[0] if fused else net
        x = torch.randn(batch, shape.channels, shape.size, shape.size).contiguous(memory_format=layout)
        x.requires_grad_(shape.grad_x)
        y = module(x)
        return partial(module, x), torch.randn(y.shape).contiguous(memory_format=layout), x, module

    ways = {EAGER: made(False, False), LAST: made(True, False), FUSED: made(False, True)}
    results = {}
    for name, (forward, grad, x, module) in ways.items():
        y = forward()
        y.backward(grad)
        results[name] = [y.detach(), *(p.grad for p in module.parameters()), *([x.grad] if shape.grad_x else [])]
    what = f"{shape.name} batch {batch}"
    errors[what] = difference(results[FUSED], results[EAGER])

    def both(forward: Call, grad: Any, x: Any, module: Any, count: int) -> dict[str, tuple[int, float, float]]:
        spent = {"forward": [0.0, 0.0], "backward": [0.0, 0.0]}
        for _ in range(count):
            x.grad = None
            module.zero_grad()
            marks = [(time.perf_counter(), time.thread_time())]
            y = forward()
            marks.append((time.perf_counter(), time.thread_time()))
            y.backward(grad)
            marks.append((time.perf_counter(), time.thread_time()))
            for i, direction in enumerate(spent):
                for clock in (0, 1):
                    spent[direction][clock] += marks[i + 1][clock] - marks[i][clock]
        return {direction: (count, *seconds) for direction, seconds in spent.items()}

    counts = {name: count_for(partial(both, *way, 1)) for name, way in ways.items()}
    for row, order in zip(times, rounds(list(ways), len(times)), strict=True):
        for name in order:
            for direction, spent in both(*ways[name], counts[name]).items():
                row[named_as(f"{what} {direction}", name)] = spent


def small_net(pool_first: bool) -> Any:
    """Document D's."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    behind = [nn.MaxPool2d(2), nn.ReLU()] if pool_first else [nn.ReLU(), nn.MaxPool2d(2)]
    first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
    return nn.Sequential(first, *behind, second, *behind, nn.Flatten(), nn.Linear(392, 10))


def trainer(model: Any, images: Any, labels: Any, optimizer: Any) -> Callable[[], float]:
    from torch import nn

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def in_turns(ways: dict[str, Callable[[], float]], times: list[Timed], what: str, errors: dict[str, float]) -> None:
    """Time them, after three steps of each that must have led to the same loss."""
    from lockstep.rounds import rounds

    losses = {name: [step() for _ in range(3)][-1] for name, step in ways.items()}
    errors[what] = max(abs(loss / losses[EAGER] - 1) for loss in losses.values())
    counts = {name: count_for(step) for name, step in ways.items()}
    for row, order in zip(times, rounds(list(ways), len(times)), strict=True):
        for name in order:
            row[named_as(what, name)] = timed(ways[name], counts[name])


def step(rounds: int) -> tuple[list[Timed], dict[str, float]]:
    """A training step of document D's net, as people write it and with everything that PyTorch offers."""
    import torch

    from lockstep.kernels import fuse

    times: list[Timed] = [{} for _ in range(rounds)]
    errors: dict[str, float] = {}
    for batch in STEP_BATCHES:
        images, labels = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))

        def way(model: Any, fused: bool | None, images: Any = images, labels: Any = labels) -> Callable[[], float]:
            optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, weight_decay=5e-4, fused=fused)
            return trainer(model, images, labels, optimizer)

        last = torch.channels_last
        ways = {
            EAGER: way(small_net(False), None),
            SAME_ADAM: way(small_net(False), True),
            TUNED: way(small_net(True).to(memory_format=last), True, images.contiguous(memory_format=last)),
            FUSED: way(fuse(small_net(False)), True),
        }
        in_turns(ways, times, f"D step, batch {batch}", errors)
    return times, errors


def cifar(rounds: int) -> tuple[list[Timed], dict[str, float]]:
    """A training step of document A's net, of the same with batch norm, and of ResNet-20, with SGD."""
    import torch

    from lockstep import models
    from lockstep.kernels import fuse
    from lockstep.machine import inductor
    from lockstep.recipe import Recipe

    images, labels = torch.randn(CIFAR_BATCH, 3, 32, 32), torch.randint(10, (CIFAR_BATCH,))

    def way(recipe: Recipe, change: Callable[[Any], Any], images: Any = images) -> Callable[[], float]:
        model = change(models.build(recipe))
        return trainer(model, images, labels, torch.optim.SGD(model.parameters(), lr=1e-3))

    last, threads = torch.channels_last, torch.get_num_threads()
    times: list[Timed] = [{} for _ in range(rounds)]
    errors: dict[str, float] = {}
    for name, settings in CIFAR_NETS.items():
        recipe = Recipe(**settings)
        ways = {
            EAGER: way(recipe, lambda model: model),
            LAST: way(recipe, lambda model: model.to(memory_format=last), images.contiguous(memory_format=last)),
            FUSED: way(recipe, fuse),
        }
        if inductor.has_compiler():
            inductor.choose_folder()
            ways[COMPILED] = way(recipe, partial(torch.compile, dynamic=False))
        in_turns(ways, times, f"{name}, batch {CIFAR_BATCH}, {threads} thread{'s' * (threads > 1)}", errors)
    return times, errors


def answer(name: str) -> dict[str, Any]:
    """Inference of document D's net."""
    call = onnx_call() if name == ONNX else torch_call(name)
    count = 8 * count_for(call)
    calls, seconds, cpu_seconds = timed(call, count)
    return {"calls": calls, "seconds": seconds, "cpu_seconds": cpu_seconds}


def torch_call(name: str) -> Call:
    import torch

    from lockstep.kernels import fuse

    layout = torch.channels_last if name == LAST else torch.contiguous_format
    model = small_net(name != EAGER).to(memory_format=layout).eval()
    model = fuse(model) if name == FUSED else model
    images = torch.randn(ANSWER_BATCH, 1, 28, 28).contiguous(memory_format=layout)
    torch.set_grad_enabled(False)
    return partial(model, images)


def onnx_call() -> Call:
    """The same net, written down by hand: neither PyTorch nor Lockstep need be there."""
    import numpy as np
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    dice = np.random.default_rng(1)
    shapes = {"w1": (4, 1, 3, 3), "b1": (4,), "w2": (8, 4, 3, 3), "b2": (8,), "w3": (10, 392), "b3": (10,)}
    weights = [numpy_helper.from_array(dice.normal(0, 0.1, s).astype(np.float32), n) for n, s in shapes.items()]
    nodes, at = [], "x"
    for i in (1, 2):
        nodes.append(helper.make_node("Conv", [at, f"w{i}", f"b{i}"], [f"c{i}"], kernel_shape=[3, 3], pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"]))
        nodes.append(helper.make_node("MaxPool", [f"r{i}"], [f"p{i}"], kernel_shape=[2, 2], strides=[2, 2]))
        at = f"p{i}"
    nodes += [helper.make_node("Flatten", [at], ["f"]), helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], transB=1)]
    ends = [
        helper.make_tensor_value_info(*end)
        for end in (("x", TensorProto.FLOAT, ["n", 1, 28, 28]), ("y", TensorProto.FLOAT, ["n", 10]))
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "d", ends[:1], ends[1:], weights), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 9
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(model.SerializeToString())
        file.flush()
        session = onnxruntime.InferenceSession(file.name, options, providers=["CPUExecutionProvider"])
    return partial(session.run, None, {"x": dice.normal(0, 1, (ANSWER_BATCH, 1, 28, 28)).astype(np.float32)})


def main(group: str, *words: str) -> None:
    """Print one line of JSON."""
    if group == ANSWER:
        document: dict[str, Any] = answer(words[0])
    else:
        import torch

        torch.set_num_threads(int(words[0]))
        times, errors = {LAYERS: layers, STEP: step, CIFAR: cifar}[group](int(words[1]))
        document = {"rounds": times, "errors": errors}
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
