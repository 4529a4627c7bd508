"""H-GAT fusion: the head of a triple mixed into the embeddings of its tail (GraphMERT, arXiv 2510.09580).

M triples, P relations that occur, N nodes, D width, h and t tokens of the longest head and tail.
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

SLOPE = 0.01  # of LeakyReLU below zero


class RelationFusion(nn.Module):
    """For a triple of relation r with head tokens x_j and tail tokens t_i

        e_ij = LeakyReLU(a_r . [W_r t_i || W_r x_j]),   t_i += sum_j softmax_j(e_ij) W_r x_j

    of all triples of a batch at once. Row 0 of each table stands for no relation and stays zero.
    """

    def __init__(self, config: ModelConfig, relations: int) -> None:
        super().__init__()
        width, rank = config.d_model, config.relation_rank
        self.width, self.rank, self.dropout = width, rank, config.relation_dropout
        self.matrix = Table(relations + 1, width * (rank or width))  # W_r, or V_r of W_r = U_r V_r
        self.outer = Table(relations + 1, width * rank) if rank else None  # U_r
        self.attention = Table(relations + 1, 2 * width)  # a_r

    def forward(self, x: torch.Tensor, triples: torch.Tensor) -> torch.Tensor:
        """Embeddings (N, D) and triples (M, 5): relation, the head's first node and tokens, the tail's; (N, D)."""
        if not len(triples):
            return x
        triples = triples[triples[:, 0].argsort(stable=True)]  # of one relation together
        relation, head, heads, tail, tails = triples.unbind(1)
        present, counts = relation.unique_consecutive(return_counts=True)
        head_nodes, head_mask = _padded(head, heads)
        tail_nodes, tail_mask = _padded(tail, tails)
        by_relation = counts.tolist()
        projected, head_scores, tail_scores = [], [], []
        for rows, ends, matrices, at_tail, at_head in zip(
            embed(head_nodes, x).split(by_relation),  # whose gradient is summed in one order, whatever the threads
            embed(tail_nodes, x).split(by_relation),
            zip(*(table.unbind(0) for table in self._matrices(present)), strict=True),
            *(vectors.unbind(0) for vectors in self._dropped(self.attention, present).chunk(2, dim=1)),
            strict=True,
        ):
            values = _through(rows, matrices)  # W_r x_j
            projected.append(values)
            head_scores.append(values @ at_head.to(values.dtype))
            tail_scores.append(_through(ends, matrices) @ at_tail.to(values.dtype))
        scores = torch.cat(tail_scores)[:, :, None] + torch.cat(head_scores)[:, None, :]  # (M, t, h)
        scores = F.leaky_relu(scores.float(), SLOPE).masked_fill(~head_mask[:, None, :], float("-inf"))
        values = torch.cat(projected)
        mixed = torch.softmax(scores, dim=-1).to(values.dtype) @ values  # (M, t, D)
        return x.index_add(0, tail_nodes[tail_mask], mixed[tail_mask].to(x.dtype))

    def _matrices(self, present: torch.Tensor) -> list[torch.Tensor]:
        """What rows are multiplied with, one after the other: each (P, outputs, inputs)."""
        if self.outer is None or self.rank is None:
            tables = [(self.matrix, self.width, self.width)]
        else:
            tables = [(self.matrix, self.rank, self.width), (self.outer, self.width, self.rank)]
        return [self._dropped(table, present).view(-1, outs, ins) for table, outs, ins in tables]

    def _dropped(self, table: nn.Embedding, present: torch.Tensor) -> torch.Tensor:
        """Rows with dropout, drawn once for all triples of a relation: one by one they would each hold a matrix."""
        return dropout(table.weight[present], self.dropout, self.training)


def _through(rows: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    for matrix in matrices:
        rows = F.linear(rows, matrix)
    return rows


def _padded(first: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes of each run, (M, longest), and which of them are the run's own."""
    steps = torch.arange(int(lengths.max()), device=first.device)
    mask = steps < lengths[:, None]
    return first[:, None] + torch.where(mask, steps, 0), mask
