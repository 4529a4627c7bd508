"""Compares the orthogonalization of batches of matrices, on every instruction set and in plain torch, with float64."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sansgpu.kernels.newton_schulz import newton_schulz

RANDOM = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # largest error, relative to the norm of the result


def normal(count: int, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed))


@RANDOM
@given(
    st.integers(1, 4), st.integers(1, 200), st.integers(1, 200), st.sampled_from(list(MOST_ERROR)), st.integers(0, 99)
)
@example(2, 130, 300, torch.float32, 0)  # iterated through the Gram matrix
@example(2, 300, 130, torch.float32, 0)
@example(2, 70, 8200, torch.bfloat16, 0)  # longer sums than one pass computes
@example(1, 8200, 500, torch.float32, 0)  # larger than the kernel packs at once
def test_every_matrix_of_a_batch_is_as_in_float64(
    kernels: str, count: int, rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    matrices = normal(count, rows, columns, seed) * 10.0 ** torch.arange(count).view(-1, 1, 1)
    ours, exact = newton_schulz(matrices, dtype), newton_schulz(matrices.double(), torch.float64)
    assert ours.dtype == dtype
    assert ours.shape == matrices.shape
    errors = (ours.double() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    # A singular value may move anywhere between 0.7 and 1.2 if it is rounded; only the mean over many is precise.
    averages = dtype == torch.float32 or min(rows, columns) >= 8
    assert bool((errors < (MOST_ERROR[dtype] if averages else 0.5)).all()), errors


@pytest.mark.parametrize("dtype", MOST_ERROR)
@pytest.mark.parametrize(("rows", "columns"), [(150, 200), (200, 150), (70, 200), (200, 70)])
def test_results_depend_neither_on_the_threads_nor_on_the_batch(
    native_kernels: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    matrices, before = normal(3, rows, columns), torch.get_num_threads()
    expected = torch.cat([newton_schulz(matrix[None], dtype) for matrix in matrices])
    for threads in (1, 2, 5, 5, 16):
        torch.set_num_threads(threads)
        assert torch.equal(newton_schulz(matrices, dtype), expected)
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_matrices_stay_empty(kernels: str, shape: tuple[int, int, int]) -> None:
    assert newton_schulz(torch.zeros(shape), torch.float32).shape == shape


def test_zeros_stay_zeros(kernels: str) -> None:
    assert not newton_schulz(torch.zeros(2, 5, 3), torch.bfloat16).any()
