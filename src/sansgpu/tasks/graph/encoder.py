"""A transformer encoder for leafy chain graphs (GraphMERT, arXiv 2510.09580) and, like BERT, for plain text.

The graphs of a batch are concatenated into one row and do not attend to each other. Empty leaf slots do not exist as
nodes, so there is no padding. N nodes in total, D width, H heads, d head dim, V vocabulary, M triples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sansgpu.kernels.attention import Decay, attention, bidirectional_ranges
from sansgpu.kernels.embedding import embed
from sansgpu.kernels.feed_forward import feed_forward
from sansgpu.kernels.linear import Linear, linear_each
from sansgpu.kernels.norm import LayerNorm
from sansgpu.kernels.pointwise import Activation, activate, dropout, gelu
from sansgpu.models.modules import INIT_STD, Table, materialize_empty
from sansgpu.tasks.graph.entities import NORM_EPS, EntityTable
from sansgpu.tasks.graph.settings import GraphModelConfig

SLOPE = 0.01  # negative slope of LeakyReLU


class RelationFusion(nn.Module):
    """Graph attention from head tokens x_j to tail tokens t_i of a triple with relation r:

        e_ij = LeakyReLU(a_r . [W_r t_i || W_r x_j]),   t_i += sum_j softmax_j(e_ij) W_r x_j

    Relations are numbered from 1. Row 0 of each table stands for "no relation" and stays zero.
    """

    def __init__(self, config: GraphModelConfig, relations: int) -> None:
        super().__init__()
        width, rank = config.d_model, config.relation_rank
        self.width, self.rank, self.dropout = width, rank, config.relation_dropout
        self.matrix = Table(relations + 1, width * (rank or width))  # W_r, or V_r of W_r = U_r V_r
        self.outer = Table(relations + 1, width * rank) if rank else None  # U_r
        self.attention = Table(relations + 1, 2 * width)  # a_r

    def forward(self, x: torch.Tensor, triples: torch.Tensor) -> torch.Tensor:
        """Fuses heads into tails: embeddings (N, D) -> (N, D).

        triples (M, 5): relation, first node and token count of the head, first node and token count of the tail.
        """
        if not len(triples):
            return x
        triples = triples[triples[:, 0].argsort(stable=True)]  # grouped by relation
        relation, head, head_lengths, tail, tail_lengths = triples.unbind(1)
        present, counts = relation.unique_consecutive(return_counts=True)
        head_nodes, head_mask = _padded(head, head_lengths)
        tail_nodes, tail_mask = _padded(tail, tail_lengths)
        by_relation = counts.tolist()
        projected, head_scores, tail_scores = [], [], []
        for head_tokens, tail_tokens, matrices, a_tail, a_head in zip(
            embed(head_nodes, x).split(by_relation),  # `embed` sums gradients in the same order for any thread count
            embed(tail_nodes, x).split(by_relation),
            zip(*(table.unbind(0) for table in self._matrices(present)), strict=True),
            *(vectors.unbind(0) for vectors in self._lookup(self.attention, present).chunk(2, dim=1)),
            strict=True,
        ):
            values = _project(head_tokens, matrices)  # W_r x_j
            projected.append(values)
            head_scores.append(values @ a_head.to(values.dtype))
            tail_scores.append(_project(tail_tokens, matrices) @ a_tail.to(values.dtype))
        scores = torch.cat(tail_scores)[:, :, None] + torch.cat(head_scores)[:, None, :]  # (M, t, h)
        scores = F.leaky_relu(scores.float(), SLOPE).masked_fill(~head_mask[:, None, :], float("-inf"))
        values = torch.cat(projected)
        mixed = torch.softmax(scores, dim=-1).to(values.dtype) @ values  # (M, t, D)
        return x.index_add(0, tail_nodes[tail_mask], mixed[tail_mask].to(x.dtype))

    def _matrices(self, present: torch.Tensor) -> list[torch.Tensor]:
        """Returns the factors of W_r in the order of multiplication, each (P, outputs, inputs)."""
        if self.outer is None or self.rank is None:
            tables = [(self.matrix, self.width, self.width)]
        else:
            tables = [(self.matrix, self.rank, self.width), (self.outer, self.width, self.rank)]
        return [self._lookup(table, present).view(-1, outs, ins) for table, outs, ins in tables]

    def _lookup(self, table: nn.Embedding, present: torch.Tensor) -> torch.Tensor:
        """Looks up rows and applies dropout, once per relation, because a matrix per triple would need much memory."""
        return dropout(table.weight[present], self.dropout, self.training)


def _project(rows: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    for matrix in matrices:
        rows = F.linear(rows, matrix)
    return rows


def _padded(first: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the nodes of each span, padded to (M, longest), and a mask that is False for padding."""
    steps = torch.arange(int(lengths.max()), device=first.device)
    mask = steps < lengths[:, None]
    return first[:, None] + torch.where(mask, steps, 0), mask


MAX_PERIOD = 10_000.0  # base of sinusoidal positions (arXiv 1706.03762)


def activation_of(config: GraphModelConfig) -> Activation:
    """Returns the configured activation: ReLU, or GELU without the tanh approximation."""
    return Activation.RELU if config.activation == "relu" else Activation.GELU


class SelfAttention(nn.Module):
    """Multi-head self-attention within graphs. Its linear layers have biases."""

    def __init__(self, config: GraphModelConfig) -> None:
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
            y.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for y in linear_each(x, self.q, self.k, self.v)
        )
        decay = None if table is None else Decay(nodes, table, added)
        y = attention(q, k, v, ranges, self.dropout if self.training else 0.0, decay)
        out: torch.Tensor = self.o(y.transpose(1, 2).reshape(batch, time, width))
        return out


class EncoderBlock(nn.Module):
    """One post-norm transformer block."""

    def __init__(self, config: GraphModelConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = LayerNorm(config.d_model, eps=NORM_EPS)
        self.up, self.down = Linear(config.d_model, config.d_ff), Linear(config.d_ff, config.d_model)
        self.feed_forward_norm = LayerNorm(config.d_model, eps=NORM_EPS)
        self.activation, self.dropout = activation_of(config), config.dropout

    def forward(
        self, x: torch.Tensor, ranges: torch.Tensor, nodes: torch.Tensor, table: torch.Tensor | None, added: bool
    ) -> torch.Tensor:
        """(1, N, D) -> (1, N, D)."""
        y = self.attention(x, ranges, nodes, table, added)
        x = self.attention_norm.after(x, y, self.dropout)
        y = feed_forward(x, self.activation, self.up, self.down)
        return self.feed_forward_norm.after(x, y, self.dropout)


class SpanBoundary(nn.Module):
    """Predicts the tokens of a masked span from the states at its boundary (SpanBERT, arXiv 1907.10529)."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.offset = Table(longest, width)
        self.first, self.second = Linear(3 * width, width), Linear(width, width)
        self.first_norm, self.second_norm = (LayerNorm(width, eps=NORM_EPS) for _ in range(2))

    def forward(self, before: torch.Tensor, after: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Combines the states before and after each masked token's span, both (M, D), and its offset (M,): (M, D)."""
        x = torch.cat((before, after, embed(offsets[None], self.offset.weight)[0]), dim=-1)
        x = self.first_norm(gelu(self.first(x)))
        out: torch.Tensor = self.second_norm(gelu(self.second(x)))
        return out


class GraphEncoder(nn.Module):
    """The graph encoder: `hidden` returns node states, `logits` applies the output head, tied to the embedding.

    `longest_span` adds the head of the span boundary objective. If `seed` is None, the weights are on the meta device,
    to count them or to load them with `assign=True`.
    """

    def __init__(self, config: GraphModelConfig, seed: int | None = 0, longest_span: int | None = None) -> None:
        super().__init__()
        if config.vocab_size is None or (config.n_relations is None and config.leaf_slots):
            raise ValueError("model.vocab_size and model.n_relations must be set to the sizes of the dataset")
        self.config, self.activation = config, activation_of(config)
        self.before_block: Callable[[], None] = lambda: None  # called before each block in training; may raise
        width = config.d_model
        fused = config.leaf_slots > 0 and config.fusion == "hgat"
        with torch.device("meta"):  # weights are drawn below, from a separate generator
            self.embedding = Table(config.vocab_size, width)
            self.position = Table(config.max_seq_len, width) if config.position_embedding == "learned" else None
            slots = config.leaf_slots + 1 if config.leaf_slots and config.slot_embedding else 0
            self.slot = Table(slots, width) if slots else None  # row 0 is for roots
            relations = config.n_relations or 0
            self.fusion = RelationFusion(config, relations) if fused else None
            entities = config.n_entities or 0
            self.entities = EntityTable(entities, relations, config.entity_rank, width) if entities else None
            self.embedding_norm = LayerNorm(width, eps=NORM_EPS) if config.embedding_norm else None
            self.decay_center = nn.Parameter(torch.ones(config.n_heads)) if config.decay != "none" else None
            self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.n_layers))
            self.transform = Linear(width, width)
            self.transform_norm = LayerNorm(width, eps=NORM_EPS)
            self.boundary = SpanBoundary(width, longest_span) if longest_span else None
        if seed is not None:
            materialize_empty(self)
            self._initialize(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        """Draws N(0, INIT_STD); attention follows Glorot and Bengio (2010), with q, k and v scaled by 1 / sqrt(2)."""
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
                parameter[0] = 0.0  # row 0 stands for "no relation"
        if self.entities is not None:
            self.entities.initialize(INIT_STD, generator)

    def hidden(
        self,
        tokens: torch.Tensor,
        nodes: torch.Tensor,
        lengths: torch.Tensor,
        triples: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the states of all nodes, (N, D).

        tokens (N,); nodes (N, 2) int32: the root of each node, and 0 for a root or 1 + slot for a leaf; lengths (B,):
        nodes per graph; triples (M, 6 or more): relation, first node and token count of the head, first node and token
        count of the tail, row of the head in the entity table or 0.
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
        block_inputs = (ranges, nodes[None], table, self.config.decay == "additive_log")
        for block in self.blocks:
            if self.training:
                self.before_block()
            if self.config.gradient_checkpointing and self.training:
                x = checkpoint(block, x, *block_inputs, use_reentrant=False)
            else:
                x = block(x, *block_inputs)
        states: torch.Tensor = x[0]
        return states

    def predicted(self, states: torch.Tensor) -> torch.Tensor:
        """Applies the output transform: (M, D) -> (M, D). Its product with the embedding gives the logits."""
        out: torch.Tensor = self.transform_norm(activate(self.activation, self.transform(states)))
        return out

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns logits: (M, D) -> (M, V)."""
        return F.linear(self.predicted(states), self.embedding.weight)

    def decay_table(self) -> torch.Tensor | None:
        """Returns the decay of attention scores by head and distance d, (H, distances) fp32; None if it is off.

        The decay is lambda ** GELU(sqrt(d + 1) - p), by which scores are multiplied. If model.decay is "additive_log",
        its logarithm is added to them instead.
        """
        if self.decay_center is None:
            return None
        with torch.autocast(self.decay_center.device.type, enabled=False):
            distances = torch.arange(self.config.max_seq_len + 2, device=self.decay_center.device)
            exponent = F.gelu((distances + 1.0).sqrt()[None] - self.decay_center[:, None])
            logarithm = exponent * math.log(self.config.decay_base)
            return logarithm if self.config.decay == "additive_log" else logarithm.exp()

    def _with_positions(self, x: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """Adds position embeddings. A leaf has the position of its root, plus a slot embedding if enabled."""
        positions = nodes[:, 0].long()
        if self.slot is not None:
            x = x + embed(nodes[None, :, 1].long(), self.slot.weight)[0]
        if self.position is not None:
            return x + embed(positions[None], self.position.weight)[0]
        if self.config.position_embedding == "none":
            return x
        half = torch.arange(0, self.config.d_model, 2, device=x.device)
        angles = positions[:, None] * MAX_PERIOD ** (-half / self.config.d_model)
        return x + torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, : self.config.d_model]

    @property
    def parameter_count(self) -> int:
        """Returns the number of parameters; tied parameters count once."""
        return sum(p.numel() for p in self.parameters())
