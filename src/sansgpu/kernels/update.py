"""Gradient accumulation, gradient norm and weight updates, each in one pass over memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sansgpu.kernels import native
from sansgpu.kernels.c_functions import Argument


def use_native(*tensors: torch.Tensor | None) -> bool:
    """Returns whether the kernels are loaded and can read the tensors."""
    given = [tensor for tensor in tensors if tensor is not None]
    return native.takes(*given) and all(tensor.is_contiguous() for tensor in given)


def add_product(total: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Adds `product`, of the same or a narrower dtype, to `total` in place; returns `total`."""
    if total.dtype == torch.float32 and product.dtype == torch.bfloat16 and use_native(total, product):
        require_size(total.numel(), product)
        native.call("accumulate", total, product, total.numel())
        return total
    return total.add_(product)


def global_norm(gradients: list[torch.Tensor]) -> float:
    """Returns the 2-norm of all gradients concatenated."""
    if use_native(*gradients):
        squares = torch.empty(len(gradients), dtype=torch.float64)
        pointers, sizes = tuple(g.data_ptr() for g in gradients), tuple(g.numel() for g in gradients)
        narrow = tuple(int(g.dtype == torch.bfloat16) for g in gradients)
        native.call("squared_norms", len(gradients), pointers, sizes, narrow, squares)
        return math.sqrt(math.fsum(squares.tolist()))
    norms = [float(torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))) for g in gradients]
    return math.hypot(*norms)


def require_size(size: int, *tensors: torch.Tensor | None) -> None:
    """Raises RuntimeError if a tensor has another size, because a kernel would read or write out of bounds."""
    if any(tensor is not None and tensor.numel() != size for tensor in tensors):
        raise RuntimeError(f"a tensor of an update has another size than the {size} that the others require.")


@dataclass(frozen=True)
class WeightUpdate:
    """A weight with what an update reads and changes; all tensors have its shape.

    `working`, a copy of the weight in the compute dtype, is updated too. A bf16 weight has no copy and is rounded
    stochastically from `seed` (63 bits), which must change every step.
    """

    weight: torch.Tensor
    moments: Sequence[torch.Tensor]
    gradient: torch.Tensor
    working: torch.Tensor | None = None
    weight_decay: float = 0.0
    seed: int = 0

    def as_struct(self) -> tuple[int, ...]:
        """Returns the struct Weight of native/update.cpp."""
        moments = [moment.data_ptr() for moment in self.moments]
        working = 0 if self.working is None else self.working.data_ptr()
        narrow = (int(tensor.dtype == torch.bfloat16) for tensor in (self.weight, self.gradient))
        pointers = (self.weight.data_ptr(), self.gradient.data_ptr(), working, *moments, *[0] * (4 - len(moments)))
        return (*pointers, self.weight.numel(), *narrow, self.seed)


@dataclass(frozen=True)
class AdamWStep:
    """The settings of a step of AdamW that all weights share."""

    lr: float
    betas: tuple[float, float]
    eps: float
    number: int  # counts from 1
    scale: float = 1.0  # factor of all gradients, which clips them

    def run(self, kernel: str, updates: list[WeightUpdate], *maps: torch.Tensor) -> None:
        """Calls the kernel `adamw` or `adamw8` once for all weights, so that small ones share the threads."""
        settings = (self.lr, *self.betas, self.eps, self.number, self.scale)
        call_update(kernel, updates, decays_of(updates), *maps, *settings)


def call_update(kernel: str, updates: Sequence[WeightUpdate], *arguments: Argument) -> None:
    """Calls a kernel of native/update.cpp for weights."""
    if updates:
        structs = tuple(word for update in updates for word in update.as_struct())
        native.call(kernel, len(updates), structs, *arguments)


def decays_of(updates: Sequence[WeightUpdate]) -> torch.Tensor:
    return torch.tensor([update.weight_decay for update in updates], dtype=torch.float64)


def split(
    updates: Sequence[WeightUpdate], wide: Callable[[WeightUpdate], Sequence[torch.Tensor]]
) -> tuple[list[WeightUpdate], list[WeightUpdate]]:
    """Returns the updates for a kernel, which takes the tensors `wide(update)` only in fp32, and those for torch."""
    native_ones, others = [], []
    for update in updates:
        tensors = (update.weight, *update.moments, update.gradient, update.working)
        if use_native(*tensors) and all(tensor.dtype == torch.float32 for tensor in wide(update)):
            require_size(update.weight.numel(), *tensors)
            native_ones.append(update)
        else:
            others.append(update)
    return native_ones, others


def adamw(updates: Sequence[WeightUpdate], step: AdamWStep) -> None:
    """Applies a step of AdamW (arXiv 1711.05101) in place. The moments of a weight are two tensors, fp32 or wider."""
    together, others = split(updates, lambda update: update.moments)
    step.run("adamw", together)
    for update in others:
        adamw_in_torch(update, step)


def adamw_in_torch(update: WeightUpdate, step: AdamWStep) -> None:
    """Applies a step of AdamW with torch's operators."""
    weight, moments = update.weight, update.moments
    steps = torch.tensor(float(step.number), device=weight.device)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    tensors = (weight, *moments, update.gradient)
    wide, m, v, g = (t.to(dtype).contiguous() for t in tensors)  # torch's kernel ignores strides
    torch._fused_adamw_(
        [wide], [g * step.scale], [m], [v], [], [steps],
        lr=step.lr, beta1=step.betas[0], beta2=step.betas[1], weight_decay=update.weight_decay, eps=step.eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    weight.copy_(_stochastic_round(wide, update.seed) if weight.dtype == torch.bfloat16 else wide)
    for moment, new in zip(moments, (m, v), strict=True):
        moment.copy_(new)
    if update.working is not None:
        update.working.copy_(wide)


def _stochastic_round(wide: torch.Tensor, seed: int) -> torch.Tensor:
    """Rounds fp32 to bf16 stochastically, so that the result is unbiased.

    Rounding to nearest would lose every update smaller than half a unit in the last place.
    """
    generator = torch.Generator(wide.device).manual_seed(seed)
    noise = torch.randint(1 << 16, wide.shape, generator=generator, dtype=torch.int32, device=wide.device)
    rounded = (wide.view(torch.int32) + noise) & -(1 << 16)
    return torch.where(wide.isfinite(), rounded.view(torch.float32), wide).bfloat16()


def nesterov(updates: Sequence[WeightUpdate], beta: float, scale: float) -> None:
    """Updates the momentum of weights with their gradients times `scale`.

    The moments of a weight, fp32 or wider, are its momentum and a tensor that becomes the direction of its update:
    Nesterov's momentum, one step ahead.
    """
    together, others = split(updates, lambda update: update.moments)
    call_update("nesterov", together, beta, scale)
    for update in others:
        momentum, direction = update.moments
        gradient = update.gradient.to(momentum.dtype) * scale
        momentum.lerp_(gradient, 1 - beta)
        direction.copy_(gradient.lerp_(momentum, beta))


def descend(updates: Sequence[WeightUpdate], lr: float, scale: float) -> None:
    """Moves weights, fp32 or wider, against their gradients times `scale`, with decoupled weight decay."""
    together, others = split(updates, lambda update: [update.weight])
    call_update("descend", together, decays_of(together), lr, scale)
    for update in others:
        update.weight.mul_(1 - lr * update.weight_decay).add_(update.gradient, alpha=-lr * scale)
        if update.working is not None:
            update.working.copy_(update.weight)
