"""Gradients of weights that matmuls add in place to their fp32 sums over micro-batches."""

from __future__ import annotations

from typing import Protocol

import torch

from sansgpu.kernels.matmul import matmul, matmul_into, matmul_with_row_sums


class GradientSum(Protocol):
    """The sum of a weight's gradients: the attribute `gradient_sum` of a parameter, which an optimizer sets.

    The backward function of a kernel may add to it and return no gradient of the weight. The weight's
    post-accumulate-grad hooks run after the last such function all the same.
    """

    summed: bool  # False: return gradients to autograd
    gradient: torch.Tensor | None  # fp32 and contiguous once there is a gradient


def gradient_sum(weight: torch.Tensor) -> GradientSum | None:
    """Returns the sum to which backward passes add gradients of this weight, or None if autograd gets them."""
    # Autograd, which the compiler traces, must see the gradients.
    return None if torch.compiler.is_compiling() else getattr(weight, "gradient_sum", None)


def weight_gradient(
    a: torch.Tensor, b: torch.Tensor, target: GradientSum | None, row_sums: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradient a (M, K) times b (K, N), or None if it was added to `target`, and the sums of a's rows."""
    if target is None or not target.summed:
        return matmul_with_row_sums(a, b) if row_sums else (matmul(a, b), None)
    add = target.gradient is not None
    if target.gradient is None:
        target.gradient = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
    sums = a.new_empty(a.shape[0], dtype=torch.float32) if row_sums else None
    matmul_into(target.gradient, a, b, add, sums)
    return None, sums
