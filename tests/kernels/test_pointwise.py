"""Compares norms, rotary embedding and activations with float64 code at random shapes, forward and backward."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from sansgpu.kernels.norm import LayerNorm, RMSNorm, residual
from sansgpu.kernels.pointwise import (
    Activation,
    dropout,
    gated,
    gated_half,
    gelu,
    gelu_tanh,
    relu,
    relu_squared,
    swiglu,
)
from sansgpu.kernels.rotary import rotate, rotate_heads, rotate_joined

TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 1e-2,
}  # a rounding to bf16 is at most 2e-3; torch rounds several times
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
RANDOM = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
NORMS = {"layer": lambda width: LayerNorm(width, eps=1e-5), "rms": lambda width: RMSNorm(width, eps=1e-5)}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def results(function: Callable[..., object], inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Returns the outputs and the gradients of a weighted sum of all outputs."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    weights = [drawn(*t.shape, seed=seed + i, dtype=torch.bfloat16).to(t.dtype) for i, t in enumerate(outputs)]
    torch.autograd.backward(outputs, weights)
    return [*(t.detach() for t in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_near(ours: list[torch.Tensor], exact: list[torch.Tensor], tolerance: float) -> None:
    assert len(ours) == len(exact)
    for mine, reference in zip(ours, exact, strict=True):
        assert mine.shape == reference.shape
        assert (mine.double() - reference).norm() <= tolerance * (reference.norm() + 1)


def exact_norm(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if kind == "rms":
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def with_parameters(module: nn.Module, parameters: list[torch.Tensor], call: Callable[[], object]) -> object:
    for name, value in zip(dict(module.named_parameters()), parameters, strict=True):
        del module._parameters[name]
        setattr(module, name, value)
    return call()


@RANDOM
@given(st.sampled_from(sorted(NORMS)), st.integers(1, 60), st.integers(1, 300), DTYPES, st.integers(0, 99))
def test_norm(kernels: str, kind: str, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    width += 7 * (kind == "layer")  # with few features, LayerNorm's gradient is a difference of nearly equal numbers
    parameters = [drawn(width, seed=seed + i) for i in range(2 if kind == "layer" else 1)]

    def ours(x: torch.Tensor, *given: torch.Tensor) -> object:
        norm = NORMS[kind](width)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return with_parameters(norm, list(given), lambda: norm(x))

    x = drawn(rows, 1, width, seed=seed, dtype=dtype)
    mine = results(ours, [x, *parameters], seed)
    assert mine[0].dtype == (dtype if kind == "layer" else torch.float32)
    exact = results(
        lambda x, weight, bias=None: exact_norm(kind, x, weight, bias), [t.double() for t in (x, *parameters)], seed
    )
    assert_near(mine, exact, 2e-4 if dtype == torch.float32 else TOLERANCE[dtype])


@RANDOM
@given(
    st.sampled_from(sorted(NORMS)), st.integers(1, 40), st.integers(8, 300), DTYPES, st.booleans(), st.integers(0, 99)
)
def test_residual_branches(
    kernels: str, kind: str, rows: int, width: int, dtype: torch.dtype, post_norm: bool, seed: int
) -> None:
    norm = NORMS[kind](width)
    x, y = drawn(rows, width, seed=seed), drawn(rows, width, seed=seed + 1, dtype=dtype)

    def ours(x: torch.Tensor, y: torch.Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            total, inputs = norm.branch(x, y)
            if kernels == "native":
                assert inputs.dtype == dtype
            return norm.after(x, y, 0.0) if post_norm else (residual(total, y, 0.0, True), inputs.float())

    def exact(x: torch.Tensor, y: torch.Tensor) -> object:
        total, weight = x + y, norm.weight.detach().double()
        bias = None if norm.bias is None else norm.bias.detach().double()
        normed = exact_norm(kind, total, weight, bias)
        return normed if post_norm else (total + y, normed)

    both = results(ours, [x, y], seed), results(exact, [x.double(), y.double()], seed)
    assert_near(*both, 1e-4 if dtype == torch.float32 else TOLERANCE[dtype])


@pytest.mark.parametrize(("rows", "width"), [(3, 5), (50, 1000), (2, 40_000)])  # the mask changes every 32,768 values
def test_a_fused_residual_branch_drops_the_same_values_as_dropout(kernels: str, rows: int, width: int) -> None:
    x, y, norm = drawn(rows, width, seed=0), drawn(rows, width, seed=1), RMSNorm(width, 1e-5)

    def masked(function: Callable[..., object]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        return results(function, [x, y], 7)

    plain = masked(lambda x, y: x + dropout(y, 0.3, True))
    for function in (lambda x, y: residual(x, y, 0.3, True), lambda x, y: norm.branch(x, y, 0.3)[0]):
        for mine, expected in zip(masked(function), plain, strict=True):
            torch.testing.assert_close(mine, expected)
    assert torch.equal(norm.eval().branch(x, y, 0.3)[0], x + y)
    assert torch.equal(residual(x, y, 0.3, False), x + y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 31, 1025, 35_001])
@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (swiglu, lambda gate, up: F.silu(gate) * up),
        (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
        (gelu, F.gelu),
        (relu_squared, lambda x: F.relu(x).square()),
        (relu, F.relu),
    ],
)
def test_activation(
    kernels: str, function: Callable[..., object], exact: Callable[..., object], size: int, dtype: torch.dtype
) -> None:
    wide = torch.cat((torch.linspace(-100, 100, size), drawn(size, seed=0))).to(dtype)
    inputs = [wide, drawn(2 * size, seed=1, dtype=dtype)][: 2 if function is swiglu else 1]
    mine = results(function, inputs, 3)
    assert all(t.dtype == dtype for t in mine)
    assert_near(mine, results(exact, [t.double() for t in inputs], 3), TOLERANCE[dtype])
    if kernels == "native":  # the exact value, rounded once, up to fp32 errors
        unit = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
        value = exact(*[t.double() for t in inputs])
        assert torch.all((mine[0].double() - value).abs() <= unit * value.abs() + 2e-6)  # type: ignore[operator]


GATES: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SWIGLU: F.silu,
    Activation.GEGLU: F.gelu,
    Activation.GEGLU_TANH: lambda gate: F.gelu(gate, approximate="tanh"),
}


@RANDOM
@given(st.sampled_from([*GATES]), st.integers(0, 40), st.integers(1, 1500), st.booleans(), DTYPES, st.integers(0, 99))
@example(Activation.GEGLU, 20, 3000, True, torch.float32, 0)  # rows that are longer than chunks, in several units
def test_gated_activations(
    kernels: str, activation: Activation, rows: int, width: int, joined: bool, dtype: torch.dtype, seed: int
) -> None:
    inputs = [drawn(rows, 1, 2 * width, seed=seed, dtype=dtype)]
    inputs = inputs if joined else list(inputs[0].chunk(2, dim=-1))

    def exact(*given: torch.Tensor) -> object:
        gate, up = given if len(given) > 1 else given[0].chunk(2, dim=-1)
        return GATES[activation](gate) * up

    mine = results(partial(gated_half if joined else gated, activation), inputs, seed)
    assert_near(mine, results(exact, [t.double() for t in inputs], seed), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [swiglu, gelu_tanh, gelu, relu_squared, relu])
def test_nan_reaches_the_activation_and_its_gradient(
    kernels: str, function: Callable[..., object], dtype: torch.dtype
) -> None:
    for place in range(3 if function is swiglu else 2):  # in the gradient, or in one of the inputs
        given = [torch.ones(40, dtype=dtype) for _ in range(3)]
        given[place][7] = float("nan")
        gradient, *inputs = (part.requires_grad_() for part in given[: 3 if function is swiglu else 2])
        out: torch.Tensor = function(*inputs)  # type: ignore[assignment]
        out.backward(gradient.detach())
        found = [inputs[0].grad] if place == 0 else [out]
        assert all(tensor is not None and tensor.isnan().nonzero().tolist() == [[7]] for tensor in found)


@RANDOM
@given(
    st.integers(1, 3), st.integers(1, 20), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40), st.booleans(),
    st.booleans(), DTYPES, st.integers(0, 99),
)  # fmt: skip
def test_rotary(
    kernels: str, batch: int, time: int, groups: int, kv_heads: int, half: int, shared: bool, normed: bool,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    shapes = [(batch, time, groups * kv_heads, 2 * half), (batch, time, kv_heads, 2 * half)]
    inputs = [drawn(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]
    weights = [drawn(2 * half, seed=seed + i) for i in (3, 4)] if normed else []
    angles = drawn(1 if shared else batch, 1, time, 2 * half, seed=seed)
    cos, sin = angles.cos(), angles.sin()

    def ours(q: torch.Tensor, k: torch.Tensor, *given: torch.Tensor) -> object:
        norms = [RMSNorm(2 * half, 1e-5) for _ in given]
        for norm, weight in zip(norms, given, strict=True):
            with_parameters(norm, [weight], lambda: None)
        return rotate_heads(q, k, cos, sin, *norms)

    def exact(q: torch.Tensor, k: torch.Tensor, *given: torch.Tensor) -> object:
        q, k = (exact_norm("rms", t, w, None) for t, w in zip((q, k), given, strict=True)) if given else (q, k)
        return tuple(rotate(t.transpose(1, 2), cos.double(), sin.double()) for t in (q, k))

    mine = results(ours, [*inputs, *weights], seed)
    assert [t.dtype for t in mine[:4]] == [dtype] * 4
    tolerance = 1e-4 if dtype == torch.float32 else 8e-3
    assert_near(mine, results(exact, [t.double() for t in (*inputs, *weights)], seed), tolerance)


@RANDOM
@given(
    st.integers(1, 3), st.integers(1, 20), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40), st.booleans(),
    DTYPES, st.integers(0, 99),
)  # fmt: skip
def test_rotary_of_joined_projections(
    kernels: str, batch: int, time: int, groups: int, kv_heads: int, half: int, shared: bool, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    heads = [groups * kv_heads, kv_heads, kv_heads]
    qkv = drawn(batch, time, sum(heads), 2 * half, seed=seed, dtype=dtype)
    angles = drawn(1 if shared else batch, 1, time, 2 * half, seed=seed)
    cos, sin = angles.cos(), angles.sin()

    def exact(qkv: torch.Tensor) -> object:
        q, k, v = (t.transpose(1, 2) for t in qkv.split(heads, dim=2))
        return rotate(q, cos.double(), sin.double()), rotate(k, cos.double(), sin.double()), v

    mine = results(lambda qkv: rotate_joined(qkv, *heads[:2], cos, sin), [qkv], seed)
    assert [t.dtype for t in mine] == [dtype] * 4
    assert_near(mine, results(exact, [qkv.double()], seed), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_threads(dtype: torch.dtype) -> None:
    time, width = 700, 96
    q, k, gate, up, y = (drawn(1, time, 3, width, seed=i, dtype=dtype) for i in range(5))
    layer, rms, q_norm, k_norm = LayerNorm(width), RMSNorm(width, 1e-5), RMSNorm(width, 1e-5), RMSNorm(width, 1e-5)
    modules = nn.ModuleList([layer, rms, q_norm, k_norm])
    angles = drawn(1, 1, time, width, seed=9)

    def run(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, gate, up, y = leaves
        heads = rotate_heads(q, k, angles.cos(), angles.sin(), q_norm, k_norm)
        sums = [layer.branch(y.float(), y, 0.2), rms.branch(y.float(), y, 0.2)]
        return (*heads, swiglu(gate, up), gelu(gate), *sums[0], *sums[1], residual(y.float(), y, 0.2, True))

    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        modules.zero_grad()
        found.append(results(run, [q, k, gate, up, y], 0) + [p.grad.clone() for p in modules.parameters()])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows(kernels: str, dtype: torch.dtype) -> None:
    norms = nn.ModuleList([RMSNorm(6, 1e-5), LayerNorm(6)])
    angles = torch.zeros(1, 1, 0, 6)

    def run(x: torch.Tensor, q: torch.Tensor) -> object:
        heads = rotate_heads(q, q, angles, angles, norms[0], norms[0])
        return (*norms[0].branch(x, x.to(dtype)), norms[1](x), residual(x, x.to(dtype), 0.5, True), *heads, gelu(q))

    assert all(t.numel() == 0 for t in results(run, [drawn(0, 6, seed=0), drawn(2, 0, 3, 6, seed=0, dtype=dtype)], 0))
    for parameter in norms.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_frozen_weights_and_parts_without_a_gradient(kernels: str) -> None:
    norm = LayerNorm(8).requires_grad_(False)
    x, y = (drawn(4, 8, seed=i).requires_grad_() for i in range(2))
    total, _ = norm.branch(x, y)
    total.sum().backward()  # the norm's output is not used
    assert torch.equal(x.grad, torch.ones(4, 8))
    assert torch.equal(y.grad, torch.ones(4, 8))
    assert norm.weight.grad is None
    frozen = drawn(4, 8, seed=2)
    (norm.branch(frozen, y)[1] ** 2).sum().backward()
    assert frozen.grad is None
