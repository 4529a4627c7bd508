"""DeBERTa-v2 and -v3, which add scores between contents and distances.

T tokens in a row, t tokens in a block, H heads, d head dim, D width.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import nn

from sansgpu.models.family import TINY_MHA, Family
from sansgpu.models.packed_masks import ranges_in
from sansgpu.models.relative_attention import (
    RelativeAttention,
    RelativeSelfAttention,
    Scores,
    blocks_of_examples,
    by_pairs,
    near,
)


class DisentangledEncoder:
    """Mixin for the encoder of DeBERTa-v2 and -v3, which learns an embedding for each bucket of distances."""

    relative_attention: bool

    def get_rel_pos(
        self,
        hidden_states: torch.Tensor,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Returns the bucket of each distance from key to query, 1 - T to T - 1: (2 T - 1,)."""
        original = cast(Any, super()).get_rel_pos
        if not self.relative_attention or query_states is not None or relative_pos is not None:
            return cast(torch.Tensor | None, original(hidden_states, query_states, relative_pos))
        positive = original(hidden_states[:, :1], hidden_states).flatten()
        return torch.cat((-positive[1:].flip(0), positive))


class DisentangledSelfAttention(RelativeSelfAttention):
    """Mixin for the self-attention of DeBERTa-v2 and -v3, which adds scores between contents and distances."""

    projections = ("query_proj", "key_proj", "value_proj")
    num_attention_heads: int
    pos_att_type: list[str]
    pos_ebd_size: int
    share_att_key: bool
    pos_dropout: nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if (ranges := ranges_in(attention_mask)) is not None and rel_embeddings is not None:
            assert relative_pos is not None
            longest = max(end - start for start, end in blocks_of_examples(ranges[0]))
            return self.attend(hidden_states, ranges, self._scores(near(relative_pos, longest), rel_embeddings)), None
        if relative_pos is not None and relative_pos.ndim == 1:
            relative_pos = by_pairs(relative_pos.flip(0).expand(hidden_states.shape[1], -1))[None]
        original = cast(Any, super()).forward
        return cast(
            tuple[torch.Tensor, torch.Tensor | None],
            original(hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings),
        )

    def _scores(self, buckets: torch.Tensor, embeddings: torch.Tensor) -> Scores:
        """Returns the scores of a block, given the bucket of each distance (2 T - 1,) and the embedding of each bucket.

        T is now the number of tokens in the longest block.
        """
        rows = (buckets + self.pos_ebd_size).clamp(0, 2 * self.pos_ebd_size - 1)
        embeddings = self.pos_dropout(embeddings[: 2 * self.pos_ebd_size])
        names = ("key_proj", "query_proj") if self.share_att_key else ("pos_key_proj", "pos_query_proj")
        kinds = [kind in self.pos_att_type for kind in ("c2p", "p2c")]
        scale = 1 / math.sqrt((1 + sum(kinds)) * self.attention_head_size)
        # (H, d, 2 T - 1), for each distance from key to query; keys are in descending order of distances.
        keys_at, queries_at = (
            getattr(self, name)(embeddings)[places].unflatten(1, (self.num_attention_heads, -1)).permute(1, 2, 0)
            if has_kind
            else None
            for name, places, has_kind in zip(names, (rows.flip(0), rows), kinds, strict=True)
        )

        def scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            t, queries = queries.shape[1], queries * scale
            total = queries @ keys.transpose(-1, -2)
            if keys_at is not None:
                total = total + by_pairs(queries @ near(keys_at, t))
            if queries_at is not None:
                total = total + by_pairs((keys * scale) @ near(queries_at, t)).transpose(-1, -2)
            return total

        return scores


FAMILY = Family(
    title="DeBERTa-v2, -v3",
    model_type="deberta-v2",
    is_encoder=True,
    tiny={
        **TINY_MHA, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16,
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
    },
    relative_attention=RelativeAttention("get_rel_pos", DisentangledEncoder, DisentangledSelfAttention),
)  # fmt: skip
