"""Matmuls in block floating point against a reference that rounds alike, which they equal, and against float64."""

import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.block_quantization import FORMATS, QuantizedWeight, quantize_rows
from sansgpu.kernels.frozen_linear import Adapter, lora_linear, quantized_linear, quantized_lora_linear
from sansgpu.kernels.linear import Linear
from sansgpu.kernels.matmul import INTEGERS, Integer, Matmul, MatmulPrecision, multiply
from tests.kernels.test_matmul import LAYOUTS
from tests.kernels.threads import assert_equal_on_all_threads

RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
BLOCKS: dict[Integer, int] = {"int16": 512, "int8": 256}  # terms that share a scale
UNITS = {"int16": 2.0**-10, "int8": 9 / 8 / 127}  # largest unit of a mantissa, relative to its block's largest value
PRECISIONS = {"int16": MatmulPrecision.INT16, "int8": MatmulPrecision.INT8}
# Infinity, and NaN whose bits are at the ends of their range, where a sum of bits may overflow.
NOT_FINITE = torch.tensor(
    [0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0x7FF00000, 0x7FF00001, 0x7FFF0000, 0x7FFFFFFF, 0xFFFFFFFF]
).int().view(torch.float32)  # fmt: skip
each_integer = pytest.mark.parametrize("integer", INTEGERS)


def rotated(rows: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Rotates rows (N, terms) as native/rotation.h, by pieces of 256, 64 or 16 terms; with `back`, the other way."""
    parts, start = [], 0
    for lines in (16, 4, 1):
        while start + 16 * lines <= rows.shape[1]:
            parts.append(rotated_piece(rows[:, start : start + 16 * lines].float(), back))
            start += 16 * lines
    return torch.cat([*parts, rows[:, start:].float()], dim=1)


def rotated_piece(rows: torch.Tensor, back: bool) -> torch.Tensor:
    """Returns the signed terms times a Hadamard matrix, computed in the order of the kernel."""
    index = torch.arange(rows.shape[1])
    bits = [index >> place & 1 for place in range(8)]
    signs = 1.0 - 2.0 * ((bits[4] & bits[5]) ^ (bits[6] & bits[7]) ^ (bits[0] & bits[1]))
    values = rows * (1.0 if back else signs) * (0.5 / math.isqrt(rows.shape[1] // 16))
    for bit in [*range(4, rows.shape[1].bit_length() - 1), 0, 1]:
        pairs = values.view(len(rows), -1, 2, 1 << bit)
        first, second = pairs.unbind(2)
        values = torch.stack((first + second, first - second), dim=2).view(rows.shape)
    return values * signs if back else values


def rounded(integer: Integer, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mantissas and the scales of blocks of rows, in float64."""
    rows = rotated(rows) if integer == "int8" else rows
    largest = rows.float().abs().amax(dim=1, keepdim=True)
    if integer == "int16":
        exponents = torch.frexp(largest * (1 + 2.0**-11)).exponent.clamp(min=-59)
        scales = 2.0 ** (exponents - 11).double()
        return (rows.double() / scales).round(), scales
    unit = torch.frexp((largest * (1 / torch.tensor(127.0))).clamp(min=2.0**-60))
    scales = (unit.mantissa.double() * 16).ceil() / 16 * 2.0 ** unit.exponent.double()  # four significant bits
    fraction = torch.frexp(scales)
    inverses = (0.5 / fraction.mantissa).float() * 2.0 ** (1 - fraction.exponent).float()
    return (rows.float() * inverses).round().double(), scales


def reference(
    a: torch.Tensor, b: torch.Tensor, total: torch.Tensor | None = None, integer: Integer = "int16"
) -> torch.Tensor:
    """Computes a (M, K) times b (K, N), plus `total`, as the kernel: exact blocks, added one after another in fp32."""
    size = BLOCKS[integer]
    for k in range(0, a.shape[1], size):
        (left, rows), (right, columns) = rounded(integer, a[:, k : k + size]), rounded(integer, b[k : k + size].T)
        block = (left @ right.T).float() * (rows * columns.T).float()
        total = block if total is None else total + block
    assert total is not None
    return total


def assert_equal(
    integer: Integer, found: torch.Tensor, expected: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> None:
    """Compares a result that contains a (M, K) times b (K, N).

    For int8, allows the rounding of fp32 operations, which a processor may fuse, and that it rounds a value in the
    middle of two mantissas to either.
    """
    if integer == "int16":
        assert torch.equal(found, expected)
        return
    allowed = 1e-6 * (a.double().abs() @ b.double().abs() + expected.abs())
    for k in range(0, a.shape[1], BLOCKS[integer]):
        (left, moved), (right, of_right) = (rounding_of(rows) for rows in (a[:, k : k + 256], b[k : k + 256].T))
        allowed += moved @ right.T + left @ of_right.T + moved @ of_right.T
    assert bool(((found.double() - expected.double()).abs() <= allowed).all())


def rounding_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the magnitudes of int8 values, and how far those in the middle of two mantissas may be moved."""
    mantissas, scales = rounded("int8", rows)
    exact = rotated(rows).double() / scales
    return mantissas.abs() * scales, scales * ((exact - exact.floor() - 0.5).abs() < 1e-4)


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
@each_integer
def test_results_equal_the_reference(
    native_kernels: str, integer: Integer, rows: int, columns: int, terms: int, left: str, right: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = LAYOUTS[left](spread(rows, terms, generator)), LAYOUTS[right](spread(terms, columns, generator))
    bias, before = torch.randn(columns, generator=generator), torch.randn(rows, columns, generator=generator)
    out, total, sums = torch.full((rows, columns), 9.0), before.clone(), torch.full((rows,), 9.0)
    multiply(PRECISIONS[integer], Matmul(a, b, out, bias, row_sums=sums))
    multiply(PRECISIONS[integer], Matmul(a, b, total, add=True))
    assert_equal(integer, out, reference(a, b, None, integer) + bias, a, b)
    assert_equal(integer, total, reference(a, b, before, integer), a, b)
    torch.testing.assert_close(sums.double(), a.double().sum(1), rtol=1e-5, atol=1e-5 * float(a.abs().sum(1).max()))


@each_integer
@RANDOM
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 1200), st.integers(0, 99))
def test_the_error_is_half_a_unit_of_each_block(
    native_kernels: str, integer: Integer, rows: int, columns: int, terms: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = spread(rows, terms, generator), spread(terms, columns, generator)
    out, size = torch.empty(rows, columns), BLOCKS[integer]
    multiply(PRECISIONS[integer], Matmul(a, b, out))
    bound = torch.zeros(rows, columns, dtype=torch.float64)
    for k in range(0, terms, size):
        left, right = a[:, k : k + size], b[k : k + size]
        if integer == "int8":
            left, right = rotated(left), rotated(right.T).T
        left, right = left.double().abs(), right.double().abs()
        errors = (UNITS[integer] / 2 * values.amax(dim, keepdim=True) for values, dim in ((left, 1), (right, 0)))
        left_error, right_error = (error.expand_as(values) for error, values in zip(errors, (left, right), strict=True))
        bound += left_error @ right + left @ right_error + left_error @ right_error
    magnitudes = a.double().abs() @ b.double().abs()
    assert bool(((out.double() - a.double() @ b.double()).abs() <= bound + 1e-6 * magnitudes).all())


def test_a_constant_and_an_outlier_leave_digits_to_other_terms_of_int8(native_kernels: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(30, 256, generator=generator), torch.randn(256, 20, generator=generator)
    a[:, 77] = 1000.0
    a[::2] += 40.0
    b[77] = 0.0
    out = torch.empty(30, 20)
    multiply(MatmulPrecision.INT8, Matmul(a, b, out))
    expected = a.double() @ b.double()
    assert float((out.double() - expected).norm() / expected.norm()) < 0.05  # 0.2 without a rotation


@each_integer
@pytest.mark.parametrize("value", [1.9995, 2.0, -(2.0**100), 1e-30])
def test_blocks_of_one_value_do_not_overflow(native_kernels: str, integer: Integer, value: float) -> None:
    size = BLOCKS[integer]
    a, b, out = torch.full((7, size), value), torch.full((size, 33), value / abs(value)), torch.empty(7, 33)
    multiply(PRECISIONS[integer], Matmul(a, b, out))
    assert_equal(integer, out, reference(a, b, None, integer), a, b)


@each_integer
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_infinity_and_every_nan_reach_the_result(native_kernels: str, integer: Integer, layout: str) -> None:
    for bad in NOT_FINITE:
        a, b, out = torch.ones(4, 600), torch.ones(600, 20), torch.empty(4, 20)
        a[1, 555:556], b[3, 7:8] = bad, bad  # slices, because scalars would lose their bits
        multiply(PRECISIONS[integer], Matmul(LAYOUTS[layout](a), LAYOUTS[layout](b), out))
        expected = torch.zeros(4, 20, dtype=torch.bool)
        expected[1], expected[:, 7] = True, True
        assert torch.equal(out.isnan(), expected), bad.view(torch.int32)


@pytest.mark.parametrize("bits", [0x7F80, 0x7F81, 0x7FC0, 0x7FF1, 0x7FFF, 0xFFFF])
def test_infinity_and_every_nan_of_bf16_reach_the_result_of_int8(native_kernels: str, bits: int) -> None:
    bad = torch.tensor([bits], dtype=torch.uint16).view(torch.bfloat16)
    a, b = torch.ones(4, 600, dtype=torch.bfloat16), torch.ones(600, 20, dtype=torch.bfloat16)
    a[1, 555:556] = bad
    total, out = torch.empty(4, 20), torch.empty(4, 20, dtype=torch.bfloat16)
    multiply(MatmulPrecision.INT8_OF_BF16, Matmul(a, b, total, rounded=out))
    for found in (total, out):
        assert found.isfinite().all(dim=1).tolist() == [True, False, True, True]


@each_integer
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 40, 70), (257, 256, 192), (600, 33, 3), (300, 512, 520)])
def test_results_do_not_depend_on_the_threads(
    native_kernels: str, integer: Integer, rows: int, inputs: int, outputs: int
) -> None:
    generator, precision = torch.Generator().manual_seed(0), PRECISIONS[integer]
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)

    def results() -> list[torch.Tensor | None]:
        y, x_grad, weight_grad = x.new_empty(rows, outputs), torch.empty_like(x), torch.empty_like(weight)
        multiply(precision, Matmul(x, weight.T, y))
        multiply(precision, Matmul(y, weight, x_grad), Matmul(y.T, x, weight_grad))
        return [y, x_grad, weight_grad]

    assert_equal_on_all_threads(results)


@each_integer
def test_a_row_does_not_depend_on_the_number_of_rows(native_kernels: str, integer: Integer) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(140, 1100, generator=generator), torch.randn(1100, 150, generator=generator)
    shared = 3 * torch.randn(1100, generator=generator)  # makes the sums so large that their products are rounded
    a, b = a + shared, b + shared[:, None]

    def product(rows: int) -> torch.Tensor:
        out = torch.empty(rows, 150)
        multiply(PRECISIONS[integer], Matmul(a[:rows], b, out))
        return out

    whole = product(140)
    for rows in (*range(1, 20), 32, 45, 64, 100, 128):
        assert torch.equal(product(rows), whole[:rows])


@each_integer
def test_a_layer_multiplies_integers_forward_and_backward(native_kernels: str, integer: Integer) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(96, 40)
    layer.integer = integer
    x = torch.randn(70, 96, generator=generator, requires_grad=True)
    grad = torch.randn(70, 40, generator=generator)
    y = layer(x)
    y.backward(grad)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    assert x.grad is not None
    assert_equal(integer, y, reference(x.detach(), weight.T, None, integer) + bias, x.detach(), weight.T)
    assert_equal(integer, x.grad, reference(grad, weight, None, integer), grad, weight)
    assert layer.weight.grad is not None
    assert_equal(integer, layer.weight.grad, reference(grad.T, x.detach(), None, integer), grad.T, x.detach())


@RANDOM
@given(
    st.integers(1, 150), st.integers(1, 90), st.integers(1, 600), st.sampled_from(list(LAYOUTS)),
    st.sampled_from(list(LAYOUTS)), st.integers(0, 99),
)  # fmt: skip
def test_int8_takes_bf16_operands(
    native_kernels: str, rows: int, columns: int, terms: int, left: str, right: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = LAYOUTS[left](spread(rows, terms, generator).bfloat16())
    b = LAYOUTS[right](spread(terms, columns, generator).bfloat16())
    out, total = torch.empty(rows, columns, dtype=torch.bfloat16), torch.empty(rows, columns)
    multiply(MatmulPrecision.INT8_OF_BF16, Matmul(a, b, total, rounded=out))
    expected = reference(a.float(), b.float(), None, "int8")
    assert_equal("int8", total, expected, a, b)
    assert torch.equal(out, total.bfloat16())


@each_integer
@RANDOM
@given(st.integers(16, 90), st.integers(1, 150), st.integers(1, 9), st.sampled_from(["q8_0", "q4_1", "q4_k"]))
@example(20, 90, 40, "q4_k")  # more terms than one pass sums
def test_quantized_weights_are_dequantized_and_converted(
    native_kernels: str, integer: Integer, rows: int, outputs: int, blocks: int, name: str
) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs = blocks * FORMATS[name].block
    data = quantize_rows(torch.randn(outputs, inputs, generator=generator), FORMATS[name])
    weight = QuantizedWeight(data, FORMATS[name])
    x = torch.randn(rows, inputs, generator=generator, requires_grad=True)
    grad, values = torch.randn(rows, outputs, generator=generator), weight.dequantized(torch.float32)
    y = quantized_linear(x, weight, integer=integer)
    y.backward(grad)
    assert x.grad is not None
    plain = x.detach()
    assert_equal(integer, y, reference(plain, values.T, None, integer), plain, values.T)
    assert_equal(integer, x.grad, reference(grad, values, None, integer), grad, values)


@each_integer
@pytest.mark.parametrize("quantized", [False, True])
def test_an_adapter_is_added_in_fp32(native_kernels: str, integer: Integer, quantized: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, first, second = (torch.randn(*shape, generator=generator) for shape in ((40, 256), (8, 256), (70, 8)))
    for leaf in (x, first, second):
        leaf.requires_grad_()
    wide, bias = torch.randn(70, 256, generator=generator), torch.randn(70, generator=generator)
    weight = QuantizedWeight(quantize_rows(wide, FORMATS["q8_0"]), FORMATS["q8_0"])
    values, grad = weight.dequantized(torch.float32) if quantized else wide, torch.randn(40, 70, generator=generator)
    found = (
        quantized_lora_linear(x, x, weight, bias, Adapter(first, second, 0.5), integer=integer)
        if quantized
        else lora_linear(x, x, wide, bias, Adapter(first, second, 0.5), integer=integer)
    )
    gradients = torch.autograd.grad(found, (x, first, second), grad)
    low = torch.autograd.grad(0.5 * (x @ first.T) @ second.T, (x, first, second), grad)
    plain = x.detach()
    expected = reference(plain, values.T, None, integer) + bias + 0.5 * (x @ first.T) @ second.T
    tolerance = 1e-4 if integer == "int16" else 0.5  # a value in the middle of two mantissas is rounded to either
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=tolerance)
    torch.testing.assert_close(gradients[0], reference(grad, values, None, integer) + low[0], rtol=1e-5, atol=tolerance)
    for ours, exact in zip(gradients[1:], low[1:], strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-3)
