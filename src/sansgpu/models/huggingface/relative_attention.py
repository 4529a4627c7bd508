"""Computes the attention of MPNet and DeBERTa in packed rows, whose scores depend on the distance between tokens.

transformers' code would compute all pairs of tokens in a row, of which most belong to different examples. Ours computes
blocks of whole examples. It replaces an encoder only if a trial with a small encoder of the same class shows that both
compute the same.

T tokens in a row, t tokens in a block, H heads, d head dim, D width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from sansgpu.kernels.attention import bidirectional_ranges, token_places, visible_keys
from sansgpu.models.huggingface.attention_interface import KeyRanges, projected_heads, ranges_in, stand_in_mask
from sansgpu.models.huggingface.fused_layers import agree, random_tensor, with_forward

if TYPE_CHECKING:  # transformers is slow to import
    from transformers import PreTrainedModel

_BLOCK_TOKENS = 64  # short examples are computed together, in blocks of up to this number of tokens
_TRIED_LENGTHS = (3, 5, 150)  # tokens of the examples in a trial: two in a block, and one with many distances

Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (queries, keys), both (H, t, d) -> (H, t, t)


class RelativeSelfAttention:
    """Mixin for self-attention whose scores depend on the distance between tokens."""

    projections: ClassVar[tuple[str, str, str]]
    attention_head_size: int
    dropout: nn.Dropout

    def attend(self, x: torch.Tensor, ranges: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Computes attention in a row of packed examples, without the output projection: (1, T, D) -> (1, T, D)."""
        q, k, v = projected_heads(x, self.attention_head_size, *(getattr(self, name) for name in self.projections))
        outs = []
        for start, end in _blocks(ranges[0]):
            total = scores(q[0, :, start:end], k[0, :, start:end]).float()
            if int(ranges[0, start, 1]) < end:  # several examples
                total = total.masked_fill(~visible_keys(ranges[:, start:end] - start, end - start)[0], -torch.inf)
            weights = self.dropout(torch.softmax(total, dim=-1))
            outs.append(weights.to(v.dtype) @ v[0, :, start:end])
        return torch.cat(outs, dim=1).transpose(0, 1).flatten(1)[None]


def _blocks(ranges: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yields the first token and the end of each block of whole examples, whose tokens have key ranges (T, 2)."""
    start = end = 0
    for example_end in torch.unique_consecutive(ranges[:, 1]).tolist():
        if start < end and example_end - start > _BLOCK_TOKENS:
            yield start, end
            start = end
        end = example_end
    yield start, end


def _by_pairs(x: torch.Tensor) -> torch.Tensor:
    """Shifts row i of x (..., t, 2 t - 1) to the left by t - 1 - i, and returns the first t columns: (..., t, t).

    Column c of x belongs to the distance c - (t - 1), and element (i, j) of the result to the distance j - i.
    """
    t = x.shape[-2]
    shifted = x.flatten(-2)[..., t - 1 : t - 1 + t * (2 * t - 2)]
    return shifted.unflatten(-1, (t, 2 * t - 2))[..., :t] if t > 1 else x


def _near(distances: torch.Tensor, t: int) -> torch.Tensor:
    """Returns the elements for the distances 1 - t to t - 1 from the last dimension, which is for 1 - T to T - 1."""
    return distances.narrow(-1, distances.shape[-1] // 2 - (t - 1), 2 * t - 1)


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
    return _by_pairs(_near(biases, t)[:, None].expand(-1, t, -1))


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
            longest = max(end - start for start, end in _blocks(ranges[0]))
            return self.attend(hidden_states, ranges, self._scores(_near(relative_pos, longest), rel_embeddings)), None
        if relative_pos is not None and relative_pos.ndim == 1:
            relative_pos = _by_pairs(relative_pos.flip(0).expand(hidden_states.shape[1], -1))[None]
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
        # Of each distance from key to query, (H, d, 2 T - 1); the keys in descending order of distances.
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
                total = total + _by_pairs(queries @ _near(keys_at, t))
            if queries_at is not None:
                total = total + _by_pairs((keys * scale) @ _near(queries_at, t)).transpose(-1, -2)
            return total

        return scores


@dataclass(frozen=True)
class _Family:
    """The mixins for encoders that have a certain method."""

    method: str
    encoder: type
    attention: type[RelativeSelfAttention]


_FAMILIES = (
    _Family("compute_position_bias", BiasedEncoder, BiasedSelfAttention),
    _Family("get_rel_pos", DisentangledEncoder, DisentangledSelfAttention),
)


def fuse_relative_attention(model: PreTrainedModel) -> bool:
    """Makes the encoder of MPNet or DeBERTa take packed rows, in place; returns True if the model has one."""
    for encoder in model.modules():
        for family in _FAMILIES:
            if hasattr(encoder, family.method) and _computes_the_same(encoder, model.config, family):
                _fuse(encoder, family)
                return True
    return False


def has_relative_attention(model: nn.Module) -> bool:
    """Returns True if `fuse_relative_attention` has changed the model."""
    return any(isinstance(module, RelativeSelfAttention) for module in model.modules())


def _fuse(encoder: nn.Module, family: _Family) -> None:
    for module in encoder.modules():
        if set(family.attention.projections) <= set(module._modules):
            module.__class__ = with_forward(family.attention, type(module))
    encoder.__class__ = with_forward(family.encoder, type(encoder))


def _computes_the_same(encoder: nn.Module, config: Any, family: _Family) -> bool:
    """Compares a packed row in a fused small encoder with single examples in transformers' code."""
    small, lengths = copy.deepcopy(config), torch.tensor(_TRIED_LENGTHS)
    trial: Any = None

    def separate() -> torch.Tensor:
        # The mask of ones is also right for MPNet, which adds it to all scores.
        return torch.cat([trial(x, torch.ones(1, 1, x.shape[1], x.shape[1]))[0] for x in examples], dim=1)

    def packed() -> torch.Tensor:
        _fuse(trial, family)
        ranges = bidirectional_ranges(token_places(lengths)[0][None])
        return cast(torch.Tensor, trial(torch.cat(examples, dim=1), stand_in_mask(KeyRanges(ranges), ranges.device))[0])

    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            small.hidden_size = 2 * (config.hidden_size // config.num_attention_heads)
            small.intermediate_size, small.num_attention_heads, small.num_hidden_layers = 8, 2, 1
            examples = random_tensor(1, int(lengths.sum()), small.hidden_size).split(_TRIED_LENGTHS, dim=1)
            trial = type(encoder)(small).eval()
            expected = separate()
    except Exception:  # a different family whose encoder has a method of the same name
        return False
    return agree(packed, lambda: expected)
