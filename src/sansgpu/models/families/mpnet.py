"""MPNet, which adds a bias for the distance and the head to each attention score.

T tokens in a row, t tokens in a block, H heads, d head dim, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from sansgpu.models.family import TINY_CONTEXT, TINY_MHA, Family
from sansgpu.models.packed_masks import ranges_in
from sansgpu.models.relative_attention import RelativeAttention, RelativeSelfAttention, by_pairs, near


class BiasedEncoder:
    """Mixin for the encoder of MPNet, which adds a bias for the distance and the head to each score."""

    relative_attention_bias: nn.Embedding
    relative_position_bucket: Callable[[torch.Tensor], torch.Tensor]

    def compute_position_bias(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the bias for each distance from query to key, 1 - T to T - 1: (H, 2 T - 1)."""
        distances = torch.arange(1 - x.shape[1], x.shape[1], device=x.device)
        return cast(torch.Tensor, self.relative_attention_bias(self.relative_position_bucket(distances)).T)


class BiasedSelfAttention(RelativeSelfAttention):
    """Mixin for the self-attention of MPNet."""

    projections = ("q", "k", "v")
    o: nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_bias: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        if (ranges := ranges_in(attention_mask)) is None:
            biases = _biases_of_pairs(position_bias, hidden_states.shape[1])[None]
            original = cast(Any, super()).forward
            return cast(tuple[torch.Tensor, ...], original(hidden_states, attention_mask, biases, **kwargs))

        def scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            products = queries / math.sqrt(self.attention_head_size) @ keys.transpose(-1, -2)
            return products + _biases_of_pairs(position_bias, queries.shape[1])

        return (self.o(self.attend(hidden_states, ranges, scores)),)


def _biases_of_pairs(biases: torch.Tensor, t: int) -> torch.Tensor:
    """Expands biases for distances, (H, 2 T - 1), to biases for pairs of t tokens: (H, t, t)."""
    return by_pairs(near(biases, t)[:, None].expand(-1, t, -1))


FAMILY = Family(
    title="MPNet",
    is_encoder=True,
    tiny={**TINY_MHA, "max_position_embeddings": TINY_CONTEXT + 2, "pad_token_id": 1},
    relative_attention=RelativeAttention("compute_position_bias", BiasedEncoder, BiasedSelfAttention),
)
