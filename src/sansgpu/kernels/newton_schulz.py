"""Orthogonalisation of a matrix, Muon's core."""

from __future__ import annotations

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: the steepest slope at 0 that stays near 1
STEPS = 5


def reference_orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T of the singular value decomposition, which the iteration approaches to within singular values 0.7-1.2."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return torch.matmul(u, vh)


def orthogonalise(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Newton-Schulz iteration on (N, rows, columns) in `dtype`, all matrices at once; returns the same shape.

    Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
    """
    a, b, c = COEFFICIENTS
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrices.dtype)
