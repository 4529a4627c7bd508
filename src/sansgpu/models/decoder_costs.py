"""What training a decoder costs.

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

# Bytes per token that a block saves for its backward pass, per unit of D, K and F, by (layout, compile, precision).
# Counted from the code; a test compares them with real blocks.
_SAVED_BYTES = {
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
_SAVED_BYTES_PER_HEAD = {"swiglu": 14, "relu2": 14, "classic": 8}  # statistics of norms and softmax


class DecoderCosts(Costs):
    """The costs of a decoder trained on full windows."""

    def parameters(self) -> dict[str, int]:
        model = self.model
        d, f, layers, vocabulary = model.d_model, model.d_ff, model.n_layers, vocabulary_of(model)
        kv = model.kv_heads * model.head_dim
        matrices = 3 if model.activation == "swiglu" else 2
        attention, feed_forward, norms = 2 * d * d + 2 * d * kv, matrices * d * f, 2 * d
        if model.uses_rope:
            norms += 2 * model.head_dim
        else:
            attention, feed_forward, norms = attention + 4 * d, feed_forward + f + d, 4 * d
        parts = {
            "embedding": vocabulary * d,
            "positions": 0 if model.uses_rope else model.max_seq_len * d,
            "attention": layers * attention,
            "feed_forward": layers * feed_forward,
            "norms": layers * norms + (d if model.uses_rope else 2 * d),
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

    def traffic(self, how: Execution) -> StepTraffic:
        total, narrow = self.trained(), self._narrow_bytes(how)
        update = 2 * (FULL * total + self.moment_bytes(how)) + COMPUTE[how.precision] * total + narrow
        return StepTraffic(update, 2.0 * how.accumulation * self.layers * self.saved_bytes(how))

    def trained_matrices(self) -> int:
        return self.layers * numbers_of(self.products().block)

    def saved_bytes(self, how: Execution) -> int:
        model = self.model
        layout = model.activation if model.uses_rope else "classic"
        width, kv, feed_forward = _SAVED_BYTES[layout, how.compile, how.precision]
        per_token = (width + FULL) * model.d_model + kv * model.kv_heads * model.head_dim + feed_forward * model.d_ff
        per_token += _SAVED_BYTES_PER_HEAD[layout] * model.n_heads
        if how.kernels == "torch":  # saves the attention weights and, with dropout, their mask
            copies = 2 if model.attention_dropout else 1
            per_token += model.n_heads * (min(self.window, ROWS) + self.window) // 2 * COMPUTE[how.precision] * copies
        return how.tokens(self.window) * per_token

    def head_bytes(self, how: Execution) -> int:
        return cross_entropy_bytes(how, how.tokens(self.window), self.products().head, trained=True)

    def weight_bytes(self, how: Execution) -> int:
        norms_alone = self.training.master_weights == "bf16"
        return FULL * (self.parameters()["norms"] if norms_alone else self.trained()) + self._narrow_bytes(how)

    def _narrow_bytes(self, how: Execution) -> int:
        """Returns the bytes of the bf16 copies of weights that matmuls read; 0 in fp32."""
        compute = COMPUTE[how.precision]
        return compute * (self.trained() - self.parameters()["norms"]) if compute < FULL else 0
