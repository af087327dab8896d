"""What Lockstep relies on in PyTorch's private parts (lockstep/torch_private.py), and that nothing else of Lockstep touches them.

A new version of torch that changes one of them fails here, by name, and not in the middle of somebody's training.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from house import SOURCE
from lockstep import torch_private as private
from lockstep.strategies.plain_ddp import UNFINISHED

# PyTorch asks groups and wrappers in Python for these by name: methods of ours that it calls, and that we hand on to it.
OVERRIDDEN = ("strategies/plain_ddp.py", "backends/python_group.py")


# --- nothing else is private -------------------------------------------------------------------------------------------------


def private_uses(text: str) -> Iterator[tuple[int, str]]:
    """Private parts of torch in a file: imports, `torch._x` by any alias, and private attributes that torch's own classes have."""
    tree = ast.parse(text)
    aliases = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    aliases.add(alias.asname or "torch")
                    if any(part.startswith("_") for part in alias.name.split(".")):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases |= {alias.asname or alias.name for alias in node.names}
            for alias in node.names:
                if any(part.startswith("_") for part in (*str(node.module).split("."), alias.name)):
                    yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            name = root.id if isinstance(root, ast.Name) else ""
            if name in aliases or (name not in ("self", "cls") and node.attr in torchs_own()):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in ("_ddp_params_and_buffers_to_ignore", "_dynamo"):
            yield node.lineno, str(node.value)


def torchs_own() -> set[str]:
    """Private attributes of torch's classes that objects in Lockstep are."""
    loss = nn.functional.nll_loss(torch.zeros(1, 1, requires_grad=True), torch.zeros(1, dtype=torch.long))
    mean = torch.zeros(1, requires_grad=True).mean()
    owners: list[object] = [nn.Module(), nn.parallel.DistributedDataParallel, dist.ProcessGroup, dist.Backend]
    owners += [loss.grad_fn, mean.grad_fn, (mean * 2).grad_fn]
    return {name for owner in owners for name in dir(owner) if name.startswith("_") and not name.startswith("__")}


def test_nothing_else_calls_private_parts() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        where = str(path.relative_to(SOURCE))
        if where not in ("torch_private.py", *OVERRIDDEN):
            found |= {f"{where}:{line}": name for line, name in private_uses(path.read_text())}
    assert not found, "private parts of torch belong in lockstep/torch_private.py"


def test_private_uses_are_found() -> None:
    text = """
import torch._inductor.config as settings
from torch._C import thing
from torch import distributed as dist, nn
torch._foreach_add_(a, b)
dist.distributed_c10d._get_default_store()
model.layer._forward_hooks.clear()
self._mine._other
"""
    assert [line for line, _ in sorted(private_uses(text))] == [2, 3, 5, 6, 7]


# --- many tensors in one call ------------------------------------------------------------------------------------------------


def tensors() -> list[torch.Tensor]:
    return [torch.tensor([1.0, 4.0]), torch.tensor([[9.0]])]


FOREACH: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "add": (lambda a, b: private.foreach_add(a, b, alpha=2), lambda a, b: a + 2 * b),
    "add_": (lambda a, b: private.foreach_add_(a, b, alpha=2), lambda a, b: a + 2 * b),
    "add_ a number": (lambda a, b: private.foreach_add_(a, 3), lambda a, b: a + 3),
    "addcdiv_": (lambda a, b: private.foreach_addcdiv_(a, b, b, value=-0.5), lambda a, b: a - 0.5),
    "addcmul_": (lambda a, b: private.foreach_addcmul_(a, b, b, value=0.5), lambda a, b: a + 0.5 * b * b),
    "copy_": (lambda a, b: private.foreach_copy_(a, b), lambda a, b: b),
    "div_": (lambda a, b: private.foreach_div_(a, 2.0), lambda a, b: a / 2),
    "mul_": (lambda a, b: private.foreach_mul_(a, torch.tensor(3.0)), lambda a, b: a * 3),
    "norm": (lambda a, b: private.foreach_norm(a), lambda a, b: a.norm()),
    "sqrt": (lambda a, b: private.foreach_sqrt(a), lambda a, b: a.sqrt()),
}


@pytest.mark.parametrize("name", FOREACH)
def test_foreach(name: str) -> None:
    call, alone = FOREACH[name]
    first, second = tensors(), [tensor + 1 for tensor in tensors()]
    expected = [alone(a.clone(), b.clone()) for a, b in zip(first, second, strict=True)]
    result = call(first, second)
    for got, wanted in zip(first if "_" in name else result, expected, strict=True):
        assert torch.equal(got, wanted)


# --- optimizers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_fused_adam_is_that_of_torch_optim(name: str) -> None:
    start, gradient = torch.randn(5), torch.randn(5)
    parameter = nn.Parameter(start.clone())
    parameter.grad = gradient.clone()
    getattr(torch.optim, name)([parameter], lr=0.1, weight_decay=0.01, fused=True).step()
    ours, call = start.clone(), private.fused_adam_ if name == "Adam" else private.fused_adamw_
    call(
        [ours], [gradient], [torch.zeros(5)], [torch.zeros(5)], [], [torch.tensor(1.0)],
        lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    assert torch.equal(ours, parameter)


def test_fused_sgd_is_that_of_torch_optim() -> None:
    start, gradient = torch.randn(5), torch.randn(5)
    parameter = nn.Parameter(start.clone())
    parameter.grad = gradient.clone()
    torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True).step()
    ours = start.clone()
    private.fused_sgd_(
        [ours], [gradient], [torch.zeros(5)],
        weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
    )  # fmt: skip
    assert torch.equal(ours, parameter)


def test_loss_scale() -> None:
    gradients, found = [torch.tensor([4.0, 8.0])], torch.zeros(1)
    private.amp_unscale_(gradients, found, torch.tensor(0.25))
    assert gradients[0].tolist() == [1.0, 2.0]
    assert found.item() == 0
    private.amp_unscale_([torch.tensor([float("inf")])], found, torch.tensor(0.25))
    assert found.item() == 1
    scale, good = torch.tensor(8.0), torch.zeros((), dtype=torch.int32)
    private.amp_update_scale_(scale, good, found, 2.0, 0.5, 1)
    assert scale.item() == 4
    private.amp_update_scale_(scale, good, torch.zeros(1), 2.0, 0.5, 1)
    assert scale.item() == 8


# --- autograd ----------------------------------------------------------------------------------------------------------------


def test_the_engine_begins_from_a_gradient() -> None:
    """As loss.backward(gradient) does; of another shape it is refused, and one of another type is converted."""
    x = torch.randn(3, requires_grad=True)
    for gradient in (torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)):
        x.grad = None
        for _ in range(2):  # gradients add up
            private.engine.run_backward(((x * x).sum(),), (gradient,), False, False, (), True, True)
        torch.testing.assert_close(x.grad, 2 * 0.25 * 2 * x.detach())
    with pytest.raises(RuntimeError, match="shape"):
        private.engine.run_backward((x * x,), (torch.tensor(1.0),), False, False, (), True, True)


def test_current_graph_task() -> None:
    seen: list[int] = []
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda grad: seen.append(private.current_graph_task_id()))
    (value * 2).backward()
    assert private.current_graph_task_id() == -1
    assert seen[0] >= 0


def test_what_a_node_of_the_graph_has_kept() -> None:
    """By these names training/reduction.py tells a mean from a sum."""
    scores = torch.zeros(3, 2, requires_grad=True)
    mean = nn.functional.mse_loss(scores, torch.ones(3, 2))
    assert private.saved(mean.grad_fn, "reduction") == 1
    assert private.saved(mean.grad_fn, "self").shape == (3, 2)
    assert private.saved(nn.functional.mse_loss(scores, torch.ones(3, 2), reduction="sum").grad_fn, "reduction") == 2
    assert list(private.saved(scores.mean().grad_fn, "self_sym_sizes")) == [3, 2]
    assert private.saved((scores / 4.0).grad_fn, "other") == 4.0
    assert private.saved(scores.sum().grad_fn, "reduction") is None


def test_convolution_backward() -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((2, 3, 5, 5), (4, 3, 3, 3), (4,)))
    y = torch.conv2d(x, weight, bias, padding=1)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(y, (x, weight, bias), grad)
    ones = [1, 1]
    got = private.convolution_backward(grad, x, weight, [4], ones, ones, ones, False, [0, 0], 1, [True, True, True])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert private.convolution_backward(
        grad, x, weight, [4], ones, ones, ones, False, [0, 0], 1, [False, True, True]
    )[0] is None  # fmt: skip


def test_batch_norm_backward() -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((6, 3), (3,), (3,)))
    y = nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=1e-5)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(y, (x, weight, bias), grad)
    mean, scale = x.mean(0), (x.var(0, unbiased=False) + 1e-5).rsqrt()
    got = private.batch_norm_backward(grad, x, weight, None, None, mean, scale, True, 1e-5, [True, True, True])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_that_are_cut() -> None:
    grad, values = torch.ones(4), torch.tensor([-2.0, -0.5, 0.5, 2.0])
    assert private.threshold_backward(grad, values, 0).tolist() == [0, 0, 1, 1]
    assert private.hardtanh_backward(grad, values, -1.0, 1.0).tolist() == [0, 1, 1, 0]


# --- operators ---------------------------------------------------------------------------------------------------------------

# Signatures that quantize/, deploy/ and machine/ call by position. Whether the kernels behind them work on this CPU is another question
# (lockstep/machine), which the tests of quantize ask.
_CONV = "int[] stride, int[] padding, int[] dilation, int groups"
_INPUT = "Tensor qx, float x_scale, int x_zero_point, Tensor qw, Tensor w_scale, Tensor w_zero_point, Tensor? bias"
_OUTPUT = "float output_scale, int output_zero_point, ScalarType? output_dtype"
SCHEMAS = {
    "onednn.qconv_prepack": f"(Tensor weight, Tensor w_scales, float x_scale, int x_zp, {_CONV}, int[]? x_shape=None)",
    "onednn.qconv_pointwise": f"({_INPUT}, {_CONV}, {_OUTPUT}, str attr, Scalar?[] scalars, str? algorithm)",
    "onednn.qlinear_prepack": "(Tensor weight, int[]? x_shape)",
    "onednn.qlinear_pointwise": f"({_INPUT}, {_OUTPUT}, str post_op_name, Scalar?[] post_op_args, str post_op_algorithm)",
}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch was built without oneDNN")
@pytest.mark.parametrize("name", SCHEMAS)
def test_signatures_of_int8_kernels(name: str) -> None:
    space, operator = name.split(".")
    schema = getattr(getattr(private, space), operator).default._schema
    assert str(schema) == f"{space}::{operator}{SCHEMAS[name]} -> Tensor"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch was built without oneDNN")
def test_fused_convolution_of_onednn() -> None:
    x, weight, bias = torch.randn(1, 8, 6, 6), torch.randn(8, 8, 3, 3), torch.randn(8)
    ones = [1, 1]
    packed = private.mkldnn._reorder_convolution_weight(weight, ones, ones, ones, 1, list(x.shape))
    got = private.mkldnn._convolution_pointwise(x, packed, bias, ones, ones, ones, 1, "relu", [], "")
    torch.testing.assert_close(got, torch.conv2d(x, weight, bias, padding=1).relu(), rtol=1e-4, atol=1e-4)


def test_product_of_integers() -> None:
    left, right = torch.randint(-9, 9, (32, 16)), torch.randint(-9, 9, (16, 16))
    assert torch.equal(private.int_mm(left.to(torch.int8), right.to(torch.int8)), (left @ right).to(torch.int32))


def test_pooling_of_integers() -> None:
    values = torch.randint(0, 255, (1, 1, 4, 4), dtype=torch.uint8)
    got = private.quantized.max_pool2d(values, [2, 2], [2, 2], [0, 0], [1, 1], False)
    assert torch.equal(got.int(), nn.functional.max_pool2d(values.float(), 2).int())


@pytest.mark.filterwarnings("ignore")  # every quantized tensor says that it will be removed
def test_quantized_tensors_keep_their_integers() -> None:
    integers = torch.tensor([[1, -2], [3, -4]], dtype=torch.int8)
    one = private.per_tensor_quantized(integers, 0.5, 0)
    assert torch.equal(one.int_repr(), integers)
    assert one.dequantize().tolist() == [[0.5, -1.0], [1.5, -2.0]]
    scales, zeros = torch.tensor([0.5, 2.0], dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    each = private.per_channel_quantized(integers, scales, zeros, 0)
    assert torch.equal(each.int_repr(), integers)
    assert each.dequantize().tolist() == [[0.5, -1.0], [6.0, -8.0]]


def test_quantize_and_dequantize_of_graphs() -> None:
    ops = private.quantized_decomposed()
    values = torch.tensor([0.0, 0.4, 10.0])
    integers = ops.quantize_per_tensor(values, 0.5, 3, 0, 15, torch.uint8)
    assert integers.tolist() == [3, 4, 15]
    assert ops.dequantize_per_tensor(integers, 0.5, 3, 0, 15, torch.uint8).tolist() == [0.0, 0.5, 6.0]


def test_without_onednn() -> None:
    before = torch.backends.mkldnn.enabled
    with private.without_onednn():
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


def test_a_model_of_torchs_own_layers_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), private.compiled_graphs()
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call: compiler(call, backend="eager"))
    private.compile_in_place(model)
    model(torch.ones(1, 2))
    assert private.compiled_graphs() == before + 1


def test_inductor_can_be_told_to_freeze() -> None:
    settings = private.inductor_settings()
    assert not settings.freezing
    with settings.patch(freezing=True):
        assert settings.freezing
    assert not settings.freezing


# --- modules and DDP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "listen",
    [
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    ],
    ids=["forward", "before forward", "backward", "before backward"],
)
def test_hooks_are_seen(listen: Callable[[nn.Module], Any]) -> None:
    module = nn.ReLU()
    assert not private.has_hooks(module)
    handle = listen(module)
    assert private.has_hooks(module)
    handle.remove()
    assert not private.has_hooks(module)


def test_load_hooks_are_dropped() -> None:
    called: list[object] = []
    module = nn.Linear(1, 1)
    module.register_load_state_dict_post_hook(lambda module, keys: called.append(keys))
    module.load_state_dict(module.state_dict())
    private.drop_load_hooks(module)
    module.load_state_dict(module.state_dict())
    assert len(called) == 1


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A default group of one rank."""
    store = private.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ddp_leaves_alone_what_it_is_told_to_and_counts() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert private.ddp_ignored(model) == []
    private.ddp_ignore(model, ["1.running_mean"])
    assert private.ddp_ignored(model) == ["1.running_mean"]
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(torch.randn(4, 2)).sum().backward()
    found = private.ddp_logging_data(wrapped)
    assert found["bucket_sizes"] == str(4 * (2 * 3 + 3 + 3 + 3))
    assert found["world_size"] == 1


@pytest.mark.usefixtures("alone")
def test_ddp_says_that_a_bucket_was_not_exchanged() -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    private.ddp_check_finished(wrapped)
    wrapped.module.forward = lambda x, *layers: [x := wrapped.module[layer](x) for layer in layers][-1]
    wrapped(torch.ones(1, 2), 0, 1).sum().backward()
    private.ddp_check_finished(wrapped)
    wrapped(torch.ones(1, 2), 0).sum().backward()
    with pytest.raises(RuntimeError, match=UNFINISHED):
        private.ddp_check_finished(wrapped)


@pytest.mark.usefixtures("alone")
def test_default_store() -> None:
    private.default_store().set("key", "value")
    assert private.default_store().check(["key"])
    assert not private.default_store().check(["other"])


def test_gloo_group_is_not_the_default(tmp_path: Path) -> None:
    store = private.PrefixStore("mine", private.FileStore(str(tmp_path / "store"), 1))
    group = private.gloo_group(store, 0, 1, timedelta(seconds=5))
    value = torch.tensor([2.0])
    group.allreduce([value]).wait()
    assert value.item() == 2
    assert (group.rank(), group.size()) == (0, 1)
    assert not dist.is_initialized()


def test_any_batch_norm() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, private.AnyBatchNorm)
    assert not issubclass(nn.GroupNorm, private.AnyBatchNorm)


def test_which_matrices_powersgd_compresses() -> None:
    assert private.powersgd_compresses(100, 100, 1, 2)
    assert not private.powersgd_compresses(2, 2, 1, 2)


def test_what_ddp_tells_the_compiler() -> None:
    """PlainDdp overrides it; that the compiler is not imported shows in tests/test_strategies.py."""
    assert callable(nn.parallel.DistributedDataParallel._inside_ddp_forward)


@pytest.mark.parametrize(
    "name", ["_set_group_name", "_set_group_desc", "_set_sequence_number_for_group", "_device_types"]
)
def test_names_that_a_group_in_python_answers_to(name: str) -> None:
    assert hasattr(dist.ProcessGroup, name)


# --- the compiler ------------------------------------------------------------------------------------------------------------


def test_the_compiler_stays_out() -> None:
    def compiled(function: Callable[[], None]) -> bool:
        seen.clear()
        torch.compile(function, backend="eager")()
        return seen[0]

    seen: list[bool] = []

    class Open:
        def look(self) -> None:
            seen.append(torch.compiler.is_compiling())

    @private.untraced
    class Closed:
        def look(self) -> None:
            seen.append(torch.compiler.is_compiling())

    assert compiled(Open().look)
    assert not compiled(Closed().look)
