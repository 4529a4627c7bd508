"""AdamW with 8-bit moments, quantized in blocks that share one fp32 scale (Dettmers et al. 2021, arXiv 2110.02861).

A moment is stored as two tensors: codes (uint8, the shape of the weight) and scales (fp32, the largest absolute value
of each block of the flattened weight). A code is the index of a value in the sorted map, minus the index of zero,
modulo 256, so that zeroed memory is a moment of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional as F

from sansgpu.kernels.update import AdamWStep, WeightUpdate, adamw_in_torch, require_size, use_native

BLOCK = 256  # values per scale; must equal GROUP in native/update.cpp
DECADES = 7  # decades of magnitudes below the scale


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
    """Rounds fp32 `values` to the nearest codes; returns (codes, scales). A NaN or infinity makes its block invalid.

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
    """Runs `update.adamw` with quantized moments: codes and scales of the first (signed) and second (unsigned) one."""
    together = []
    for update in updates:
        first_codes, first_scales, second_codes, second_scales = moments = update.moments
        if use_native(update.weight, update.gradient, update.working) and all(m.is_contiguous() for m in moments):
            size = update.weight.numel()
            require_size(size, first_codes, second_codes, update.gradient, update.working)
            require_size(-(-size // BLOCK), first_scales, second_scales)
            together.append(update)
            continue
        first, second = dequantize(first_codes, first_scales, True), dequantize(second_codes, second_scales, False)
        adamw_in_torch(replace(update, moments=(first, second)), step)
        for moment, new in zip(moments, (*quantize(first, True), *quantize(second, False)), strict=True):
            moment.copy_(new)
    if together:
        step.run("adamw8", together, VALUES[True], VALUES[False])
