"""H-GAT fusion: adds an attention-weighted sum of a triple's head to the embeddings of its tail (arXiv 2510.09580).

M triples, P distinct relations in the batch, N nodes, D width, h and t tokens of the longest head and tail.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.config import ModelConfig
from sansgpu.kernels.dropout import dropout
from sansgpu.kernels.embedding import embed
from sansgpu.models.modules import Table

SLOPE = 0.01  # negative slope of LeakyReLU


class RelationFusion(nn.Module):
    """Graph attention from head tokens x_j to tail tokens t_i of a triple with relation r:

        e_ij = LeakyReLU(a_r . [W_r t_i || W_r x_j]),   t_i += sum_j softmax_j(e_ij) W_r x_j

    Row 0 of each table means no relation and remains zero.
    """

    def __init__(self, config: ModelConfig, relations: int) -> None:
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
            embed(head_nodes, x).split(by_relation),  # `embed` sums gradients in a fixed order, for any thread count
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
        """Looks up rows with dropout. All triples of a relation share one mask, as a matrix per triple takes memory."""
        return dropout(table.weight[present], self.dropout, self.training)


def _project(rows: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    for matrix in matrices:
        rows = F.linear(rows, matrix)
    return rows


def _padded(first: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the nodes of each span, (M, longest), and a mask of those that are not padding."""
    steps = torch.arange(int(lengths.max()), device=first.device)
    mask = steps < lengths[:, None]
    return first[:, None] + torch.where(mask, steps, 0), mask
