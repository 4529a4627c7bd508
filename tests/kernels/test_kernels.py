"""Every kernel against plain float64 code, at random shapes, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sansgpu.kernels import cross_entropy
from sansgpu.kernels.attention import attention, causal_document_mask, reference_attention
from sansgpu.kernels.cross_entropy import linear_cross_entropy, reference_cross_entropy
from sansgpu.kernels.newton_schulz import orthogonalise, reference_orthogonalise

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def with_gradients(tensors: list[torch.Tensor], function: object, weight: torch.Tensor) -> list[torch.Tensor]:
    """The function's value and the gradient of its weighted sum in each tensor."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    value = function(*leaves)  # type: ignore[operator]
    (value * weight.to(value.dtype)).sum().backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_near(ours: list[torch.Tensor], reference: list[torch.Tensor], dtype: torch.dtype) -> None:
    assert len(ours) == len(reference)
    for mine, exact in zip(ours, reference, strict=True):
        error = (mine.double() - exact).norm()
        assert error <= TOLERANCE[dtype] * (exact.norm() + 0.1)  # some gradients are zero


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 20), st.sampled_from([2, 8, 16]),
    st.booleans(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(0, 99),
)  # fmt: skip
def test_attention(
    batch: int, groups: int, kv_heads: int, time: int, dim: int, packed: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = groups * kv_heads
    shapes = [(batch, heads, time, dim), (batch, kv_heads, time, dim), (batch, kv_heads, time, dim)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    starts = torch.rand(batch, time, generator=generator) < 0.3
    documents = starts.cumsum(1) if packed else None
    mask = None if documents is None else causal_document_mask(documents)
    ours = with_gradients(inputs, lambda q, k, v: attention(q, k, v, mask), weight)
    exact = with_gradients(
        [t.double() for t in inputs], lambda q, k, v: reference_attention(q, k, v, documents), weight
    )
    assert_near(ours, exact, dtype)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 40), st.integers(1, 12), st.integers(2, 90), st.floats(0, 1),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(0, 99),
)  # fmt: skip
def test_linear_cross_entropy(
    tokens: int, width: int, vocabulary: int, ignored: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    head = torch.randn(vocabulary, width, generator=generator).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = -100
    scale = torch.tensor(0.37, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_ROWS", 16)  # several chunks, the last one short
        ours = with_gradients([hidden, head], lambda h, w: linear_cross_entropy(h, w, targets), scale)
    exact = with_gradients([hidden.double(), head.double()], lambda h, w: reference_cross_entropy(h, w, targets), scale)
    assert_near(ours, exact, dtype)


def test_linear_cross_entropy_in_several_chunks_and_without_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (200, 30))
    targets = torch.randint(0, 30, (200,), generator=generator)
    exact = reference_cross_entropy(hidden, head, targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_ROWS", 16)
        assert not linear_cross_entropy(hidden, head, targets).requires_grad
        torch.testing.assert_close(linear_cross_entropy(hidden, head, targets), exact)
        hidden.requires_grad_()
        linear_cross_entropy(hidden, head, targets).backward()
    (expected,) = torch.autograd.grad(reference_cross_entropy(hidden, head, targets), hidden)
    torch.testing.assert_close(hidden.grad, expected)


def test_linear_cross_entropy_multiplies_in_autocasts_dtype_and_sums_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=generator) for n in (50, 40))
    targets = torch.randint(0, 40, (50,), generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, head, targets)
    assert loss.dtype == torch.float32
    exact = reference_cross_entropy(hidden.bfloat16().double(), head.bfloat16().double(), targets)
    assert float(loss) == pytest.approx(float(exact), rel=5e-3)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 24), st.integers(1, 24), st.integers(0, 99))
def test_orthogonalise_brings_singular_values_near_one_and_keeps_directions(
    count: int, rows: int, columns: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(count, rows, columns, generator=generator, dtype=torch.float64)
    together = orthogonalise(matrices, torch.float64)
    for matrix, result in zip(matrices, together, strict=True):
        torch.testing.assert_close(orthogonalise(matrix[None], torch.float64)[0], result)
        u, before, vh = torch.linalg.svd(matrix, full_matrices=False)
        core = u.T @ result @ vh.T
        settled = before > 0.03 * before.norm()  # five steps do not lift what is almost nothing
        assert torch.all((core.diagonal()[settled] > 0.3) & (core.diagonal()[settled] < 1.3))
        assert (core - core.diagonal().diag()).abs().max() < 1e-6
    assert reference_orthogonalise(matrices[0]).shape == (rows, columns)
