"""Orthogonalization of matrices, the core of the Muon optimizer."""

from __future__ import annotations

import torch

from sansgpu.kernels import library

# Each step applies a x + b x^3 + c x^5 to the singular values x. Together the steps bring all x from 0.003 to 1 to
# values from 0.78 to 1.22, as close to 1 as four steps can.
# Each polynomial has the smallest maximum error on the range that the previous step produces (Polar Express, arXiv
# 2505.16932), widened by 1% for rounding errors.
# The five equal steps of Jordan et al. (2024) bring them to values from 0.68 to 1.2.
COEFFICIENTS = (
    (8.3019, -24.0424, 17.4699),
    (4.0102, -2.929, 0.543),
    (3.5025, -2.5772, 0.5049),
    (2.5227, -1.8392, 0.4271),
)
STEPS = len(COEFFICIENTS)
_FLAT = tuple(value for step in COEFFICIENTS for value in step)


def reference_newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Returns U V^T of the SVD. `newton_schulz` approximates it: its singular values are between 0.78 and 1.22."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return torch.matmul(u, vh)


def newton_schulz(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Orthogonalizes matrices (N, rows, columns) by Newton-Schulz iteration in `dtype`, also the result's dtype.

    Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. In fp32 and fp64, long
    matrices are iterated through their smaller Gram matrix; in bf16 that would lose the small singular values.
    """
    short, long = sorted(matrices.shape[1:])
    by_gram = dtype != torch.bfloat16 and long >= 2 * short
    out = torch.empty_like(matrices, dtype=dtype)
    if matrices.dtype == torch.float32 and matrices.is_contiguous() and library.takes(matrices, out) and out.numel():
        narrow = dtype == torch.bfloat16
        library.call("newton_schulz", narrow, by_gram, *matrices.shape, matrices, out, _FLAT, STEPS)
        return out
    x = matrices if matrices.shape[1] == short else matrices.mT
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float64)  # fp32 sums lose four digits
    x = (x / (norms + 1e-7).to(x.dtype)).to(dtype)
    x = torch.bmm(_gram_polynomial(x), x) if by_gram else _iterate(x)
    return x if matrices.shape[1] == short else x.mT


def _iterate(x: torch.Tensor) -> torch.Tensor:
    for a, b, c in COEFFICIENTS:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _gram_polynomial(x: torch.Tensor) -> torch.Tensor:
    """Returns the matrix by which the iteration multiplies x in total.

    Each step multiplies by a polynomial in x x^T. These polynomials commute.
    """
    gram = torch.bmm(x, x.mT)
    total: torch.Tensor | None = None
    for a, b, c in COEFFICIENTS:
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        total = factor if total is None else torch.bmm(factor, total)
        gram = torch.bmm(factor, torch.bmm(gram, factor))
    assert total is not None
    return total


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Returns the FLOPs to orthogonalize one matrix."""
    short, long = min(rows, columns), max(rows, columns)
    return STEPS * (4.0 * short**2 * long + 2.0 * short**3)
