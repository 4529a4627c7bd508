"""Entity embeddings of a knowledge graph, for link prediction.

E entities, D width, K rank of the learned entity vectors, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from sansgpu.kernels.embedding import embed
from sansgpu.kernels.linear import Linear
from sansgpu.kernels.norm import LayerNorm
from sansgpu.models.modules import Table

NORM_EPS = 1e-5


class EntityTable(nn.Module):
    """Entity embeddings: the mean token embedding of the entity's name, plus a learned vector.

    `own` has the learned vectors with K values, which are projected to D; row 0 is for unknown entities. `relation` has
    D / 2 complex numbers for each relation 1, 2, ..., by which `predict_tails` multiplies a head.
    """

    def __init__(self, entities: int, relations: int, rank: int, width: int) -> None:
        super().__init__()
        self.own, self.project = Table(entities + 1, rank), Linear(rank, width, bias=False)
        self.relation, self.tail_norm = Table(relations + 1, width), LayerNorm(width, eps=NORM_EPS)

    @torch.no_grad()
    def initialize(self, std: float, generator: torch.Generator) -> None:
        """Draws weights so that projected vectors have elements with standard deviation `std`."""
        self.own.weight.normal_(0.0, std, generator=generator)
        self.own.weight[0] = 0.0
        self.project.weight.normal_(0.0, self.own.embedding_dim**-0.5, generator=generator)
        self.relation.weight.normal_(0.0, 1.0, generator=generator)

    def predict_tails(self, heads: torch.Tensor, relations: torch.Tensor) -> torch.Tensor:
        """Predicts tail vectors (M, D) fp32 from head vectors (M, D) and relations (M,).

        The dot product of a tail vector and an entity vector is the score of ComplEx (arXiv 1606.06357), apart from the
        LayerNorm. It can memorize single triples, and triples of symmetric relations in both directions.
        """
        with torch.autocast(heads.device.type, enabled=False):
            real, imaginary = heads.float().chunk(2, dim=1)
            cosine, sine = embed(relations[None], self.relation.weight)[0].float().chunk(2, dim=1)
            turned = torch.cat((real * cosine - imaginary * sine, real * sine + imaginary * cosine), dim=1)
            tails: torch.Tensor = self.tail_norm(turned)
        return tails

    def own_vectors(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the learned vectors of entities (M,), without their names: (M, D)."""
        rows = embed(numbers[None], self.own.weight)[0]
        vectors: torch.Tensor = self.project(torch.where(numbers[:, None] > 0, rows, 0.0))
        return vectors

    def forward(self, names: NameBags, embedding: torch.Tensor) -> torch.Tensor:
        """Returns the vectors of entities 1 to E, (E, D) fp32, from their names and the token embedding (V, D)."""
        own: torch.Tensor = self.project(self.own.weight[1 : 1 + len(names)])  # the table may have more rows
        return own.float() + names.means(embedding)


class NameBags:
    """A sparse matrix (E, V) whose product with the token embedding gives the mean embedding of each of E names."""

    def __init__(self, names: Sequence[Sequence[int]], vocabulary: int, device: torch.device | None = None) -> None:
        rows = [row for row, tokens in enumerate(names) for _ in tokens]
        columns = [token for tokens in names for token in tokens]
        shares = torch.tensor([1 / len(tokens) for tokens in names for _ in tokens])
        self._matrix = _sparse(rows, columns, shares, (len(names), vocabulary), device)
        self._transposed = _sparse(columns, rows, shares, (vocabulary, len(names)), device)

    def __len__(self) -> int:
        return len(self._matrix)

    def means(self, embedding: torch.Tensor) -> torch.Tensor:
        """Returns the mean token embeddings: (V, D) -> (E, D) fp32, differentiable."""
        return cast(torch.Tensor, _SparseMatmul.apply(self._matrix, self._transposed, embedding))


def _sparse(
    rows: list[int], columns: list[int], values: torch.Tensor, shape: tuple[int, int], device: torch.device | None
) -> torch.Tensor:
    indices = torch.tensor([rows, columns], dtype=torch.int64).view(2, -1)
    return torch.sparse_coo_tensor(indices, values, shape, device=device, check_invariants=False).coalesce()


class _SparseMatmul(torch.autograd.Function):
    """Multiplies a constant sparse matrix with a dense one in fp32."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, transposed: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        ctx.transposed = transposed
        with torch.autocast(dense.device.type, enabled=False):
            return torch.mm(matrix, dense.float())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, torch.mm(ctx.transposed, grad_outputs[0].float().contiguous())
