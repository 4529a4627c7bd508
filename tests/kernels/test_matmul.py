"""Compares matmuls and linear layers with float64, on every instruction set of this processor and in plain torch."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sansgpu.kernels import linear
from sansgpu.kernels.linear import Linear
from sansgpu.kernels.matmul import Matmul, MatmulPrecision, matmul_into, multiply, sum_of_matmuls
from tests.kernels.threads import assert_equal_on_all_threads

RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7}  # twice the relative error of storing a result
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda m: m.clone(),
    "columns": lambda m: m.T.contiguous().T,
    "part": lambda m: F.pad(m, (1, 2))[:, 1:-2],
    "strided": lambda m: m.repeat_interleave(2, dim=1)[:, ::2],
    "expanded": lambda m: m[:1].expand_as(m),
}


def assert_near(ours: torch.Tensor, exact: torch.Tensor, magnitudes: torch.Tensor, dtype: torch.dtype) -> None:
    """Compares with a float64 result; `magnitudes` has the sums of the absolute values of its terms."""
    assert ours.shape == exact.shape
    bound = ROUNDING[dtype] * exact.abs() + 1e-6 * magnitudes
    assert bool(((ours.double() - exact).abs() <= bound).all())


@RANDOM
@given(
    st.integers(1, 300), st.integers(1, 200), st.integers(1, 300), st.sampled_from(list(LAYOUTS)),
    st.sampled_from(list(LAYOUTS)), DTYPES, st.integers(0, 99),
)  # fmt: skip
@example(3, 70, 8195, "columns", "rows", torch.bfloat16, 0)  # longer sums than one pass computes
@example(5, 3, 8195, "rows", "columns", torch.float32, 0)
@example(700, 20, 4100, "columns", "rows", torch.float32, 0)  # larger than the kernel packs at once
@example(2, 9000, 900, "rows", "columns", torch.bfloat16, 0)
@example(300, 70, 301, "columns", "rows", torch.bfloat16, 0)  # the kernel computes the transpose of this product
@example(90, 70, 8195, "columns", "part", torch.float32, 0)
@example(1100, 1290, 40, "rows", "columns", torch.float32, 0)  # several supertiles, some of which are cut off
def test_matmul(
    native_kernels: str, rows: int, columns: int, terms: int, left: str, right: str, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = LAYOUTS[left](torch.randn(rows, terms, generator=generator).to(dtype))
    b = LAYOUTS[right](torch.randn(terms, columns, generator=generator).to(dtype))
    before = torch.randn(rows, columns, generator=generator)
    exact, magnitudes = a.double() @ b.double(), a.double().abs() @ b.double().abs() + 4
    kept, total = torch.full((rows, columns), 9.0).to(dtype), before.clone()
    matmul_into(kept, a, b)
    assert_near(kept, exact, magnitudes, dtype)
    matmul_into(total, a, b, add=True)
    assert_near(total - before, exact, magnitudes, torch.float32)


@RANDOM
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 200), st.integers(1, 300)), min_size=1, max_size=4),
    st.sampled_from(list(LAYOUTS)), DTYPES, st.integers(0, 99),
)  # fmt: skip
@example([(3, 70, 8195), (700, 20, 4100), (2, 9000, 900), (9, 9, 9)], "columns", torch.bfloat16, 0)  # several passes
@example([(5, 3, 8195), (5, 3, 2), (2, 9000, 900)], "rows", torch.float32, 0)
def test_matmuls_in_one_call(
    native_kernels: str, sizes: list[tuple[int, int, int]], layout: str, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        tuple(LAYOUTS[layout](torch.randn(shape, generator=generator).to(dtype)) for shape in ((m, k), (k, n)))
        for m, n, k in sizes
    ]
    biases = [torch.randn(n, generator=generator) for _, n, _ in sizes]
    results = [torch.full((m, n), 9.0).to(dtype) for m, n, _ in sizes]
    sums = [torch.full((m,), 9.0) for m, _, _ in sizes]
    given = zip(pairs, results, biases, sums, strict=True)
    multiply(
        MatmulPrecision.of(dtype), *(Matmul(a, b, out, bias, row_sums=of_rows) for (a, b), out, bias, of_rows in given)
    )
    for (a, b), out, bias, of_rows in zip(pairs, results, biases, sums, strict=True):
        exact, magnitudes = a.double() @ b.double() + bias.double(), a.double().abs() @ b.double().abs() + 4
        assert_near(out, exact, magnitudes, dtype)
        assert_near(of_rows, a.double().sum(1), a.double().abs().sum(1), torch.float32)


@RANDOM
@given(st.lists(st.integers(1, 200), min_size=1, max_size=3), st.integers(1, 200), st.integers(1, 200), DTYPES)
@example([8195, 20], 9, 70, torch.bfloat16)
def test_sums_of_matmuls(native_kernels: str, terms: list[int], rows: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(terms))
    pairs = [
        (torch.randn(rows, k, generator=generator).to(dtype), torch.randn(k, columns, generator=generator).to(dtype))
        for k in terms
    ]
    out = torch.full((rows, columns), 9.0).to(dtype)
    multiply(MatmulPrecision.of(dtype), *sum_of_matmuls(pairs, out))
    exact = sum(a.double() @ b.double() for a, b in pairs)
    assert isinstance(exact, torch.Tensor)
    assert_near(out, exact, sum(a.double().abs() @ b.double().abs() for a, b in pairs) + 4, dtype)


def test_matrices_that_do_not_match_are_refused(native_kernels: str) -> None:
    a, b = torch.ones(3, 4), torch.ones(5, 2)
    for refused in (
        lambda: matmul_into(torch.ones(3, 2), a, b),
        lambda: Matmul(a, b[:4], torch.ones(3, 2), torch.ones(3)),
        lambda: matmul_into(torch.ones(3, 5), a, b[:4]),
    ):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            refused()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 40, 70), (257, 256, 192), (600, 33, 3), (300, 512, 520), (1100, 72, 1290)]
)
def test_results_do_not_depend_on_the_threads(
    native_kernels: str, rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)

    def results() -> list[torch.Tensor | None]:
        y, x_grad, weight_grad = x.new_empty(rows, outputs), torch.empty_like(x), torch.empty_like(weight)
        sums = torch.empty(outputs)
        multiply(MatmulPrecision.of(dtype), Matmul(x, weight.T, y))
        multiply(MatmulPrecision.of(dtype), Matmul(y, weight, x_grad), Matmul(y.T, x, weight_grad, row_sums=sums))
        return [y, x_grad, weight_grad, sums]

    assert_equal_on_all_threads(results)


@RANDOM
@given(
    st.integers(1, 3), st.integers(1, 150), st.integers(1, 150), st.integers(1, 90), st.booleans(), st.booleans(),
    DTYPES, st.integers(0, 99),
)  # fmt: skip
def test_linear(
    kernels: str, batch: int, time: int, outputs: int, inputs: int, biased: bool, frozen: bool, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, inputs, time, generator=generator).transpose(1, 2)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator) if biased else None
    grad = torch.randn(batch, time, outputs, generator=generator).to(dtype)
    leaves = [t.clone().requires_grad_(not (frozen and t is weight)) for t in (x, weight, bias) if t is not None]
    given = dict(zip(("weight", "bias"), leaves[1:], strict=False))
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        patch.setattr(linear, "MIN_ROWS", 1)
        y = torch.func.functional_call(Linear(inputs, outputs, bias=biased, device="meta"), given, (leaves[0],))
    y.backward(grad)
    exact = [t.detach().to(dtype if t.ndim > 1 else t.dtype).double().requires_grad_(t.requires_grad) for t in leaves]
    reference = F.linear(*exact)
    reference.backward(grad.double())
    assert y.dtype == dtype
    pairs = [(y.detach(), reference.detach()), *((t.grad, e.grad) for t, e in zip(leaves, exact, strict=True))]
    for ours, theirs in pairs:
        if theirs is None:
            assert ours is None
        else:
            error = (ours.double() - theirs).norm()
            assert error <= (ROUNDING[dtype] + 1e-5) * theirs.norm() + 1e-5
