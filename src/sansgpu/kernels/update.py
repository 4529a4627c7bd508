"""Gradient accumulation, gradient norm and weight updates, each in one pass over memory.

AdamW's moments may have 8 bits, quantized in blocks that share one fp32 scale (Dettmers et al. 2021, arXiv 2110.02861).
A moment is then stored as two tensors: codes (uint8, the shape of the weight) and scales (fp32, the largest absolute
value of each block of the flattened weight). A code is the index of a value in the sorted map, minus the index of zero,
modulo 256, so that zeroed memory is a moment of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import Argument, constants, structs

BLOCK = constants()["MOMENT_GROUP"]  # values per scale
DECADES = constants()["MOMENT_DECADES"]  # decades of magnitudes below the scale


def use_native(*tensors: torch.Tensor | None) -> bool:
    """Returns whether the kernels are loaded and can read the tensors."""
    given = [tensor for tensor in tensors if tensor is not None]
    return library.takes(*given) and all(tensor.is_contiguous() for tensor in given)


def add_product(total: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Adds `product`, of the same or a narrower dtype, to `total` in place; returns `total`."""
    if total.dtype == torch.float32 and product.dtype == torch.bfloat16 and use_native(total, product):
        require_size(total.numel(), product)
        library.call("accumulate", total, product, total.numel())
        return total
    return total.add_(product)


def global_norm(gradients: list[torch.Tensor]) -> float:
    """Returns the 2-norm of all gradients concatenated."""
    if use_native(*gradients):
        squares = torch.empty(len(gradients), dtype=torch.float64)
        pointers, sizes = tuple(g.data_ptr() for g in gradients), tuple(g.numel() for g in gradients)
        narrow = tuple(int(g.dtype == torch.bfloat16) for g in gradients)
        library.call("squared_norms", len(gradients), pointers, sizes, narrow, squares)
        return math.sqrt(math.fsum(squares.tolist()))
    norms = [float(torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))) for g in gradients]
    return math.hypot(*norms)


def require_size(size: int, *tensors: torch.Tensor | None) -> None:
    """Raises RuntimeError if a tensor has a different size, because a kernel would read or write out of bounds."""
    if any(tensor is not None and tensor.numel() != size for tensor in tensors):
        raise RuntimeError(f"an optimizer update expects all tensors to have the same number of elements, {size}.")


@dataclass(frozen=True)
class WeightUpdate:
    """A weight and the tensors that its update reads or changes.

    `working`, a copy of the weight in the compute dtype, is updated too. A bf16 weight has no such copy and is rounded
    stochastically with `seed` (63 bits), which must change every step.
    """

    weight: torch.Tensor
    moments: Sequence[torch.Tensor]
    gradient: torch.Tensor
    working: torch.Tensor | None = None
    weight_decay: float = 0.0
    seed: int = 0

    def as_struct(self) -> Any:
        """Returns the struct WeightUpdate of native.h."""
        return structs()["WeightUpdate"](
            weight=self.weight.data_ptr(),
            grad=self.gradient.data_ptr(),
            working=None if self.working is None else self.working.data_ptr(),
            moments=tuple(moment.data_ptr() for moment in self.moments),
            size=self.weight.numel(),
            narrow_weight=self.weight.dtype == torch.bfloat16,
            narrow_grad=self.gradient.dtype == torch.bfloat16,
            seed=self.seed,
        )


@dataclass(frozen=True)
class AdamWStep:
    """The settings of a step of AdamW that all weights share."""

    lr: float
    betas: tuple[float, float]
    eps: float
    number: int  # counts from 1
    scale: float = 1.0  # factor of all gradients, which clips them

    def run(self, kernel: str, updates: list[WeightUpdate], *maps: torch.Tensor) -> None:
        """Calls the kernel `adamw` or `adamw8` once for all weights, so that small weights keep all threads busy."""
        settings = (self.lr, *self.betas, self.eps, self.number, self.scale)
        call_update(kernel, updates, decays_of(updates), *maps, *settings)


def call_update(kernel: str, updates: Sequence[WeightUpdate], *arguments: Argument) -> None:
    """Calls a kernel of native/update.cpp for weights."""
    if updates:
        library.call(kernel, len(updates), tuple(update.as_struct() for update in updates), *arguments)


def decays_of(updates: Sequence[WeightUpdate]) -> torch.Tensor:
    return torch.tensor([update.weight_decay for update in updates], dtype=torch.float64)


def split(
    updates: Sequence[WeightUpdate], wide: Callable[[WeightUpdate], Sequence[torch.Tensor]]
) -> tuple[list[WeightUpdate], list[WeightUpdate]]:
    """Splits updates into those that a kernel supports, whose tensors `wide(update)` are fp32, and those for torch."""
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
    native_ones, others = split(updates, lambda update: update.moments)
    step.run("adamw", native_ones)
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
    """Updates the momentum of weights with their gradients times `scale`, and computes the direction of the update.

    A weight has two moments, fp32 or wider: its momentum, and a tensor that receives the direction, which is Nesterov's
    look-ahead momentum.
    """
    native_ones, others = split(updates, lambda update: update.moments)
    call_update("nesterov", native_ones, beta, scale)
    for update in others:
        momentum, direction = update.moments
        gradient = update.gradient.to(momentum.dtype) * scale
        momentum.lerp_(gradient, 1 - beta)
        direction.copy_(gradient.lerp_(momentum, beta))


def descend(updates: Sequence[WeightUpdate], lr: float, scale: float) -> None:
    """Applies a step of gradient descent, with gradients times `scale` and decoupled weight decay.

    The weights are fp32 or wider.
    """
    native_ones, others = split(updates, lambda update: [update.weight])
    call_update("descend", native_ones, decays_of(native_ones), lr, scale)
    for update in others:
        update.weight.mul_(1 - lr * update.weight_decay).add_(update.gradient, alpha=-lr * scale)
        if update.working is not None:
            update.working.copy_(update.weight)


def dynamic_map(signed: bool) -> torch.Tensor:
    """Returns the 256 values of the dynamic tree map, sorted, fp32: 0, 1 and midpoints of equal cells in each decade.

    The lowest decade has 1 cell if signed, else 2; each higher one has twice as many. A signed map also has the
    negatives of the midpoints.
    """
    values = [0.0]
    for decade in range(DECADES):
        cells = (1 if signed else 2) << decade
        values += [10.0 ** (decade + 1 - DECADES) * (0.1 + 0.9 * (cell + 0.5) / cells) for cell in range(cells)]
    return torch.tensor(([-value for value in reversed(values[1:])] if signed else []) + [*values, 1.0])


MAPS = {signed: dynamic_map(signed) for signed in (False, True)}
ZEROS = {signed: int((values < 0).sum()) for signed, values in MAPS.items()}  # index of 0 in each map
VALUES = {signed: values.roll(-ZEROS[signed]) for signed, values in MAPS.items()}  # indexed by code


def quantized_zeros(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (codes, scales) of an all-zero moment, signed or unsigned, with the shape and device of `like`."""
    codes = torch.zeros(like.shape, dtype=torch.uint8, device=like.device)
    return codes, torch.zeros(-(-like.numel() // BLOCK), device=like.device)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Returns fp32 values in the shape of `codes`."""
    values = VALUES[signed].to(codes.device)[codes.flatten().int()]
    return (values * scales.repeat_interleave(BLOCK)[: codes.numel()]).view(codes.shape)


def quantize(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds `values` to the nearest codes; returns (codes, scales). A NaN or infinity invalidates its whole block.

    Unsigned values must be >= 0. A positive unsigned value never gets the code of 0: a second moment rounded to 0 would
    make the step many times the learning rate, while one that is too large only makes the step smaller.
    """
    flat = values.flatten().float()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    scales = torch.where(
        scales < torch.finfo(torch.float32).tiny, 0, scales
    )  # the inverse of a subnormal scale would overflow
    relative = blocks / torch.where(scales == 0, torch.inf, scales)[:, None]
    sorted_values = MAPS[signed].to(values.device)
    codes = torch.bucketize(relative, (sorted_values[1:] + sorted_values[:-1]) / 2) - ZEROS[signed]
    if not signed:
        codes = codes.maximum((relative > 0).long())
    return (codes & 255).to(torch.uint8).view(-1)[: len(flat)].view(values.shape), scales


def adamw8(updates: Sequence[WeightUpdate], step: AdamWStep) -> None:
    """Runs `adamw` with quantized moments: codes and scales of the first (signed) and second (unsigned) one."""
    native_ones = []
    for update in updates:
        first_codes, first_scales, second_codes, second_scales = moments = update.moments
        if use_native(update.weight, update.gradient, update.working) and all(m.is_contiguous() for m in moments):
            size = update.weight.numel()
            require_size(size, first_codes, second_codes, update.gradient, update.working)
            require_size(-(-size // BLOCK), first_scales, second_scales)
            native_ones.append(update)
            continue
        first, second = dequantize(first_codes, first_scales, True), dequantize(second_codes, second_scales, False)
        adamw_in_torch(replace(update, moments=(first, second)), step)
        for moment, new in zip(moments, (*quantize(first, True), *quantize(second, False)), strict=True):
            moment.copy_(new)
    if native_ones:
        step.run("adamw8", native_ones, VALUES[True], VALUES[False])
