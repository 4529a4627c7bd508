"""A leafy chain graph encoder in plain PyTorch, fp32: `python -m benchmarks.graph.plain_encoder JOB.json`.

A direct implementation of the paper (arXiv 2510.09580): all leaf slots are padded, attention is two matrix products
with a multiplication by the decay in between, the fusion loops over triples, and logits are computed for every node. It
uses the same batches and masks as sansgpu. Prints JSON lines.

B graphs, R roots, K leaf slots, N = R (K + 1) nodes, D width, H heads.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.contest import read_job
from sansgpu.config import Config
from sansgpu.data.batch import IGNORE
from sansgpu.machine.memory import effective_batch
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.graph.batch import POSITION_FIELDS, GraphBatch
from sansgpu.tasks.graph.encoder import GraphEncoder
from sansgpu.tasks.graph.masked_prediction import Masking, mask_rules
from sansgpu.tasks.graph.settings import GraphModelConfig
from sansgpu.tasks.graph.task import Graph

PAD = 0


class PlainBlock(nn.Module):
    """A post-norm transformer block."""

    def __init__(self, config: GraphModelConfig) -> None:
        super().__init__()
        width = config.d_model
        self.heads = config.n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(width) for _ in range(2))
        self.up, self.down = nn.Linear(width, config.d_ff), nn.Linear(config.d_ff, width)
        self.dropout, self.attention_dropout = nn.Dropout(config.dropout), nn.Dropout(config.attention_dropout)

    def forward(self, x: torch.Tensor, decay: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the block. x (B, N, D), decay (H, N, N), hidden (B, 1, 1, N) bool: padding that is masked out."""
        batch, nodes, width = x.shape
        q, k, v = (layer(x).view(batch, nodes, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) * decay
        weights = self.attention_dropout(torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1))
        y = self.o((weights @ v).transpose(1, 2).reshape(batch, nodes, width))
        x = self.attention_norm(x + self.dropout(y))
        y = self.down(F.gelu(self.up(x)))
        normed: torch.Tensor = self.feed_forward_norm(x + self.dropout(y))
        return normed


class PlainEncoder(nn.Module):
    """The complete graph encoder, in the padded layout."""

    def __init__(self, config: GraphModelConfig, roots: int) -> None:
        super().__init__()
        assert config.vocab_size is not None
        assert config.n_relations is not None
        parts = config.position_embedding, config.decay, config.fusion, config.slot_embedding, config.relation_rank
        if parts != ("none", "multiply_logits", "hgat", False, None):
            raise SystemExit(
                "the plain model supports only the published architecture: model.position_embedding none, decay "
                "multiply_logits, fusion hgat, no slot_embedding and no relation_rank."
            )
        width, self.config, self.roots = config.d_model, config, roots
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.matrix = nn.Embedding(config.n_relations + 1, width * width, padding_idx=0)
        self.attention = nn.Embedding(config.n_relations + 1, 2 * width, padding_idx=0)
        self.center = nn.Parameter(torch.ones(config.n_heads))
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_layers))
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.dropout, self.relation_dropout = nn.Dropout(config.dropout), nn.Dropout(config.relation_dropout)
        self.distances = all_distances(roots, config.leaf_slots)

    @torch.no_grad()
    def take(self, ours: GraphEncoder) -> None:
        """Copies the weights of a sansgpu model."""
        theirs = ours.state_dict()
        self.load_state_dict({name: theirs[self.our_name(name)] for name in self.state_dict()})

    @staticmethod
    def our_name(name: str) -> str:
        """Returns the name of a weight in the sansgpu model."""
        if name.startswith(("matrix.", "attention.")):
            return f"fusion.{name}"
        parts = name.split(".")
        if parts[0] == "blocks" and parts[2] in ("q", "k", "v", "o"):
            parts.insert(2, "attention")
        return "decay_center" if name == "center" else ".".join(parts)

    def fused(self, x: torch.Tensor, triples: list[list[int]]) -> torch.Tensor:
        """Fuses triples (graph, relation, head's first node and tokens, tail's first node and tokens) one by one."""
        rows = list(x.flatten(0, 1).unbind(0))
        width, nodes = self.config.d_model, x.shape[1]
        for graph, relation, head, heads, tail, tails in triples:
            index = torch.tensor(relation)
            matrix = self.relation_dropout(self.matrix(index)).view(width, width)
            vector = self.relation_dropout(self.attention(index))
            values = x[graph, head : head + heads] @ matrix.T
            for node in range(tail, tail + tails):
                own = matrix @ x[graph, node]
                pairs = torch.cat((own.expand(heads, width), values), dim=1)
                weights = torch.softmax(F.leaky_relu(pairs @ vector, 0.01), dim=0)
                rows[graph * nodes + node] = x[graph, node] + weights @ values
        return torch.stack(rows).view_as(x)

    def loss(
        self, tokens: torch.Tensor, targets: torch.Tensor, triples: list[list[int]], filled: torch.Tensor
    ) -> torch.Tensor:
        """Returns the loss of every node, (B, N), 0 for nodes without a target."""
        x = self.dropout(self.fused(self.embedding(tokens), triples))
        exponent = F.gelu((self.distances + 1.0).sqrt() - self.center[:, None, None])
        decay = self.config.decay_base**exponent
        for block in self.blocks:
            x = block(x, decay, ~filled[:, None, None])
        logits = self.transform_norm(F.gelu(self.transform(x))) @ self.embedding.weight.T
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        return losses.view_as(targets)


def all_distances(roots: int, leaves: int) -> torch.Tensor:
    """Returns node distances (N, N) fp32 in the padded layout: all roots, then the leaf slots of each root."""
    root = torch.cat((torch.arange(roots), torch.arange(roots).repeat_interleave(leaves)))
    slot = torch.cat((torch.full((roots,), -1), torch.arange(leaves).repeat(roots)))
    apart = (root[:, None] - root).abs()
    is_leaf = (slot >= 0).long()
    far = apart + is_leaf[:, None] + is_leaf
    siblings = (apart == 0) & (is_leaf[:, None] * is_leaf > 0)
    return torch.where(siblings, (slot[:, None] - slot).abs().clamp(max=2), far).float()


def padded(
    batch: GraphBatch, roots: int, leaves: int
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]], torch.Tensor]:
    """Converts a batch to the padded layout and returns tokens, targets, triples and the mask of real nodes."""
    shape = (len(batch), roots * (leaves + 1))
    graph = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    root, slot = batch.nodes.long().unbind(1)
    node = torch.where(slot > 0, roots + root * leaves + slot - 1, root)
    tokens, targets = torch.full(shape, PAD), torch.full(shape, IGNORE)
    tokens[graph, node], targets[graph, node] = batch.tokens, batch.targets
    filled = torch.zeros(shape, dtype=torch.bool)
    filled[graph, node] = True
    owners = torch.repeat_interleave(torch.arange(len(batch)), batch.triple_counts).tolist()
    triples = [
        [owner, relation, head, heads, roots + head * leaves, tails]
        for owner, (relation, head, heads, _, tails) in zip(
            owners, batch.triples[:, :POSITION_FIELDS].tolist(), strict=True
        )
    ]
    return tokens, targets, triples, filled


def run(config: Config, cache: Path, steps: int) -> None:
    """Trains and prints the duration and loss of each step."""
    config, corpus = Graph.prepare(config, cache, lambda *_: None)
    training = config.training
    size, micro_batch = effective_batch(training), training.batch_size
    assert isinstance(micro_batch, int)
    masking = Masking(corpus.train, mask_rules(config, corpus.codec.tokenizer), training.seed)
    torch.manual_seed(training.seed)
    model = GraphModelConfig.of(config)
    plain = PlainEncoder(model, config.roots)
    plain.take(Graph.new_objective(config).model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=training.learning_rate, fused=True)
    for step in range(steps):
        batch = masking.of_step(step, size)
        start = time.perf_counter()
        counts, total = batch.counts(), 0.0
        for piece in batch.micro_batches(micro_batch):
            tokens, targets, triples, filled = padded(piece, config.roots, model.leaf_slots)
            losses = plain.loss(tokens, targets, triples, filled)
            roots, leaves = losses[:, : config.roots].sum(), losses[:, config.roots :].sum()
            loss = roots / max(1, counts[0]) + leaves / max(1, counts[1])
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(plain.parameters(), training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        said = {"event": "step", "step": step + 1, "step_seconds": seconds, "loss": total, "nodes": batch.token_count()}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    job = read_job()
    torch.set_num_threads(job["threads"])
    asked, _ = load_config(Path(job["config"]), job["overrides"])
    run(asked, Path(job["cache"]), job["steps"])
