"""Estimates what training a graph encoder costs. Its tokens are the nodes of graphs: roots and leaves.

L layers, T nodes of a graph, D width, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sansgpu.kernels.cross_entropy import CHUNK_ROWS
from sansgpu.machine.execution import Execution
from sansgpu.models.costing import (
    FULL,
    Costs,
    LinearShapes,
    StepTraffic,
    StepWork,
    muon_flops,
    numbers_of,
    shapes_of,
    vocabulary_of,
)
from sansgpu.models.module_costs import count_parameters
from sansgpu.tasks.graph.encoder import GraphEncoder
from sansgpu.tasks.graph.settings import GraphModelConfig

# Bytes that a block saves per node for its backward pass, including its output, per unit of D and F, by precision.
# Counted from the code; a test compares them with real blocks.
_SAVED_BYTES = {"bf16": (24, 2), "fp32": (32, 4)}
_SAVED_BYTES_PER_HEAD = 10  # bytes per node for the statistics of softmax

# The parts of a model in display order, with regular expressions for the names of their parameters.
_PARTS = {
    "embedding": r"embedding\.", "positions": r"position\.", "slots": r"slot\.", "relations": r"fusion\.",
    "entities": r"entities\.", "attention": r"blocks\.0\.attention\.", "feed_forward": r"blocks\.0\.(up|down)\.",
    "norms": r"(blocks\.0|embedding).*norm\.", "decay": r"decay", "head": r"transform", "span_boundary": r"boundary\.",
}  # fmt: skip


@dataclass(frozen=True)
class GraphEncoderCosts(Costs):
    """Estimates the costs of a graph encoder. `target_ratio` is the share of masked nodes."""

    model: GraphModelConfig

    longest_span: int | None = None  # tokens; None if the model has no head for the span boundary loss
    facts: int = 0  # facts per graph that are learned without text

    def parameters(self) -> dict[str, int]:
        one_block = self.model.model_copy(update={"n_layers": 1}).model_dump_json(
            include={*GraphModelConfig.model_fields}
        )
        return _counted(one_block, self.longest_span, self.model.n_layers)

    def products(self) -> LinearShapes:
        d, f = self.model.d_model, self.model.d_ff
        return LinearShapes(shapes_of([(d, d)] * 4 + [(d, f), (f, d)]), (d, vocabulary_of(self.model)))

    def work(self, tokens: float) -> StepWork:
        """Counts 6 FLOPs per node and matmul parameter, and 12 L D T per node for attention within graphs.

        The output head is counted for masked nodes only. Relation fusion is not counted: it is less than a thousandth.
        """
        d, shapes = self.width, self.products()
        head = shapes.head[1] * d + d * d
        if self.longest_span:  # two more layers and another projection to the vocabulary
            head += shapes.head[1] * d + 4 * d * d
        entities = self.model.n_entities or 0
        tails = (1 + self.facts) * tokens / self.example_tokens if entities else 0.0  # one query per graph
        return StepWork(
            matmul=6.0 * self.layers * numbers_of(shapes.block) * tokens,
            attention=12.0 * self.layers * d * self.example_tokens * tokens,
            loss=6.0 * (head * self.target_ratio * tokens + entities * d * tails),
            muon=self.layers * muon_flops(shapes.block),
        )

    def traffic(self, execution: Execution) -> StepTraffic:
        memory = self.memory(execution)
        update = 2.0 * (memory.weights + memory.optimizer) + memory.gradients
        return StepTraffic(update, 2.0 * execution.accumulation * memory.activations)

    def trained_matrices(self) -> int:
        in_heads = (5 if self.longest_span else 1) * self.width**2
        return self.layers * numbers_of(self.products().block) + in_heads

    def saved_bytes(self, execution: Execution) -> int:
        model = self.model
        width, inner = _SAVED_BYTES[execution.compute_dtype_name]
        per_node = width * model.d_model + inner * model.d_ff + _SAVED_BYTES_PER_HEAD * model.n_heads
        nodes, compute = execution.tokens(self.window), execution.compute_dtype.itemsize
        if execution.kernels == "torch":  # saves distances, scores and weights of all pairs of nodes in the micro-batch
            copies = 3 if model.attention_dropout else 2
            per_node += nodes * (10 + model.n_heads * (2 * FULL + copies * compute))
            per_node += compute * (2 * model.d_model + model.d_ff)
        return nodes * per_node

    def head_bytes(self, execution: Execution) -> int:
        model, compute, vocabulary = self.model, execution.compute_dtype.itemsize, vocabulary_of(self.model)
        rows = max(1, round(execution.tokens(self.window) * self.target_ratio))
        logits = min(rows, CHUNK_ROWS) * vocabulary * (compute + FULL) + 20 * rows * model.d_model
        heads = 3 if self.longest_span else 2  # roots, leaves, spans: each keeps a gradient of the embedding
        logits += vocabulary * model.d_model * (heads * FULL + compute + (FULL if execution.accumulation > 1 else 0))
        if model.n_entities:  # entity vectors with their gradients, and the logits of queries or facts
            logits += model.n_entities * model.d_model * (2 * compute + 3 * FULL)
            facts = execution.micro_batch * self.facts
            logits += min(max(rows, facts), CHUNK_ROWS) * model.n_entities * (compute + FULL)
            if facts:  # another gradient of the entity vectors, which is kept until the backward pass
                logits += model.n_entities * model.d_model * (compute + FULL) + 20 * facts * model.d_model
        # Relation matrices after lookup and after dropout, and their gradients, if all relations occur in a batch.
        return logits + 4 * compute * self.parameters().get("relations", 0)


@lru_cache(maxsize=64)
def _counted(one_block: str, longest_span: int | None, layers: int) -> dict[str, int]:
    model = GraphEncoder(GraphModelConfig.model_validate_json(one_block), seed=None, longest_span=longest_span)
    return count_parameters(model, _PARTS, layers)
