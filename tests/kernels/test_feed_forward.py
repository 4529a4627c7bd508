"""Compares feed-forward networks and layers that share an input with float64, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sansgpu.kernels import linear
from sansgpu.kernels.feed_forward import feed_forward
from sansgpu.kernels.linear import Linear, linear_each
from sansgpu.kernels.pointwise import Activation
from tests.kernels.threads import assert_equal_on_all_threads

RANDOM = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
EXACT: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU: F.gelu,
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
    Activation.RELU: F.relu,
}
EXACT_GATES: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SWIGLU: F.silu,
    Activation.GEGLU: F.gelu,
    Activation.GEGLU_TANH: EXACT[Activation.GELU_TANH],
}


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_ROWS", 1)


def layers_of(sizes: list[tuple[int, int]], bias: bool, dtype: torch.dtype, frozen: int) -> nn.ModuleList:
    """Returns layers with weights of `dtype`, of which one may be frozen."""
    layers = nn.ModuleList(Linear(*size, bias=bias) for size in sizes)
    for number, layer in enumerate(layers):
        layer.weight.data = layer.weight.data.to(dtype)
        layer.weight.requires_grad_(number != frozen)
    return layers


def gradients(out: torch.Tensor, x: torch.Tensor, layers: nn.ModuleList) -> list[torch.Tensor | None]:
    """Returns the output and the gradients of its weighted sum, and clears the gradients."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.dtype)
    out.backward(weight)
    leaves = [x, *layers.parameters()]
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    for leaf in leaves:
        leaf.grad = None
    return found


def assert_near(ours: list[torch.Tensor | None], exact: list[torch.Tensor | None], tolerance: float) -> None:
    for mine, reference in zip(ours, exact, strict=True):
        assert (mine is None) == (reference is None)
        if mine is not None and reference is not None:
            assert (mine.double() - reference).norm() <= tolerance * (reference.norm() + 1e-3)


@RANDOM
@given(
    st.sampled_from(list(Activation)), st.integers(1, 150), st.integers(1, 90), st.integers(1, 150), st.booleans(),
    DTYPES, st.integers(-1, 2), st.integers(0, 99),
)  # fmt: skip
def test_feed_forward(
    kernels: str,
    activation: Activation,
    rows: int,
    width: int,
    inner: int,
    bias: bool,
    dtype: torch.dtype,
    frozen: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    gated = activation in EXACT_GATES
    layers = layers_of([(width, inner), (inner, width)] + [(width, inner)] * gated, bias, dtype, frozen)
    x = (3 * torch.randn(2, rows, width)).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = feed_forward(x, activation, *layers)
    ours = gradients(y, x, layers)
    up, down, *gate = layers.double()
    wide = x.detach().double().requires_grad_()
    activated = EXACT_GATES[activation](gate[0](wide)) * up(wide) if gated else EXACT[activation](up(wide))
    assert_near(ours, gradients(down(activated), wide, layers), TOLERANCE[dtype])


@RANDOM
@given(st.integers(1, 3), st.integers(1, 200), st.integers(1, 90), st.booleans(), DTYPES, st.integers(-1, 2))
def test_layers_of_one_input(
    kernels: str, count: int, rows: int, width: int, bias: bool, dtype: torch.dtype, frozen: int
) -> None:
    torch.manual_seed(count)
    layers = layers_of([(width, 8 * (number + 1)) for number in range(count)], bias, dtype, frozen)
    x = torch.randn(2, rows, width).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = torch.cat(linear_each(x, *layers), -1)
    ours = gradients(y, x, layers)
    wide = x.detach().double().requires_grad_()
    exact = gradients(torch.cat([layer(wide) for layer in layers.double()], -1), wide, layers)
    assert_near(ours, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.GELU])
def test_results_do_not_depend_on_the_threads(native_kernels: str, activation: Activation) -> None:
    torch.manual_seed(0)
    layers = layers_of(
        [(96, 200), (200, 96)] + [(96, 200)] * (activation is Activation.SWIGLU), True, torch.bfloat16, -1
    )
    x = torch.randn(300, 96).bfloat16().requires_grad_()
    assert_equal_on_all_threads(lambda: gradients(feed_forward(x, activation, *layers), x, layers))


def test_a_network_saves_no_activation(native_kernels: str) -> None:
    layers = layers_of([(16, 256), (256, 16)], True, torch.bfloat16, -1)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        feed_forward(torch.randn(300, 16).bfloat16(), Activation.GELU, *layers)
    assert sum(t.numel() for t in saved if t.shape == (300, 256)) == 300 * 256
