"""Computes attention whose scores depend on the distance between tokens, as in MPNet and DeBERTa, in packed rows.

transformers' code would compute all pairs of tokens in a row, of which most belong to different examples. Ours computes
blocks of whole examples. It replaces an encoder only if a trial with a small encoder of the same class shows that both
compute the same.

T tokens in a row, t tokens in a block, H heads, d head dim, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from sansgpu.kernels.attention import bidirectional_ranges, token_places, visible_keys
from sansgpu.models.layer_trials import agree, random_tensor, with_forward
from sansgpu.models.packed_masks import KeyRanges, projected_heads, stand_in_mask

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
        for start, end in blocks_of_examples(ranges[0]):
            total = scores(q[0, :, start:end], k[0, :, start:end]).float()
            if int(ranges[0, start, 1]) < end:  # several examples
                total = total.masked_fill(~visible_keys(ranges[:, start:end] - start, end - start)[0], -torch.inf)
            weights = self.dropout(torch.softmax(total, dim=-1))
            outs.append(weights.to(v.dtype) @ v[0, :, start:end])
        return torch.cat(outs, dim=1).transpose(0, 1).flatten(1)[None]


def blocks_of_examples(ranges: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yields the first token and the end of each block of whole examples, whose tokens have key ranges (T, 2)."""
    start = end = 0
    for example_end in torch.unique_consecutive(ranges[:, 1]).tolist():
        if start < end and example_end - start > _BLOCK_TOKENS:
            yield start, end
            start = end
        end = example_end
    yield start, end


def by_pairs(x: torch.Tensor) -> torch.Tensor:
    """Shifts row i of x (..., t, 2 t - 1) to the left by t - 1 - i, and returns the first t columns: (..., t, t).

    Column c of x belongs to the distance c - (t - 1), and element (i, j) of the result to the distance j - i.
    """
    t = x.shape[-2]
    shifted = x.flatten(-2)[..., t - 1 : t - 1 + t * (2 * t - 2)]
    return shifted.unflatten(-1, (t, 2 * t - 2))[..., :t] if t > 1 else x


def near(distances: torch.Tensor, t: int) -> torch.Tensor:
    """Returns the elements for the distances 1 - t to t - 1 from the last dimension, which is for 1 - T to T - 1."""
    return distances.narrow(-1, distances.shape[-1] // 2 - (t - 1), 2 * t - 1)


@dataclass(frozen=True)
class RelativeAttention:
    """The mixins for encoders that have a certain method."""

    method: str
    encoder: type
    attention: type[RelativeSelfAttention]


def fuse_relative_attention(model: PreTrainedModel, kinds: Sequence[RelativeAttention]) -> None:
    """Makes an encoder with one of these kinds of attention take packed rows, in place."""
    for encoder in model.modules():
        for kind in kinds:
            if hasattr(encoder, kind.method) and _computes_the_same(encoder, model.config, kind):
                _fuse(encoder, kind)
                return


def has_relative_attention(model: nn.Module) -> bool:
    """Returns True if `fuse_relative_attention` has changed the model."""
    return any(isinstance(module, RelativeSelfAttention) for module in model.modules())


def _fuse(encoder: nn.Module, kind: RelativeAttention) -> None:
    for module in encoder.modules():
        if set(kind.attention.projections) <= set(module._modules):
            module.__class__ = with_forward(kind.attention, type(module))
    encoder.__class__ = with_forward(kind.encoder, type(encoder))


def _computes_the_same(encoder: nn.Module, config: Any, kind: RelativeAttention) -> bool:
    """Compares a packed row in a fused small encoder with single examples in transformers' code."""
    small, lengths = copy.deepcopy(config), torch.tensor(_TRIED_LENGTHS)
    trial: Any = None

    def separate() -> torch.Tensor:
        # The mask of ones is also right for MPNet, which adds it to all scores.
        return torch.cat([trial(x, torch.ones(1, 1, x.shape[1], x.shape[1]))[0] for x in examples], dim=1)

    def packed() -> torch.Tensor:
        _fuse(trial, kind)
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
    except Exception:  # another family whose encoder has a method of the same name
        return False
    return agree(packed, lambda: expected)
