"""Gradients of weights that matmuls add in place to their fp32 sums over micro-batches."""

from __future__ import annotations

from typing import Protocol

import torch

from sansgpu.kernels.matmul import Matmul


class GradientSum(Protocol):
    """The sum of a weight's gradients: the attribute `gradient_sum` of a parameter, which an optimizer sets.

    The backward function of a kernel may add to it and return no gradient of the weight. The weight's
    post-accumulate-grad hooks run after the last such function all the same.
    """

    summed: bool  # False: return gradients to autograd
    gradient: torch.Tensor | None  # fp32 and contiguous once there is a gradient


def gradient_sum(weight: torch.Tensor) -> GradientSum | None:
    """Returns the sum to which backward passes add gradients of this weight, or None if autograd gets them."""
    return getattr(weight, "gradient_sum", None)


def weight_gradient(
    a: torch.Tensor, b: torch.Tensor, target: GradientSum | None, row_sums: torch.Tensor | None
) -> tuple[Matmul, torch.Tensor | None]:
    """Returns a matmul that computes a gradient a (M, K) times b (K, N), and the sums of the rows of a.

    Returns the gradient, too, or None if the matmul adds it to `target`.
    """
    shape = a.shape[0], b.shape[1]
    if target is None or not target.summed:
        gradient = a.new_empty(shape)
        return Matmul(a, b, gradient, row_sums=row_sums), gradient
    add = target.gradient is not None
    if target.gradient is None:
        target.gradient = a.new_empty(shape, dtype=torch.float32)
    return Matmul(a, b, target.gradient, add=add, row_sums=row_sums), None
