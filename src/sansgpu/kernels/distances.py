"""Distances between nodes of a leafy chain graph, and attention scores that decay with them.

The graph is a chain of roots, each with a chain of leaves (GraphMERT, arXiv 2510.09580). Edges connect consecutive
roots, each root with its leaves, and consecutive leaves of a root. A root is the pair (root, 0) and a leaf the pair
(root, 1 + slot). B batch, T and S nodes, H heads, M distances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALL = slice(None)


def node_distances(nodes: torch.Tensor, others: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the length in edges of the shortest path between each node and each of `others` (default: `nodes`).

    nodes (B, T, 2), others (B, S, 2), integers; returns (B, T, S) int64. Paths may pass through nodes not listed.
    """
    root, slot = nodes.long()[:, :, None].unbind(-1)
    other_root, other_slot = (nodes if others is None else others).long()[:, None].unbind(-1)
    leaves = (slot > 0).long() + (other_slot > 0).long()
    siblings = (root == other_root) & (leaves == 2)
    return torch.where(siblings, (slot - other_slot).abs().clamp(max=2), (root - other_root).abs() + leaves)


@dataclass(frozen=True)
class Decay:
    """Multiplies the score q.k / sqrt(d) of head h with table[h, distance from query to key], or adds it if `added`.

    Queries and keys are the same nodes.
    """

    nodes: torch.Tensor  # (B, T, 2) int32
    table: torch.Tensor  # (H, M) fp32, may require gradients
    added: bool = False

    def entries(
        self, visible: torch.Tensor, queries: slice = ALL, keys: slice = ALL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the distances (B, T, S) and the table entry of each head (B, H, T, S) for these queries and keys.

        visible (B, 1, T, S) bool; values at pairs that are not visible are arbitrary.
        """
        distances = node_distances(self.nodes[:, queries], self.nodes[:, keys]).masked_fill(~visible[:, 0], 0)
        return distances, self.table[:, distances].transpose(0, 1)

    def decayed(self, scores: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        """Applies the decay to scores (B, H, T, S)."""
        return scores + entries if self.added else scores * entries

    def gradient(
        self,
        grad: torch.Tensor,
        scores: torch.Tensor,
        distances: torch.Tensor,
        entries: torch.Tensor,
        table_grad: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the gradient of scores from that of decayed scores; adds the table's to `table_grad` (H, M)."""
        entries_grad = grad if self.added else grad * scores
        index = distances.flatten().expand(len(table_grad), -1)
        table_grad.scatter_add_(1, index, entries_grad.transpose(0, 1).flatten(1))
        return grad if self.added else grad * entries
