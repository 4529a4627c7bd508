"""What a decoder costs by its shape alone: parameters, memory and work.

N tokens of a micro-batch, D width, K key-value width, F feed-forward width, H heads, T window, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from sansgpu.config import ModelConfig
from sansgpu.kernels.attention import ROWS
from sansgpu.kernels.cross_entropy import CHUNK_ROWS
from sansgpu.machine.memory import Execution, Memory
from sansgpu.models.costing import (
    COMPUTE,
    FULL,
    Shapes,
    activation_bytes,
    beside_gradients,
    counted,
    gradient_bytes,
    muon_flops,
    numbers_of,
    vocabulary_of,
    with_process,
)

# Bytes that a block keeps of each token for its backward pass, times D, K and F. Counts of what the code does, which a
# test holds to real blocks; by (layout, compile, precision).
_KEPT = {
    ("swiglu", "off", "bf16"): (34, 12, 8),
    ("swiglu", "on", "bf16"): (12, 6, 6),
    ("swiglu", "off", "fp32"): (36, 16, 16),
    ("swiglu", "on", "fp32"): (24, 12, 12),
    ("relu2", "off", "bf16"): (32, 12, 4),
    ("relu2", "on", "bf16"): (12, 6, 4),
    ("relu2", "off", "fp32"): (36, 16, 8),
    ("relu2", "on", "fp32"): (24, 12, 8),
    ("classic", "off", "bf16"): (20, 0, 4),
    ("classic", "on", "bf16"): (14, 0, 4),
    ("classic", "off", "fp32"): (28, 0, 8),
    ("classic", "on", "fp32"): (28, 0, 8),
}
_KEPT_A_HEAD = {"swiglu": 14, "relu2": 14, "classic": 8}  # norms' and softmax' sums


def parameters_by_part(model: ModelConfig) -> dict[str, int]:
    """Parameters, a tied one counted once."""
    d, f, layers, vocabulary = model.d_model, model.d_ff, model.n_layers, vocabulary_of(model)
    kv = model.kv_heads * model.head_dim
    matrices = 3 if model.activation == "swiglu" else 2
    attention, feed_forward, norms = 2 * d * d + 2 * d * kv, matrices * d * f, 2 * d
    if model.modern:
        norms += 2 * model.head_dim
    else:
        attention, feed_forward, norms = attention + 4 * d, feed_forward + f + d, 4 * d
    parts = {
        "embedding": vocabulary * d,
        "positions": 0 if model.modern else model.max_seq_len * d,
        "attention": layers * attention,
        "feed_forward": layers * feed_forward,
        "norms": layers * norms + (d if model.modern else 2 * d),
        "head": 0 if model.tie_embeddings else vocabulary * d,
    }
    return {name: count for name, count in parts.items() if count}


def block_products(model: ModelConfig) -> Shapes:
    """(inputs, outputs) of a block's linear layers, and how many have this shape."""
    d, f, kv = model.d_model, model.d_ff, model.kv_heads * model.head_dim
    shapes = [(d, d), (d, kv), (d, kv), (d, d), (d, f), (f, d)] + ([(d, f)] if model.activation == "swiglu" else [])
    return counted(shapes)


def kept_bytes(model: ModelConfig, window: int, how: Execution) -> int:
    """What one block keeps for the backward pass of a micro-batch, with its output."""
    layout = model.activation if model.modern else "classic"
    width, kv, feed_forward = _KEPT[layout, how.compile, how.precision]
    per_token = (width + FULL) * model.d_model + kv * model.kv_heads * model.head_dim + feed_forward * model.d_ff
    per_token += _KEPT_A_HEAD[layout] * model.n_heads
    if how.kernels == "torch":  # keeps attention's weights, and with dropout which of them stay
        copies = 2 if model.attention_dropout else 1
        per_token += model.n_heads * (min(window, ROWS) + window) // 2 * COMPUTE[how.precision] * copies
    return how.micro_batch * window * per_token


def decoder_memory(model: ModelConfig, window: int, how: Execution) -> Memory:
    """Bytes at the peak of a step. Measured against real runs by `benchmarks/memory.py`."""
    parts, compute, tokens = parameters_by_part(model), COMPUTE[how.precision], how.micro_batch * window
    total, hidden = sum(parts.values()), _hidden_matrices(model)
    table, rest = vocabulary_of(model) * model.d_model, total - hidden
    moments = FULL * _moments(model, how)
    narrow = _narrow_bytes(model, how)
    gradients = gradient_bytes(hidden, rest, how)
    kept = kept_bytes(model, window, how)
    activations = activation_bytes(model.n_layers, kept, tokens * model.d_model, model.gradient_checkpointing)
    rows = min(tokens, CHUNK_ROWS)
    logits = rows * vocabulary_of(model) * compute + tokens * model.d_model * (2 * compute + 2 * FULL)
    logits += table * (FULL + (compute if tokens > CHUNK_ROWS else 0) + (FULL if how.accumulation > 1 else 0))
    needed = {
        "weights": FULL * total + narrow,
        "gradients": gradients,
        "optimizer": moments,
        "activations": beside_gradients(activations, gradients),
        "logits": logits,
        "snapshot": FULL * total + moments if how.copies else 0,
    }
    return with_process(needed, how)


@dataclass(frozen=True)
class Products:
    """(inputs, outputs) of a block's linear layers and how many have this shape, and those of the output head."""

    block: Shapes
    head: tuple[int, int]


def decoder_products(model: ModelConfig) -> Products:
    """The matrix products of our decoder."""
    return Products(block_products(model), (model.d_model, vocabulary_of(model)))


@dataclass(frozen=True)
class StepWork:
    """FLOPs of a step by part; of attention the half that a causal mask leaves."""

    matmul: float
    attention: float
    loss: float
    muon: float  # orthogonalising, where that is the optimizer

    @property
    def needed(self) -> float:
        """What the model needs: not the optimizer's, nor what is computed again."""
        return self.matmul + self.attention + self.loss


def step_work(model: ModelConfig, window: int, tokens: float) -> StepWork:
    """FLOPs of a step of `tokens`: 6 a matmul parameter, and causal attention."""
    return StepWork(
        matmul=6.0 * _hidden_matrices(model) * tokens,
        attention=12.0 * model.n_layers * model.d_model * (window + 1) / 2 * tokens,
        loss=6.0 * vocabulary_of(model) * model.d_model * tokens,
        muon=model.n_layers * muon_flops(block_products(model)),
    )


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that a step moves at least, besides what its products read and write."""

    optimizer: float
    other: float


def step_traffic(model: ModelConfig, window: int, how: Execution) -> StepTraffic:
    """Weights and moments once through the update, and what blocks keep written once and read once."""
    total = sum(parameters_by_part(model).values())
    read_gradients = COMPUTE[how.precision] * total
    update = 2 * FULL * (total + _moments(model, how)) + read_gradients + _narrow_bytes(model, how)
    return StepTraffic(update, 2.0 * how.accumulation * model.n_layers * kept_bytes(model, window, how))


def _moments(model: ModelConfig, how: Execution) -> int:
    """Numbers the optimizer keeps: Muon one for each in a hidden matrix, AdamW two for every other."""
    spared = _hidden_matrices(model) if how.optimizer == "muon" else 0
    return 2 * sum(parameters_by_part(model).values()) - spared


def _narrow_bytes(model: ModelConfig, how: Execution) -> int:
    """Of the weights that products read, where these are narrower than the masters."""
    parts, compute = parameters_by_part(model), COMPUTE[how.precision]
    return compute * (sum(parts.values()) - parts["norms"]) if compute < FULL else 0


def _hidden_matrices(model: ModelConfig) -> int:
    return model.n_layers * numbers_of(block_products(model))
