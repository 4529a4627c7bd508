"""Parameters, memory and FLOPs of a decoder, from its configuration alone.

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
    counting_mode,
    gradient_bytes,
    muon_flops,
    numbers_of,
    vocabulary_of,
    with_process,
)

# Bytes per token that a block saves for its backward pass, per unit of D, K and F, by architecture, compile and
# precision. Counted from the code; a test compares them with real blocks.
_SAVED_BYTES = {
    ("qwen3", "off", "bf16"): (34, 12, 8),
    ("qwen3", "on", "bf16"): (12, 6, 6),
    ("qwen3", "off", "fp32"): (36, 16, 16),
    ("qwen3", "on", "fp32"): (24, 12, 12),
    ("llama", "off", "bf16"): (26, 4, 8),
    ("llama", "on", "bf16"): (10, 4, 6),
    ("llama", "off", "fp32"): (28, 8, 16),
    ("llama", "on", "fp32"): (20, 8, 12),
    ("apertus", "off", "bf16"): (32, 12, 4),
    ("apertus", "on", "bf16"): (12, 6, 4),
    ("apertus", "off", "fp32"): (36, 16, 8),
    ("apertus", "on", "fp32"): (24, 12, 8),
    ("gpt2", "off", "bf16"): (20, 0, 4),
    ("gpt2", "on", "bf16"): (14, 0, 4),
    ("gpt2", "off", "fp32"): (28, 0, 8),
    ("gpt2", "on", "fp32"): (28, 0, 8),
}
_SAVED_BYTES_PER_HEAD = {"qwen3": 14, "llama": 8, "apertus": 14, "gpt2": 8}  # statistics of norms and softmax


def parameters_by_part(model: ModelConfig) -> dict[str, int]:
    """Returns the number of parameters of each part; tied parameters count once."""
    d, f, layers, vocabulary = model.d_model, model.d_ff, model.n_layers, vocabulary_of(model)
    kv = model.kv_heads * model.head_dim
    matrices = 3 if model.activation == "swiglu" else 2
    attention = 2 * d * d + 2 * d * kv + (2 * (d + kv) if model.biased != "none" else 0)
    feed_forward = matrices * d * f + ((matrices - 1) * f + d if model.biased == "all" else 0)
    norm = 2 * d if model.decoder.norm == "layernorm" else d
    norms = 2 * norm + (2 * model.head_dim if model.decoder.qk_norm else 0)
    parts = {
        "embedding": vocabulary * d,
        "positions": model.max_seq_len * d if model.decoder.positions == "learned" else 0,
        "attention": layers * attention,
        "feed_forward": layers * feed_forward,
        "norms": layers * norms + norm,
        "head": 0 if model.tie_embeddings else vocabulary * d,
    }
    return {name: count for name, count in parts.items() if count}


def block_products(model: ModelConfig) -> Shapes:
    """Returns the shapes of the linear layers of a block."""
    d, f, kv = model.d_model, model.d_ff, model.kv_heads * model.head_dim
    shapes = [(d, d), (d, kv), (d, kv), (d, d), (d, f), (f, d)] + ([(d, f)] if model.activation == "swiglu" else [])
    return counting_mode(shapes)


def kept_bytes(model: ModelConfig, window: int, how: Execution) -> int:
    """Returns the bytes that one block saves for the backward pass of a micro-batch, including its output."""
    layout = model.decoder.name
    width, kv, feed_forward = _SAVED_BYTES[layout, how.compile, how.precision]
    per_token = (width + FULL) * model.d_model + kv * model.kv_heads * model.head_dim + feed_forward * model.d_ff
    per_token += _SAVED_BYTES_PER_HEAD[layout] * model.n_heads
    if how.kernels == "torch":  # saves the attention weights and, with dropout, their mask
        copies = 2 if model.attention_dropout else 1
        per_token += model.n_heads * (min(window, ROWS) + window) // 2 * COMPUTE[how.precision] * copies
    return how.micro_batch * window * per_token


def decoder_memory(model: ModelConfig, window: int, how: Execution) -> Memory:
    """Estimates peak memory of a step, in bytes. `benchmarks/memory.py` compares it with real runs."""
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
class LinearShapes:
    """The shapes of the linear layers of a block, and (inputs, outputs) of the output head."""

    block: Shapes
    head: tuple[int, int]


def decoder_products(model: ModelConfig) -> LinearShapes:
    return LinearShapes(block_products(model), (model.d_model, vocabulary_of(model)))


@dataclass(frozen=True)
class StepWork:
    """FLOPs of a step by part; causal attention counts only unmasked scores."""

    matmul: float
    attention: float
    loss: float
    muon: float  # orthogonalization, if Muon is the optimizer

    @property
    def needed(self) -> float:
        """FLOPs of the model, without the optimizer and without recomputed activations."""
        return self.matmul + self.attention + self.loss


def step_work(model: ModelConfig, window: int, tokens: float) -> StepWork:
    """Returns the FLOPs of a step of `tokens`: 6 per token and matmul parameter, plus causal attention."""
    return StepWork(
        matmul=6.0 * _hidden_matrices(model) * tokens,
        attention=12.0 * model.n_layers * model.d_model * (window + 1) / 2 * tokens,
        loss=6.0 * vocabulary_of(model) * model.d_model * tokens,
        muon=model.n_layers * muon_flops(block_products(model)),
    )


@dataclass(frozen=True)
class StepTraffic:
    """Lower bound of the bytes that a step moves, excluding operands and results of matmuls."""

    optimizer: float
    other: float


def step_traffic(model: ModelConfig, window: int, how: Execution) -> StepTraffic:
    """Counts weights and moments read and written once by the update, and saved activations written and read once."""
    total = sum(parameters_by_part(model).values())
    read_gradients = COMPUTE[how.precision] * total
    update = 2 * FULL * (total + _moments(model, how)) + read_gradients + _narrow_bytes(model, how)
    return StepTraffic(update, 2.0 * how.accumulation * model.n_layers * kept_bytes(model, window, how))


def _moments(model: ModelConfig, how: Execution) -> int:
    """Returns the number of optimizer state values: one per weight for Muon (hidden matrices), two for AdamW."""
    spared = _hidden_matrices(model) if how.optimizer == "muon" else 0
    return 2 * sum(parameters_by_part(model).values()) - spared


def _narrow_bytes(model: ModelConfig, how: Execution) -> int:
    """Returns the bytes of the bf16 copies of weights that matmuls read; 0 in fp32."""
    parts, compute = parameters_by_part(model), COMPUTE[how.precision]
    return compute * (sum(parts.values()) - parts["norms"]) if compute < FULL else 0


def _hidden_matrices(model: ModelConfig) -> int:
    return model.n_layers * numbers_of(block_products(model))
