"""Costs of training a decoder.

N tokens of a micro-batch, D width, K key-value width, F feed-forward width, H heads, T window, V vocabulary.
"""

from __future__ import annotations

from sansgpu.kernels.attention import ROWS
from sansgpu.machine.memory import Execution
from sansgpu.models.costing import (
    COMPUTE,
    FULL,
    Costs,
    LinearShapes,
    StepTraffic,
    StepWork,
    cross_entropy_bytes,
    muon_flops,
    numbers_of,
    shapes_of,
    vocabulary_of,
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


class DecoderCosts(Costs):
    """The costs of a decoder trained on full windows."""

    def parameters(self) -> dict[str, int]:
        model = self.model
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

    def products(self) -> LinearShapes:
        model = self.model
        d, f, kv = model.d_model, model.d_ff, model.kv_heads * model.head_dim
        matrices = [(d, d), (d, kv), (d, kv), (d, d), (d, f), (f, d)]
        if model.activation == "swiglu":
            matrices.append((d, f))
        return LinearShapes(shapes_of(matrices), (d, vocabulary_of(model)))

    def work(self, tokens: float) -> StepWork:
        """Counts 6 FLOPs per token and matmul parameter, plus causal attention."""
        shapes = self.products()
        return StepWork(
            matmul=6.0 * self.trained_matrices() * tokens,
            attention=12.0 * self.layers * self.width * (self.window + 1) / 2 * tokens,
            loss=6.0 * shapes.head[1] * self.width * tokens,
            muon=self.layers * muon_flops(shapes.block),
        )

    def traffic(self, execution: Execution) -> StepTraffic:
        total, narrow = self.trained(), self._narrow_bytes(execution)
        update = 2 * (FULL * total + self.moment_bytes(execution)) + COMPUTE[execution.precision] * total + narrow
        return StepTraffic(update, 2.0 * execution.accumulation * self.layers * self.saved_bytes(execution))

    def trained_matrices(self) -> int:
        return self.layers * numbers_of(self.products().block)

    def saved_bytes(self, execution: Execution) -> int:
        model = self.model
        layout = model.decoder.name
        width, kv, feed_forward = _SAVED_BYTES[layout, execution.compile, execution.precision]
        per_token = (width + FULL) * model.d_model + kv * model.kv_heads * model.head_dim + feed_forward * model.d_ff
        per_token += _SAVED_BYTES_PER_HEAD[layout] * model.n_heads
        if execution.kernels == "torch":  # saves the attention weights and, with dropout, their mask
            copies = 2 if model.attention_dropout else 1
            per_token += (
                model.n_heads * (min(self.window, ROWS) + self.window) // 2 * COMPUTE[execution.precision] * copies
            )
        return execution.tokens(self.window) * per_token

    def head_bytes(self, execution: Execution) -> int:
        return cross_entropy_bytes(execution, execution.tokens(self.window), self.products().head, trained=True)

    def weight_bytes(self, execution: Execution) -> int:
        norms_alone = self.training.master_weights == "bf16"
        return FULL * (self.parameters()["norms"] if norms_alone else self.trained()) + self._narrow_bytes(execution)

    def _narrow_bytes(self, execution: Execution) -> int:
        """Returns the bytes of the bf16 copies of weights that matmuls read; 0 in fp32."""
        compute = COMPUTE[execution.precision]
        return compute * (self.trained() - self.parameters()["norms"]) if compute < FULL else 0
