"""The masks of packed rows, with which the attention and convolutions of transformers models stay inside examples.

B batch, T queries, S keys, H query heads, K key-value heads, d head dim, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sansgpu.kernels.attention import AttentionKernel
from sansgpu.kernels.linear import Linear, linear_each

_PACKED = "_sansgpu_packed_mask"  # attribute of a mask tensor that holds its PackedMask


class PackedMask(Protocol):
    """The interface of an attention mask for packed sequences, which computes the attention itself."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: AttentionKernel) -> torch.Tensor:
        """Computes attention of q (B, H, T, d) to k and v (B, K, S, d) with `kernel`; returns (B, H, T, d)."""


@dataclass(frozen=True)
class KeyRanges:
    """A mask in which each query attends to one contiguous range of keys; `ranges` (B, T, 2) are starts and ends."""

    ranges: torch.Tensor

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: AttentionKernel) -> torch.Tensor:
        return kernel(q, k, v, self.ranges)


@dataclass(frozen=True)
class TokenPositions:
    """The mask of convolutions: `positions` (B, T) of tokens in their examples, which may share a row."""

    positions: torch.Tensor


@dataclass(frozen=True)
class SequenceStarts:
    """The mask of recurrent layers: `starts` (S + 1,) int64, the first token of each sequence of a row, then N."""

    starts: torch.Tensor


def carry(tensor: torch.Tensor, mask: object) -> torch.Tensor:
    """Makes a tensor carry a mask of this module through transformers' code to every layer, and returns the tensor."""
    setattr(tensor, _PACKED, mask)
    return tensor


def packed_mask(tensor: torch.Tensor | None) -> PackedMask | None:
    """Returns the mask that a tensor carries; None if it carries none."""
    found: PackedMask | None = getattr(tensor, _PACKED, None)
    return found


def starts_in(mask: object) -> torch.Tensor | None:
    """Returns the starts that a mask of `stand_in_mask` carries; None for other masks."""
    packed = getattr(mask, _PACKED, None)
    return packed.starts if isinstance(packed, SequenceStarts) else None


def stand_in_mask(mask: object, device: torch.device) -> torch.Tensor:
    """Returns a tiny tensor that carries a mask of this module to every layer, so that no (B, 1, T, T) mask is built.

    It has four dimensions, because transformers passes such masks on unchanged.
    """
    stand_in = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    return carry(stand_in, mask)


def ranges_in(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the key ranges that a mask of `stand_in_mask` carries; None for other masks."""
    packed = packed_mask(mask)
    return packed.ranges if isinstance(packed, KeyRanges) else None


def projected_heads(x: torch.Tensor, head_dim: int, *layers: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Applies linear layers to x (B, T, D) in one call, and splits their outputs into heads, (B, H, T, d) for each."""
    plain = [layer for layer in layers if type(layer) is Linear]  # layers with an adapter have another class
    projected = linear_each(x, *plain) if len(plain) == len(layers) else tuple(layer(x) for layer in layers)
    return tuple(y.view(*x.shape[:-1], -1, head_dim).transpose(1, 2) for y in projected)
