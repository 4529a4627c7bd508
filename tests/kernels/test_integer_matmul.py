"""Matmuls in block floating point against a reference that rounds alike, which they equal, and against float64."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.block_quantization import FORMATS, QuantizedWeight, quantize_rows
from sansgpu.kernels.frozen_linear import Adapter, lora_linear, quantized_linear, quantized_lora_linear
from sansgpu.kernels.linear import Linear
from sansgpu.kernels.matmul import Matmul, MatmulPrecision, multiply
from tests.kernels.test_matmul import LAYOUTS
from tests.kernels.threads import assert_equal_on_all_threads

RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
BLOCK = 512  # terms that share a scale
UNIT = 2.0**-10  # the largest unit of a mantissa, relative to the largest value of its block


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mantissas and the scales of blocks of rows, in float64."""
    largest = rows.abs().amax(dim=1, keepdim=True)
    exponents = torch.frexp(largest * (1 + 2.0**-11)).exponent.clamp(min=-59)
    scales = 2.0 ** (exponents - 11).double()
    return (rows.double() / scales).round(), scales


def reference(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """Computes a (M, K) times b (K, N), plus `total`, as the kernel: exact blocks, added one after another in fp32."""
    for k in range(0, a.shape[1], BLOCK):
        (left, rows), (right, columns) = rounded(a[:, k : k + BLOCK]), rounded(b[k : k + BLOCK].T)
        block = (left @ right.T).float() * (rows * columns.T).float()
        total = block if total is None else total + block
    assert total is not None
    return total


def spread(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Returns random values whose rows and columns have very different magnitudes."""
    values = torch.randn(rows, columns, generator=generator)
    powers = [torch.randint(-12, 12, shape, generator=generator) for shape in ((rows, 1), (1, columns))]
    return values * 2.0 ** (powers[0] + powers[1])


@RANDOM
@given(
    st.integers(1, 300), st.integers(1, 200), st.integers(1, 1200), st.sampled_from(list(LAYOUTS)),
    st.sampled_from(list(LAYOUTS)), st.integers(0, 99),
)  # fmt: skip
@example(3, 70, 8195, "columns", "rows", 0)  # more terms than one pass sums
@example(700, 20, 4100, "columns", "rows", 0)  # more than is packed at once
@example(2, 9000, 900, "rows", "columns", 0)
def test_results_equal_the_reference(
    native_kernels: str, rows: int, columns: int, terms: int, left: str, right: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = LAYOUTS[left](spread(rows, terms, generator)), LAYOUTS[right](spread(terms, columns, generator))
    bias, before = torch.randn(columns, generator=generator), torch.randn(rows, columns, generator=generator)
    out, total, sums = torch.full((rows, columns), 9.0), before.clone(), torch.full((rows,), 9.0)
    multiply(MatmulPrecision.INT16, Matmul(a, b, out, bias, row_sums=sums))
    multiply(MatmulPrecision.INT16, Matmul(a, b, total, add=True))
    assert torch.equal(out, reference(a, b) + bias)
    assert torch.equal(total, reference(a, b, before))
    torch.testing.assert_close(sums.double(), a.double().sum(1), rtol=1e-5, atol=1e-5 * float(a.abs().sum(1).max()))


@RANDOM
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 1200), st.integers(0, 99))
def test_the_error_is_half_a_unit_of_each_block(
    native_kernels: str, rows: int, columns: int, terms: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = spread(rows, terms, generator), spread(terms, columns, generator)
    out = torch.empty(rows, columns)
    multiply(MatmulPrecision.INT16, Matmul(a, b, out))
    bound = torch.zeros(rows, columns, dtype=torch.float64)
    for k in range(0, terms, BLOCK):
        left, right = a[:, k : k + BLOCK].double().abs(), b[k : k + BLOCK].double().abs()
        errors = (UNIT / 2 * values.amax(dim, keepdim=True) for values, dim in ((left, 1), (right, 0)))
        left_error, right_error = (error.expand_as(values) for error, values in zip(errors, (left, right), strict=True))
        bound += left_error @ right + left @ right_error + left_error @ right_error
    magnitudes = a.double().abs() @ b.double().abs()
    assert bool(((out.double() - a.double() @ b.double()).abs() <= bound + 1e-6 * magnitudes).all())


@pytest.mark.parametrize("value", [1.9995, 2.0, -(2.0**100), 1e-30])
def test_blocks_of_one_value_do_not_overflow(native_kernels: str, value: float) -> None:
    a, b, out = torch.full((7, BLOCK), value), torch.full((BLOCK, 33), value / abs(value)), torch.empty(7, 33)
    multiply(MatmulPrecision.INT16, Matmul(a, b, out))
    assert torch.equal(out, reference(a, b))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_infinity_and_nan_reach_the_result(native_kernels: str, bad: float) -> None:
    a, b, out = torch.ones(4, 600), torch.ones(600, 20), torch.empty(4, 20)
    a[1, 555] = bad
    b[3, 7] = bad
    multiply(MatmulPrecision.INT16, Matmul(a, b, out))
    expected = torch.zeros(4, 20, dtype=torch.bool)
    expected[1], expected[:, 7] = True, True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 70), (257, 256, 192), (600, 33, 3), (300, 512, 520)])
def test_results_do_not_depend_on_the_threads(native_kernels: str, rows: int, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)

    def results() -> list[torch.Tensor | None]:
        y, x_grad, weight_grad = x.new_empty(rows, outputs), torch.empty_like(x), torch.empty_like(weight)
        multiply(MatmulPrecision.INT16, Matmul(x, weight.T, y))
        multiply(MatmulPrecision.INT16, Matmul(y, weight, x_grad), Matmul(y.T, x, weight_grad))
        return [y, x_grad, weight_grad]

    assert_equal_on_all_threads(results)


def test_a_layer_multiplies_integers_forward_and_backward(native_kernels: str) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(96, 40)
    layer.integer = True
    x = torch.randn(70, 96, generator=generator, requires_grad=True)
    grad = torch.randn(70, 40, generator=generator)
    y = layer(x)
    y.backward(grad)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    assert torch.equal(y, reference(x.detach(), weight.T) + bias)
    for gradient, exact in ((x.grad, reference(grad, weight)), (layer.weight.grad, reference(grad.T, x.detach()))):
        assert gradient is not None
        assert torch.equal(gradient, exact)


@RANDOM
@given(st.integers(16, 90), st.integers(1, 150), st.integers(1, 9), st.sampled_from(["q8_0", "q4_1", "q4_k"]))
@example(20, 90, 40, "q4_k")  # more terms than one pass sums
def test_quantized_weights_are_dequantized_and_converted(
    native_kernels: str, rows: int, outputs: int, blocks: int, name: str
) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs = blocks * FORMATS[name].block
    data = quantize_rows(torch.randn(outputs, inputs, generator=generator), FORMATS[name])
    weight = QuantizedWeight(data, FORMATS[name])
    x = torch.randn(rows, inputs, generator=generator, requires_grad=True)
    grad, values = torch.randn(rows, outputs, generator=generator), weight.dequantized(torch.float32)
    y = quantized_linear(x, weight, integer=True)
    y.backward(grad)
    assert x.grad is not None
    assert torch.equal(y, reference(x.detach(), values.T))
    assert torch.equal(x.grad, reference(grad, values))


@pytest.mark.parametrize("quantized", [False, True])
def test_an_adapter_is_added_in_fp32(native_kernels: str, quantized: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, first, second = (torch.randn(*shape, generator=generator) for shape in ((40, 256), (8, 256), (70, 8)))
    for leaf in (x, first, second):
        leaf.requires_grad_()
    wide, bias = torch.randn(70, 256, generator=generator), torch.randn(70, generator=generator)
    weight = QuantizedWeight(quantize_rows(wide, FORMATS["q8_0"]), FORMATS["q8_0"])
    values, grad = weight.dequantized(torch.float32) if quantized else wide, torch.randn(40, 70, generator=generator)
    found = (
        quantized_lora_linear(x, x, weight, bias, Adapter(first, second, 0.5), integer=True)
        if quantized
        else lora_linear(x, x, wide, bias, Adapter(first, second, 0.5), integer=True)
    )
    gradients = torch.autograd.grad(found, (x, first, second), grad)
    low = torch.autograd.grad(0.5 * (x @ first.T) @ second.T, (x, first, second), grad)
    plain = x.detach()
    expected = reference(plain, values.T) + bias + 0.5 * (x @ first.T) @ second.T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradients[0], reference(grad, values) + low[0], rtol=1e-5, atol=1e-4)
    for ours, exact in zip(gradients[1:], low[1:], strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-3)
