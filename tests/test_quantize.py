"""Integers instead of floats: scales, layers, graphs and engines, each against arithmetic done another way."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

from lockstep.deploy import engines, graph
from lockstep.deploy.vnni import VnniLayer
from lockstep.deploy.winograd import WinogradConv
from lockstep.errors import InputError
from lockstep.models.nets import cifar_vgg, mnist_convnet
from lockstep.quantize import convert, fold
from lockstep.quantize.calibrate import calibrate
from lockstep.quantize.layers import Int8Conv2d, Int8Linear, use_kernels
from lockstep.quantize.scheme import Numbers, Scheme, from_range, input_integers, weight_integers, weight_scales

SCHEMES = [
    Scheme(weights=weights, activations=activations, bits=bits)  # type: ignore[arg-type]
    for weights, activations, bits in itertools.product(("per-channel", "per-tensor"), ("affine", "symmetric"), (7, 8))
]
# Without VNNI, kernels cut off sums of eight-bit products: only these are exact on every CPU.
SEVEN = [scheme for scheme in SCHEMES if scheme.bits == 7]


def images(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


# scales, against PyTorch's own observers


@pytest.mark.parametrize("bits", [7, 8])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.1), (0.0, 6.1), (0.3, 2.0), (-2.5, -0.5), (-0.01, 40.0)])
def test_the_integers_of_a_range_are_those_of_pytorchs_observer(low: float, high: float, bits: int) -> None:
    observer = MinMaxObserver(dtype=torch.quint8, quant_min=0, quant_max=2**bits - 1)
    observer(torch.tensor([low, high]))
    scale, zero = observer.calculate_qparams()
    found = from_range(low, high, Scheme(bits=bits))  # type: ignore[arg-type]
    assert found.scale == pytest.approx(scale.item(), rel=1e-6)
    assert found.zero == zero.item()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zero_is_exact_and_the_ends_of_the_range_are_within_half_a_step(scheme: Scheme) -> None:
    numbers = from_range(-0.7, 2.9, scheme)
    values = torch.tensor([0.0, -0.7, 2.9, 1.234])
    back = (input_integers(values, numbers).float() - numbers.zero) * numbers.scale
    assert back[0] == 0
    # Half a step of rounding, and half a step because zero moves onto an integer.
    assert (back - values).abs().max() <= 1.001 * numbers.scale
    assert input_integers(torch.tensor([99.0, -99.0]), numbers).tolist() == [numbers.top, 0]


def test_weight_scales_are_those_of_pytorchs_observer() -> None:
    weight = torch.randn(6, 3, 3, 3)
    observer = PerChannelMinMaxObserver(
        ch_axis=0, dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    )
    observer(weight)
    torch.testing.assert_close(weight_scales(weight, Scheme()), observer.calculate_qparams()[0])
    one = weight_scales(weight, Scheme(weights="per-tensor"))
    torch.testing.assert_close(one, weight.abs().max().div(127).expand(6))


def test_a_layer_of_zeros_and_a_range_that_is_not_finite() -> None:
    assert weight_integers(torch.zeros(2, 3), weight_scales(torch.zeros(2, 3), Scheme())).abs().max() == 0
    assert from_range(0.0, 0.0, Scheme()).scale > 0
    with pytest.raises(InputError, match="not finite"):
        from_range(0.0, float("inf"), Scheme())


# layers, against integer arithmetic written out


def by_hand(layer: nn.Conv2d | nn.Linear, values: Tensor, numbers: Numbers, scheme: Scheme) -> Tensor:
    """Whole numbers in float64, which holds them all exactly; scaled only at the end."""
    scales = weight_scales(layer.weight.detach(), scheme)
    weight = weight_integers(layer.weight.detach(), scales).double()
    integers = input_integers(values, numbers).double() - numbers.zero
    if isinstance(layer, nn.Linear):
        return (integers @ weight.T * numbers.scale * scales + layer.bias).float()
    whole = nn.functional.conv2d(integers, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    return (whole * numbers.scale * scales.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)).float()


def assert_computes(made: nn.Module, values: Tensor, expected: Tensor) -> None:
    """By torch's own operators, and with the kernels."""
    torch.testing.assert_close(made(values), expected.detach(), rtol=1e-4, atol=1e-4)
    use_kernels(made)
    torch.testing.assert_close(made(values), expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SEVEN, ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(1, 4, 3, padding=1),
        nn.Conv2d(4, 8, 3, stride=2, dilation=2, padding="valid"),
        nn.Conv2d(4, 8, 5, padding="same", groups=4),
    ],
    ids=["plain", "strided", "grouped"],
)
def test_an_int8_convolution_computes_with_integers(layer: nn.Conv2d, scheme: Scheme) -> None:
    values = images(3, layer.in_channels, 12, 12)
    numbers = from_range(-2.0, 2.5, scheme)
    assert_computes(Int8Conv2d(layer, numbers, scheme), values, by_hand(layer, values, numbers, scheme))


def test_an_int8_linear_layer_computes_with_integers_static_and_dynamic() -> None:
    layer, values, scheme = nn.Linear(40, 7), images(5, 40), Scheme()
    numbers = from_range(-1.5, 2.0, scheme)
    made = Int8Linear(layer, numbers, scheme)
    assert_computes(made, values, by_hand(layer, values, numbers, scheme))

    of_batch = from_range(values.min().item(), values.max().item(), scheme)
    # Linear layers also take more dimensions than two.
    deep = images(3, 4, 40)
    expected = by_hand(layer, deep, numbers, scheme).detach()
    torch.testing.assert_close(made(deep), expected, rtol=1e-4, atol=1e-4)

    assert_computes(Int8Linear(layer, None, scheme), values, by_hand(layer, values, of_batch, scheme))


# which layers, and why not


class Odd(nn.Module):
    """One of everything that cannot be quantized, and one layer that can, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Conv2d(1, 1, 3, padding=1)
        self.mirrored = nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect")
        self.even = nn.Conv2d(2, 2, 2, padding="same")
        self.up = nn.ConvTranspose2d(2, 2, 2, stride=2)
        self.norm = nn.BatchNorm2d(2)
        self.scale = nn.Parameter(torch.ones(2, 1, 1))
        self.act = nn.Sigmoid()
        self.head = nn.Linear(2 * 16 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.tied(x))
        x = self.norm(self.up(self.even(self.mirrored(x)))) * self.scale
        return self.head(self.act(x).flatten(1))


def static(model: nn.Module, examples: Tensor, scheme: Scheme | None = None) -> convert.Prepared:
    prepared = convert.prepare(model.eval(), examples[:2], "static", scheme or Scheme())
    calibrate(prepared, lambda: examples.split(16))
    return prepared


def test_the_table_names_every_layer_that_was_left_and_says_why() -> None:
    prepared = static(Odd(), images(4, 1, 8, 8))
    rows = {row.layer: row for row in prepared.rows}
    assert prepared.chosen == ["tied", "head"]
    assert {name: row.why for name, row in rows.items() if not row.quantized} == {
        "mirrored": "padding_mode=reflect: the kernels pad with zeros",
        "even": "padding='same' of an even kernel: the kernels pad both sides alike",
        "up": "no int8 kernel for it",
        "norm": "no int8 kernel for it",
        "act": "computed in fp32",
        "scale": "not a layer's: used by a function",
    }
    made = convert.convert(prepared)
    assert isinstance(made.get_submodule("tied"), Int8Conv2d)
    assert made(images(4, 1, 8, 8)).shape == (4, 3)


class Tied(nn.Module):
    """Its decoder is its encoder's weight, which it takes itself; the layer behind it is an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(16, 8), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sigmoid(torch.relu(self.encoder(x)) @ self.encoder.weight))


def test_a_layer_whose_weights_the_model_takes_itself_stays_as_it_is() -> None:
    values = images(32, 16)
    prepared = static(Tied(), values)
    assert prepared.chosen == ["encoder", "head"]
    convert.leave_out_broken(prepared, values)
    assert prepared.chosen == ["head"]
    assert prepared.rows[0].why.startswith("the model does not work with its weights as bytes: ")
    model = convert.convert(prepared)
    with torch.no_grad():
        assert spoilt(model, prepared.model(values), values) < 0.2
    module = graph.exported(model, values[:2]).module(check_guards=False)
    assert set(graph.in_floats(module)) == {"linear", "matmul", "sigmoid"}
    broken = static(nn.Sequential(Tied()), values)
    for row in broken.rows:
        row.quantized = row.layer == "0.encoder"
    with pytest.raises(InputError, match=r"nothing of this model can be quantized \(no layer is left\)"):
        convert.leave_out_broken(broken, values)


def test_dynamic_takes_linear_layers_only_and_a_model_without_any_is_refused() -> None:
    prepared = convert.prepare(mnist_convnet(), images(2, 1, 28, 28), "dynamic", Scheme())
    assert [row.kind for row in prepared.rows if row.quantized] == ["Linear"]
    with pytest.raises(InputError, match=r"nothing of this model can be quantized \(ConvTranspose2d: no int8 kernel"):
        convert.prepare(nn.Sequential(nn.ConvTranspose2d(1, 1, 2)), images(2, 1, 4, 4), "static", Scheme())


def test_only_the_named_layer_is_converted() -> None:
    prepared = static(mnist_convnet(), images(32, 1, 28, 28))
    made = convert.convert(prepared, only=[prepared.chosen[1]])
    assert [name for name, layer in made.named_modules() if isinstance(layer, Int8Conv2d | Int8Linear)] == [
        prepared.chosen[1]
    ]


# batch norm


class Read(nn.Module):
    """A convolution whose result is read by batch norm and, where asked for, by somebody else too."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.twice = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), twice

    def forward(self, x: Tensor) -> Tensor:
        made = self.conv(x)
        return self.norm(made) + made if self.twice else self.norm(made)


def trained_norm(model: nn.Module) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean, -1, 1)
            nn.init.uniform_(layer.running_var, 0.5, 2)
            nn.init.uniform_(layer.weight, -2, 2)
            nn.init.uniform_(layer.bias, -1, 1)
    return model.eval()


def test_batch_norm_is_folded_where_nobody_else_reads_the_convolution() -> None:
    model, values = trained_norm(Read(twice=False)), images(4, 1, 9, 9)
    folded, pairs = fold.fold_batch_norm(model, values)
    assert pairs == {"norm": "conv"}
    assert isinstance(folded.get_submodule("norm"), nn.Identity)
    torch.testing.assert_close(folded(values), model(values))
    _, pairs = fold.fold_batch_norm(trained_norm(Read(twice=True)), values)
    assert pairs == {}
    loose = Read(twice=False)
    loose.norm = nn.BatchNorm2d(3, track_running_stats=False)
    _, pairs = fold.fold_batch_norm(loose.eval(), values)
    assert pairs == {}


def test_our_net_with_batch_norm_is_folded_whole() -> None:
    model = trained_norm(mnist_convnet(batch_norm="synchronised"))
    prepared = static(model, images(32, 1, 28, 28))
    assert [row.why for row in prepared.rows if row.kind == "Identity"] == ["folded into 0", "folded into 4"]
    assert len(prepared.chosen) == 3


# graphs and engines


def spoilt(model: Callable[[Tensor], Tensor], reference: Tensor, values: Tensor) -> float:
    """How far an answer is off, as a part of the answers' spread."""
    with torch.no_grad():
        return float((model(values) - reference).abs().max() / reference.std())


@pytest.mark.parametrize("scheme", SCHEMES[::3], ids=str)
def test_the_graph_in_order_computes_what_the_layers_compute(scheme: Scheme) -> None:
    values = images(64, 1, 28, 28)
    model = convert.convert(static(mnist_convnet(), values, scheme))
    with torch.no_grad():
        expected = model(values)
    module = graph.exported(model, values[:2]).module(check_guards=False)
    assert spoilt(module, expected, values) < 1e-5
    for count in (1, 7):  # a program for any number of images
        torch.testing.assert_close(module(values[:count]), expected[:count])
    # Between two layers there are only integers: ReLU right behind the convolution, and quantize behind that.
    convolutions = [node for node in module.graph.nodes if node.target is graph.aten.conv2d.default]
    for node in convolutions:
        relu = graph.only_user(node)
        assert relu is not None
        assert relu.target in graph.RELUS
        behind = graph.only_user(relu)
        assert behind is not None
        assert behind.target is graph.decomposed.quantize_per_tensor.default


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_every_engine_computes_the_graph(method: str) -> None:
    values = images(64, 1, 28, 28)
    net = mnist_convnet(dropout=0.2).eval()
    if method == "static":
        model = convert.convert(static(net, values))
    else:
        model = convert.convert(convert.prepare(net, values[:2], "dynamic", Scheme()))
    with torch.no_grad():
        expected = model(values)
    module = graph.exported(model, values[:2]).module(check_guards=False)
    # inductor needs half a minute of compiling: docs/quantization.md has its accuracy, measured.
    for engine in set(engines.available()) - {"inductor"}:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = engines.build(engine, module, values)
        # qnnpack gives the last layer as bytes as well: up to half a step of 255 off.
        allowed = 0.05 if engine == "qnnpack" else 0.005
        assert spoilt(call, expected, values) < allowed, engine


def test_a_wide_net_on_onednn_kernels_and_on_our_own() -> None:
    values = images(6, 3, 32, 32)
    net = cifar_vgg().eval()
    prepared = static(net, values)
    assert len(prepared.chosen) == 9
    model = convert.convert(prepared)
    with torch.no_grad():
        expected = model(values)
    module = graph.exported(model, values[:2]).module(check_guards=False)
    call = engines.build("onednn", module, values)
    assert spoilt(call, expected, values) < 0.2
    use_kernels(model)
    assert spoilt(model, expected, values) < 0.2
    for name, kind in (("winograd", WinogradConv), ("vnni", VnniLayer)):
        if name in engines.missing():
            continue  # its own tests say why
        lowered = engines.lower(module, engines.OWN[name][0], {})
        taken = [layer for layer in lowered.modules() if isinstance(layer, kind)]
        # The first has three channels only, which winograd leaves to oneDNN; every second one of the others has its pool inside.
        pools = [True, False, True, False, True]
        assert [layer.pool for layer in taken] == (
            pools if name == "winograd" else [False, *pools, False, False, False]
        )
        own = engines.build(name, module, values)
        assert own is not lowered  # one call after the other, without the graph
        with torch.no_grad():
            assert torch.equal(own(values), lowered(values))
            assert spoilt(own, call(values), values) < 0.05
            torch.testing.assert_close(own(values[:1]), own(values)[:1])


def test_a_graph_that_branches_stays_a_graph() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(x + torch.relu(self.one(x)))

    net, values = Residual().eval(), torch.rand(32, 8, generator=torch.Generator().manual_seed(2))
    model = convert.convert(static(net, values))
    module = graph.exported(model, values[:2]).module(check_guards=False)
    call = engines.build("onednn", module, values)
    assert isinstance(call, torch.fx.GraphModule)
    with torch.no_grad():
        assert spoilt(call, model(values), values) < 0.05


def test_an_engine_that_is_not_here_gets_the_list_of_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"--engine tensorrt: no such engine; here are: onednn, .*qnnpack"):
        engines.check("tensorrt")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"--engine inductor: it needs a C\+\+ compiler .*here are: onednn, qnnpack"):
        engines.check("inductor")


def test_a_model_that_cannot_be_exported_says_so_and_still_has_its_layers() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) if x.sum() > 0 else self.one(-x)

    values = images(8, 4)
    model = convert.convert(static(Branching(), values))
    with pytest.raises(InputError, match=r"torch\.export cannot follow this model: "):
        graph.exported(model, values)
    use_kernels(model)
    assert model(values).shape == (8, 3)
