"""How far apart the nodes of a leafy chain graph lie, and what attention makes of it.

The graph is a chain of roots, each with a chain of leaves (GraphMERT, arXiv 2510.09580). Its edges: each root and the
next, a root and its leaves, a leaf and the next of its root. A node is (root, 0), or (root, 1 + slot) if it is a leaf.
B batch, T and S nodes, H heads, M distances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

EVERY = slice(None)


def node_distances(nodes: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
    """Edges of the shortest way from each of the nodes to each of the others (without these: of the nodes).

    nodes (B, T, 2), others (B, S, 2), of integers; returns (B, T, S) int64. Ways may lead over nodes not given.
    """
    root, slot = nodes.long()[:, :, None].unbind(-1)
    other_root, other_slot = (nodes if others is None else others).long()[:, None].unbind(-1)
    leaves = (slot > 0).long() + (other_slot > 0).long()
    siblings = (root == other_root) & (leaves == 2)
    return torch.where(siblings, (slot - other_slot).abs().clamp(max=2), (root - other_root).abs() + leaves)


@dataclass(frozen=True)
class Decay:
    """Attention's score q.k / sqrt(d) of head h is multiplied with table[h, distance], or increased by it if `added`.

    The distance is that of query and key, which are the same nodes.
    """

    nodes: torch.Tensor  # (B, T, 2) int32
    table: torch.Tensor  # (H, M) fp32, may need gradients
    added: bool = False

    def entries(
        self, visible: torch.Tensor, queries: slice = EVERY, keys: slice = EVERY
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Distances (B, T, S) and their entries of each head (B, H, T, S), of any value where not `visible`.

        visible (B, 1, T, S) bool, of these queries and keys.
        """
        distances = node_distances(self.nodes[:, queries], self.nodes[:, keys]).masked_fill(~visible[:, 0], 0)
        return distances, self.table[:, distances].transpose(0, 1)

    def decayed(self, scores: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """Scores after the decay, both (B, H, T, S)."""
        return scores + entries if self.added else scores * entries

    def gradient(
        self,
        grad: torch.Tensor,
        scores: torch.Tensor,
        distances: torch.Tensor,
        entries: torch.Tensor,
        table_grad: torch.Tensor,
    ) -> torch.Tensor:
        """From decayed scores' gradient to scores' (B, H, T, S); adds the table's to `table_grad` (H, M)."""
        of_entries = grad if self.added else grad * scores
        places = distances.flatten().expand(len(table_grad), -1)
        table_grad.scatter_add_(1, places, of_entries.transpose(0, 1).flatten(1))
        return grad if self.added else grad * entries
