"""Orthogonalization of matrices, the core of the Muon optimizer."""

from __future__ import annotations

import torch

from sansgpu.kernels import native

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest slope at 0 with results near 1
STEPS = 5


def reference_newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Returns U V^T of the SVD. `newton_schulz` approximates it: its singular values are between 0.7 and 1.2."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return torch.matmul(u, vh)


def newton_schulz(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Orthogonalizes a batch of matrices (N, rows, columns) by Newton-Schulz iteration in `dtype`, that of the result.

    Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024. In fp32 and fp64, long
    matrices are iterated through their smaller Gram matrix; in bf16 that would lose the small singular values.
    """
    x = _normalized(matrices, dtype)
    short, long = sorted(x.shape[1:])
    if dtype != torch.bfloat16 and long >= 2 * short:
        return _on_shorter_side(_gram_polynomial(_gram(x)), x)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = _gram(x)
        x = _on_shorter_side(_multiply(gram, gram, gram, alpha=c, beta=b, symmetric=True), x, a)
    return x


def _gram_polynomial(gram: torch.Tensor) -> torch.Tensor:
    """Returns the product of all steps. Each is a polynomial in the Gram matrix, so they commute and are symmetric."""
    a, b, c = COEFFICIENTS
    total: torch.Tensor | None = None
    for step in range(STEPS):
        factor = _multiply(gram, gram, gram, alpha=c, beta=b, symmetric=True)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        total = factor if total is None else _multiply(factor, total, symmetric=True)
        if step < STEPS - 1:
            gram = _multiply(factor, _multiply(gram, factor, symmetric=True), symmetric=True)
    assert total is not None
    return total


def _gram(x: torch.Tensor) -> torch.Tensor:
    """Returns the products of the shorter dimension's vectors with each other."""
    wide = x.shape[1] <= x.shape[2]
    return _multiply(x, x.mT, symmetric=True) if wide else _multiply(x.mT, x, symmetric=True)


def _on_shorter_side(gram: torch.Tensor, x: torch.Tensor, beta: float = 0.0) -> torch.Tensor:
    """Returns gram @ x + beta x, or x @ gram + beta x if x is higher than wide."""
    third = x if beta else None
    return _multiply(*((gram, x) if x.shape[1] <= x.shape[2] else (x, gram)), third, beta=beta)


def _normalized(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the matrices divided by their norms."""
    out = torch.empty_like(matrices, dtype=dtype)
    if matrices.dtype == torch.float32 and matrices.is_contiguous() and native.takes(matrices, out) and out.numel():
        native.call("normalize", dtype == torch.bfloat16, len(out), out[0].numel(), matrices, out)
        return out
    return out.copy_(matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7))


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    third: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    symmetric: bool = False,
) -> torch.Tensor:
    """Returns alpha a @ b + beta third for a batch. `symmetric` says that the results are symmetric matrices."""
    if not (native.takes(a) and a.numel()):
        return torch.bmm(a, b) if third is None else torch.baddbmm(third, a, b, beta=beta, alpha=alpha)
    (count, rows, terms), columns = a.shape, b.shape[2]
    out = a.new_empty(count, rows, columns)
    turned = not a.is_contiguous(), not b.is_contiguous()  # then they are transposed views
    native.call(
        "matmul_batch", a.dtype == torch.bfloat16, count, rows, columns, terms, a, turned[0], b, turned[1], third,
        alpha, beta, symmetric, out,
    )  # fmt: skip
    return out


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Returns the FLOPs to orthogonalize one matrix."""
    short, long = min(rows, columns), max(rows, columns)
    return STEPS * (4.0 * short**2 * long + 2.0 * short**3)
