"""Parameters, memory and FLOPs of a graph encoder, from its configuration alone.

N nodes of a micro-batch, T nodes of a graph, D width, F feed-forward width, H heads, V vocabulary.
"""

from __future__ import annotations

from sansgpu.config import ModelConfig, TrainingConfig
from sansgpu.kernels.attention import ROWS
from sansgpu.kernels.cross_entropy import CHUNK_ROWS
from sansgpu.machine.memory import Execution, Memory
from sansgpu.models.costing import (
    COMPUTE,
    FULL,
    MOMENTS,
    Shapes,
    activation_bytes,
    beside_gradients,
    copy_bytes,
    counting_mode,
    gradient_bytes,
    master_bytes,
    muon_flops,
    numbers_of,
    vocabulary_of,
    with_process,
)
from sansgpu.models.costs import LinearShapes, StepTraffic, StepWork

# Bytes per node that a block saves for its backward pass, including its output, per unit of D and F, by (compile,
# precision). Counted from the code; a test compares them with real blocks.
_SAVED_BYTES = {("off", "bf16"): (24, 4), ("on", "bf16"): (22, 4), ("off", "fp32"): (32, 8), ("on", "fp32"): (32, 8)}
_SAVED_BYTES_PER_HEAD = 10  # statistics of softmax


def parameters_by_part(model: ModelConfig, longest_span: int | None = None) -> dict[str, int]:
    """Returns the number of parameters of each part; with `longest_span` includes the span-boundary head."""
    d, f, layers = model.d_model, model.d_ff, model.n_layers
    rows = (model.n_relations or 0) + 1
    matrix = 2 * d * model.relation_rank if model.relation_rank else d * d
    parts = {
        "embedding": vocabulary_of(model) * d,
        "positions": model.max_seq_len * d if model.position == "learned" else 0,
        "slots": (model.leaf_slots + 1) * d if model.leaf_slots and model.slot_embedding else 0,
        "relations": rows * (matrix + 2 * d) if model.leaf_slots and model.fusion == "hgat" else 0,
        "entities": (model.n_entities + 1 + d) * model.entity_rank + rows * d + 2 * d if model.n_entities else 0,
        "attention": layers * 4 * (d * d + d),
        "feed_forward": layers * (2 * d * f + f + d),
        "norms": layers * 4 * d + (2 * d if model.embedding_norm else 0),
        "decay": 0 if model.decay == "none" else model.n_heads,
        "head": d * d + 3 * d,
        "span_boundary": longest_span * d + 4 * d * d + 6 * d if longest_span else 0,
    }
    return {name: count for name, count in parts.items() if count}


def kept_bytes(model: ModelConfig, nodes: int, how: Execution) -> int:
    """Returns the bytes that one block saves for the backward pass of so many nodes."""
    width, inner = _SAVED_BYTES[how.compile, how.precision]
    per_node = width * model.d_model + inner * model.d_ff + _SAVED_BYTES_PER_HEAD * model.n_heads
    if how.kernels == "torch":  # saves scores and weights of all graphs that a block of queries overlaps
        copies = 3 if model.attention_dropout else 2
        longest = model.max_seq_len * (1 + model.leaf_slots)
        per_node += model.n_heads * (longest + ROWS) * FULL * copies
    return nodes * per_node


def graph_memory(
    model: ModelConfig,
    nodes: int,
    masked: float,
    how: Execution,
    training: TrainingConfig,
    longest_span: int | None = None,
) -> Memory:
    """Estimates peak memory of a step with micro-batches of `nodes`, in bytes; a share `masked` of nodes is masked."""
    parts, compute = parameters_by_part(model, longest_span), COMPUTE[how.precision]
    total, summed = sum(parts.values()), how.accumulation > 1
    hidden = _hidden_matrices(model, longest_span)
    moments = _moments(total, hidden, how.optimizer, training.optimizer_state)
    gradients = gradient_bytes(hidden, total - hidden, how)
    kept = kept_bytes(model, nodes, how)
    activations = activation_bytes(model.n_layers, kept, nodes * model.d_model, model.gradient_checkpointing)
    rows = max(1, round(nodes * masked))
    table = vocabulary_of(model) * model.d_model
    logits = min(rows, CHUNK_ROWS) * vocabulary_of(model) * (compute + FULL) + 20 * rows * model.d_model
    heads = 3 if longest_span else 2  # roots, leaves, spans: each holds a gradient of the embedding until backward
    logits += table * (heads * FULL + compute + (FULL if summed else 0))
    if model.n_entities:  # entity vectors with gradients, and the logits of queries
        logits += model.n_entities * model.d_model * (2 * compute + 3 * FULL)
        logits += min(rows, CHUNK_ROWS) * model.n_entities * (compute + FULL)
    if "relations" in parts:  # looked-up rows with dropout, and their gradients; at worst for every relation
        logits += 4 * compute * parts["relations"]
    needed = {
        "weights": master_bytes(total, how.precision, training.master_weights),
        "gradients": gradients,
        "optimizer": moments,
        "activations": beside_gradients(activations, gradients),
        "logits": logits,
        "snapshot": copy_bytes(total, moments, training.master_weights, how),
    }
    return with_process(needed, how)


def graph_work(
    model: ModelConfig, graph_nodes: float, nodes: float, masked: float, longest_span: int | None = None
) -> StepWork:
    """Returns the FLOPs of a step of `nodes`, in graphs of `graph_nodes` each, of which the share `masked` is masked.

    Counts 6 per node and matmul parameter, 12 L D T per node for bidirectional attention within graphs, and the output
    head on masked nodes only. H-GAT fusion is left out, as it takes less than a thousandth.
    """
    d = model.d_model
    head = vocabulary_of(model) * d + d * d
    if longest_span:  # two more layers and another projection to the vocabulary
        head += vocabulary_of(model) * d + 4 * d * d
    entities = model.n_entities or 0
    queries = nodes / graph_nodes if entities else 0.0  # one per graph
    return StepWork(
        matmul=6.0 * _block_matrices(model) * nodes,
        attention=12.0 * model.n_layers * d * graph_nodes * nodes,
        loss=6.0 * (head * masked * nodes + entities * d * queries),
        muon=model.n_layers * muon_flops(_block_products(model)),
    )


def graph_traffic(model: ModelConfig, memory: Memory, how: Execution) -> StepTraffic:
    """Counts weights and moments read and written once by the update, and saved activations written and read once."""
    update = 2.0 * (memory.weights + memory.optimizer) + memory.gradients
    return StepTraffic(update, 2.0 * how.accumulation * memory.activations)


def graph_products(model: ModelConfig) -> LinearShapes:
    return LinearShapes(_block_products(model), (model.d_model, vocabulary_of(model)))


def _block_products(model: ModelConfig) -> Shapes:
    d, f = model.d_model, model.d_ff
    return counting_mode([(d, d)] * 4 + [(d, f), (f, d)])


def _hidden_matrices(model: ModelConfig, longest_span: int | None) -> int:
    return _block_matrices(model) + (5 if longest_span else 1) * model.d_model**2


def _block_matrices(model: ModelConfig) -> int:
    return model.n_layers * numbers_of(_block_products(model))


def _moments(total: int, hidden: int, optimizer: str, state: str) -> int:
    if optimizer == "muon":
        return 4 * (2 * total - hidden)
    return int(MOMENTS[state] * total)
