"""Orthogonalization of matrices, the core of the Muon optimizer."""

from __future__ import annotations

import torch

from sansgpu.kernels import library

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest slope at 0 with results near 1
STEPS = 5


def reference_newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Returns U V^T of the SVD. `newton_schulz` approximates it: its singular values are between 0.7 and 1.2."""
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
        library.call("newton_schulz", narrow, by_gram, *matrices.shape, matrices, out, *COEFFICIENTS, STEPS)
        return out
    x = matrices if matrices.shape[1] == short else matrices.mT
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    x = torch.bmm(_gram_polynomial(x), x) if by_gram else _iterate(x)
    return x if matrices.shape[1] == short else x.mT


def _iterate(x: torch.Tensor) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _gram_polynomial(x: torch.Tensor) -> torch.Tensor:
    """Returns the matrix by which the iteration multiplies x in total.

    Each step multiplies by a polynomial in x x^T. These polynomials commute.
    """
    a, b, c = COEFFICIENTS
    gram = torch.bmm(x, x.mT)
    total: torch.Tensor | None = None
    for _ in range(STEPS):
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
