"""The encoder of leafy chain graphs (GraphMERT, arXiv 2510.09580), and of plain text as BERT is one.

Graphs stand one behind the other in a row and do not see each other; leaf slots that are empty are not there, so
nothing is padded. N nodes in all, D width, H heads, d head dim, V vocabulary, M triples.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sansgpu.config import ModelConfig
from sansgpu.kernels.attention import Decay, attention, bidirectional_ranges
from sansgpu.kernels.dropout import dropout
from sansgpu.kernels.embedding import embed
from sansgpu.kernels.linear import Linear
from sansgpu.machine.compilation import expect_shapes
from sansgpu.models.entities import EntityTable
from sansgpu.models.modules import Table, without_values
from sansgpu.models.relations import RelationFusion

INIT_STD, NORM_EPS = 0.02, 1e-5
LONGEST_WAVE = 10_000.0  # of sinusoidal positions (arXiv 1706.03762)


def activation_of(config: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """ReLU, or GELU as published: not by tanh."""
    return F.relu if config.activation == "relu" else F.gelu


class SelfAttention(nn.Module):
    """Multi-head attention among the nodes of a graph, with biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.n_heads, config.attention_dropout
        self.q, self.k, self.v, self.o = (Linear(config.d_model, config.d_model) for _ in range(4))

    def forward(
        self,
        x: torch.Tensor,
        ranges: torch.Tensor,
        nodes: torch.Tensor,
        table: torch.Tensor | None,
        added: bool,
    ) -> torch.Tensor:
        """(1, N, D) -> (1, N, D)."""
        batch, time, width = x.shape
        q, k, v = (
            layer(x).view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        decay = None if table is None else Decay(nodes, table, added)
        y = attention(q, k, v, ranges, self.dropout if self.training else 0.0, decay)
        out: torch.Tensor = self.o(y.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """One post-norm transformer block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.up, self.down = Linear(config.d_model, config.d_ff), Linear(config.d_ff, config.d_model)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, eps=NORM_EPS)
        self.activation = activation_of(config)
        self.dropout = config.dropout

    def forward(
        self, x: torch.Tensor, ranges: torch.Tensor, nodes: torch.Tensor, table: torch.Tensor | None, added: bool
    ) -> torch.Tensor:
        """(1, N, D) -> (1, N, D)."""
        y = self.attention(x, ranges, nodes, table, added)
        x = self.attention_norm(x + dropout(y, self.dropout, self.training))
        y = self.down(self.activation(self.up(x)))
        normed: torch.Tensor = self.feed_forward_norm(x + dropout(y, self.dropout, self.training))
        return normed


class SpanBoundary(nn.Module):
    """What stands in a masked span, told from the nodes around it (SpanBERT, arXiv 1907.10529)."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.offset = Table(longest, width)
        self.first, self.second = Linear(3 * width, width), Linear(width, width)
        self.first_norm, self.second_norm = (nn.LayerNorm(width, eps=NORM_EPS) for _ in range(2))

    def forward(self, before: torch.Tensor, behind: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """States (M, D) of both neighbours of each masked token and its place in the span -> (M, D)."""
        x = torch.cat((before, behind, embed(offsets[None], self.offset.weight)[0]), dim=-1)
        x = self.first_norm(F.gelu(self.first(x)))
        out: torch.Tensor = self.second_norm(F.gelu(self.second(x)))
        return out


class GraphEncoder(nn.Module):
    """`hidden` gives the states of nodes, `predicted` what the output head, tied to the embedding, is applied to.

    `longest_span` makes the head of the span-boundary objective. With `seed` None no weight has a value yet (meta
    device): to be counted, or to be loaded with `assign=True`.
    """

    def __init__(self, config: ModelConfig, seed: int | None = 0, longest_span: int | None = None) -> None:
        super().__init__()
        if config.vocab_size is None or (config.n_relations is None and config.leaf_slots):
            raise ValueError("model.vocab_size and model.n_relations must be set; they are the data's")
        self.config, self.activation = config, activation_of(config)
        self.before_block: Callable[[], None] = lambda: None  # called on the way of a training pass, and may raise
        width = config.d_model
        fused = config.leaf_slots > 0 and config.fusion == "hgat"
        with torch.device("meta"):  # weights are drawn below, from a generator of their own
            self.embedding = Table(config.vocab_size, width)
            self.position = Table(config.max_seq_len, width) if config.position == "learned" else None
            slots = config.leaf_slots + 1 if config.leaf_slots and config.slot_embedding else 0
            self.slot = Table(slots, width) if slots else None  # row 0 is of roots
            relations = config.n_relations or 0
            self.fusion = RelationFusion(config, relations) if fused else None
            entities = config.n_entities or 0
            self.entities = EntityTable(entities, relations, config.entity_rank, width) if entities else None
            self.embedding_norm = nn.LayerNorm(width, eps=NORM_EPS) if config.embedding_norm else None
            self.decay_center = nn.Parameter(torch.ones(config.n_heads)) if config.decay != "none" else None
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
            self.transform = Linear(width, width)
            self.transform_norm = nn.LayerNorm(width, eps=NORM_EPS)
            self.boundary = SpanBoundary(width, longest_span) if longest_span else None
        if seed is not None:
            without_values(self)
            self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """N(0, 0.02), zero biases; attention's projections by Glorot and Bengio (2010), those of q, k and v scaled by
        1 / sqrt(2).
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0 if name.endswith("norm.weight") or name == "decay_center" else 0.0)
            elif name.startswith("blocks.") and ".attention." in name:
                gain = 1.0 if ".o." in name else 2**-0.5
                limit = gain * math.sqrt(6 / sum(parameter.shape))
                parameter.uniform_(-limit, limit, generator=generator)
            else:
                parameter.normal_(0.0, INIT_STD, generator=generator)
            if name.startswith("fusion."):
                parameter[0] = 0.0  # no relation
        if self.entities is not None:
            self.entities.initialise(INIT_STD, generator)

    def compile_blocks(self, on: bool = True) -> None:
        """torch.compile block by block, one graph for all, for any number of nodes."""
        if on:
            expect_shapes()
        for block in self.blocks:
            if on:
                block.compile(dynamic=True)
            else:
                block._compiled_call_impl = None

    def hidden(
        self,
        tokens: torch.Tensor,
        nodes: torch.Tensor,
        lengths: torch.Tensor,
        triples: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States of all nodes, (N, D).

        tokens (N,); nodes (N, 2) int32: each node's root, and 0 of a root or 1 + slot of a leaf; lengths (B,) nodes of
        each graph; triples (M, 6 or more): relation, the head's first node and its tokens, the tail's first node and
        its tokens, the head's number in the entity table or 0.
        """
        x = embed(tokens[None], self.embedding.weight)[0]
        if triples is not None and self.entities is not None:
            x = x.index_add(0, triples[:, 1], self.entities.own_vectors(triples[:, 5]).to(x.dtype))
        if triples is not None and self.fusion is not None:
            x = self.fusion(x, triples[:, :5])
        x = self._with_positions(x, nodes)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = dropout(x, self.config.dropout, self.training)[None]
        graphs = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        ranges, table = bidirectional_ranges(graphs[None]), self.decay_table()
        given = (ranges, nodes[None], table, self.config.decay == "additive_log")
        for block in self.blocks:
            if self.training:
                self.before_block()
            if self.config.gradient_checkpointing and self.training:
                x = checkpoint(block, x, *given, use_reentrant=False)
            else:
                x = block(x, *given)
        states: torch.Tensor = x[0]
        return states

    def predicted(self, states: torch.Tensor) -> torch.Tensor:
        """(M, D) -> (M, D): logits are these times the embedding."""
        out: torch.Tensor = self.transform_norm(self.activation(self.transform(states)))
        return out

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """(M, D) -> (M, V)."""
        return F.linear(self.predicted(states), self.embedding.weight)

    def decay_table(self) -> torch.Tensor | None:
        """What each head does with a score at each distance d, (H, distances) fp32.

        lambda ** GELU(sqrt(d + 1) - p), which multiplies scores; or its logarithm, which is added to them.
        """
        if self.decay_center is None:
            return None
        with torch.autocast(self.decay_center.device.type, enabled=False):
            distances = torch.arange(self.config.max_seq_len + 2, device=self.decay_center.device)
            exponent = F.gelu((distances + 1.0).sqrt()[None] - self.decay_center[:, None])
            logarithm = exponent * math.log(self.config.decay_base)
            return logarithm if self.config.decay == "additive_log" else logarithm.exp()

    def _with_positions(self, x: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """A leaf has its root's position, and where slots are told apart one of its own beside it."""
        places = nodes[:, 0].long()
        if self.slot is not None:
            x = x + embed(nodes[None, :, 1].long(), self.slot.weight)[0]
        if self.position is not None:
            return x + embed(places[None], self.position.weight)[0]
        if self.config.position == "none":
            return x
        half = torch.arange(0, self.config.d_model, 2, device=x.device)
        angles = places[:, None] * LONGEST_WAVE ** (-half / self.config.d_model)
        return x + torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, : self.config.d_model]

    @property
    def parameter_count(self) -> int:
        """Parameters, a tied one counted once."""
        return sum(p.numel() for p in self.parameters())
