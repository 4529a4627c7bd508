"""What a decoder costs by its shape alone: parameters, memory and work.

N tokens of a micro-batch, D width, K key-value width, F feed-forward width, H heads, T window, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from sansgpu.config import ModelConfig
from sansgpu.kernels.attention import ROWS
from sansgpu.kernels.cross_entropy import CHUNK_ROWS
from sansgpu.kernels.newton_schulz import orthogonalise_flops
from sansgpu.machine.memory import Execution, Memory

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
_FULL, _COMPUTE = 4, {"fp32": 4, "bf16": 2}  # bytes of a master's number, and of a product's
# Measured on Linux: the process with torch and the libraries around it, what compiling leaves behind, and the share of
# everything that blocks of memory are larger than what is in them.
_PROCESS_BYTES, _COMPILER_BYTES, _ROUNDING = 434 << 20, 96 << 20, 0.05
_PARTLY_TOGETHER = 0.25  # of gradients and activations, the smaller: the one grows while the other is freed; measured


def parameters_by_part(model: ModelConfig) -> dict[str, int]:
    """Parameters, a tied one counted once."""
    d, f, layers, vocabulary = model.d_model, model.d_ff, model.n_layers, _vocabulary(model)
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


def block_products(model: ModelConfig) -> dict[tuple[int, int], int]:
    """(inputs, outputs) of a block's linear layers, and how many have this shape."""
    d, f, kv = model.d_model, model.d_ff, model.kv_heads * model.head_dim
    shapes = [(d, d), (d, kv), (d, kv), (d, d), (d, f), (f, d)] + ([(d, f)] if model.activation == "swiglu" else [])
    return {shape: shapes.count(shape) for shape in dict.fromkeys(shapes)}


def kept_bytes(model: ModelConfig, window: int, how: Execution) -> int:
    """What one block keeps for the backward pass of a micro-batch, with its output."""
    layout = model.activation if model.modern else "classic"
    width, kv, feed_forward = _KEPT[layout, how.compile, how.precision]
    per_token = (width + _FULL) * model.d_model + kv * model.kv_heads * model.head_dim + feed_forward * model.d_ff
    per_token += _KEPT_A_HEAD[layout] * model.n_heads
    if how.kernels == "torch":  # keeps attention's weights, and with dropout which of them stay
        copies = 2 if model.attention_dropout else 1
        per_token += model.n_heads * (min(window, ROWS) + window) // 2 * _COMPUTE[how.precision] * copies
    return how.micro_batch * window * per_token


def decoder_memory(model: ModelConfig, window: int, how: Execution) -> Memory:
    """Bytes at the peak of a step. Measured against real runs by `benchmarks/memory.py`."""
    parts, compute, tokens = parameters_by_part(model), _COMPUTE[how.precision], how.micro_batch * window
    total, hidden = sum(parts.values()), _hidden_matrices(model)
    table, rest = _vocabulary(model) * model.d_model, total - hidden
    moments = _FULL * _moments(model, how)
    narrow = _narrow_bytes(model, how)
    summed = how.accumulation > 1
    gradients = (_FULL if summed else compute) * hidden + _FULL * rest
    kept = kept_bytes(model, window, how)
    if model.gradient_checkpointing:
        activations = (model.n_layers * _FULL * tokens * model.d_model) + kept
    else:
        activations = model.n_layers * kept
    rows = min(tokens, CHUNK_ROWS)
    logits = rows * _vocabulary(model) * compute + tokens * model.d_model * (2 * compute + 2 * _FULL)
    logits += table * (_FULL + (compute if tokens > CHUNK_ROWS else 0) + (_FULL if summed else 0))
    overlap = int(_PARTLY_TOGETHER * min(gradients, activations))
    needed = {
        "weights": _FULL * total + narrow,
        "gradients": gradients,
        "optimizer": moments,
        "activations": activations - overlap,
        "logits": logits,
        "snapshot": _FULL * total + moments if how.copies else 0,
    }
    process = _PROCESS_BYTES + (_COMPILER_BYTES if how.compile == "on" else 0)
    return Memory(**needed, overhead=process + int(_ROUNDING * sum(needed.values())))


@dataclass(frozen=True)
class Products:
    """(inputs, outputs) of a block's linear layers and how many have this shape, and those of the output head."""

    block: dict[tuple[int, int], int]
    head: tuple[int, int]


def decoder_products(model: ModelConfig) -> Products:
    """The matrix products of our decoder."""
    return Products(block_products(model), (model.d_model, _vocabulary(model)))


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
    shapes = block_products(model)
    orthogonal = sum(n * orthogonalise_flops(o, i) for (i, o), n in shapes.items()) * model.n_layers
    return StepWork(
        matmul=6.0 * _hidden_matrices(model) * tokens,
        attention=12.0 * model.n_layers * model.d_model * (window + 1) / 2 * tokens,
        loss=6.0 * _vocabulary(model) * model.d_model * tokens,
        muon=orthogonal,
    )


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that a step moves at least, besides what its products read and write."""

    optimizer: float
    other: float


def step_traffic(model: ModelConfig, window: int, how: Execution) -> StepTraffic:
    """Weights and moments once through the update, and what blocks keep written once and read once."""
    total = sum(parameters_by_part(model).values())
    read_gradients = _COMPUTE[how.precision] * total
    update = 2 * _FULL * (total + _moments(model, how)) + read_gradients + _narrow_bytes(model, how)
    return StepTraffic(update, 2.0 * how.accumulation * model.n_layers * kept_bytes(model, window, how))


def _moments(model: ModelConfig, how: Execution) -> int:
    """Numbers the optimizer keeps: Muon one for each in a hidden matrix, AdamW two for every other."""
    spared = _hidden_matrices(model) if how.optimizer == "muon" else 0
    return 2 * sum(parameters_by_part(model).values()) - spared


def _narrow_bytes(model: ModelConfig, how: Execution) -> int:
    """Of the weights that products read, where these are narrower than the masters."""
    parts, compute = parameters_by_part(model), _COMPUTE[how.precision]
    return compute * (sum(parts.values()) - parts["norms"]) if compute < _FULL else 0


def _hidden_matrices(model: ModelConfig) -> int:
    return model.n_layers * sum(i * o * n for (i, o), n in block_products(model).items())


def _vocabulary(model: ModelConfig) -> int:
    if model.vocab_size is None:
        raise ValueError("model.vocab_size must be set")
    return model.vocab_size
