"""Estimates what training a decoder costs.

D width, K key-value width, F feed-forward width.
"""

from __future__ import annotations

from functools import lru_cache

from torch import nn

from sansgpu.kernels.linear import Linear
from sansgpu.machine.execution import Execution
from sansgpu.models import TransformerLM
from sansgpu.models.architectures import DecoderConfig
from sansgpu.models.costing import (
    FULL,
    Costs,
    LinearShapes,
    Shapes,
    StepTraffic,
    StepWork,
    cross_entropy_bytes,
    muon_flops,
    numbers_of,
    shapes_of,
    vocabulary_of,
)
from sansgpu.models.module_costs import RECURRENT_FLOPS, count_parameters
from sansgpu.tasks.settings import DistilledTrainingConfig

# Bytes that a block saves per token for its backward pass, per unit of D, K and F, by (activation, kernels, precision).
# Counted from the code; a test compares them with real blocks.
_SAVED_BYTES = {
    ("swiglu", "native", "bf16"): (12, 4, 4),
    ("swiglu", "torch", "bf16"): (20, 4, 8),
    ("swiglu", "native", "fp32"): (20, 8, 8),
    ("swiglu", "torch", "fp32"): (28, 8, 16),
    ("relu2", "native", "bf16"): (12, 4, 2),
    ("relu2", "torch", "bf16"): (20, 4, 4),
    ("relu2", "native", "fp32"): (20, 8, 4),
    ("relu2", "torch", "fp32"): (28, 8, 8),
    ("gelu", "native", "bf16"): (16, 0, 2),  # also for relu; D includes K, which is equal to it
    ("gelu", "torch", "bf16"): (16, 0, 4),
    ("gelu", "native", "fp32"): (28, 0, 4),
    ("gelu", "torch", "fp32"): (28, 0, 8),
}
# Additional bytes for QK-norm, per unit of D + K.
_QK_NORM_BYTES = {
    ("native", "bf16"): 2,
    ("torch", "bf16"): 8,
    ("native", "fp32"): 4,
    ("torch", "fp32"): 8,
}
# Additional bytes for a gate of the outputs of attention, per unit of D.
_GATE_BYTES = {
    ("native", "bf16"): 4,
    ("torch", "bf16"): 4,
    ("native", "fp32"): 8,
    ("torch", "fp32"): 12,
}
# Measured bytes that a gated delta net saves per token in plain torch, per unit of D.
_PLAIN_DELTA_BYTES = {"bf16": 72, "fp32": 105}
# Bytes per token and query head for the statistics of softmax and norms: (without QK-norm, with QK-norm).
_STATISTICS_BYTES = {"native": (4, 4), "torch": (8, 14)}

# The parts of a model in display order, with regular expressions for the names of their parameters.
_PARTS = {
    "embedding": r"embedding\.", "positions": r"position\.", "attention": r"blocks\.\d+\.attention\.[qkvo]\.",
    "delta_nets": r"blocks\.\d+\.net\.(?!norm)", "feed_forward": r"blocks\.\d+\.feed_forward\.",
    "norms": r".*norm\.", "head": r"head\.",
}  # fmt: skip


class DecoderCosts(Costs):
    """Estimates the costs of training a decoder on full windows."""

    model: DecoderConfig
    training: DistilledTrainingConfig

    def parameters(self) -> dict[str, int]:
        return _counted(self._one_period(), self.model.n_layers)

    def _one_period(self) -> str:
        """Returns the configuration of the model with only the blocks after which their types repeat, as JSON."""
        short = self.model.model_copy(update={"n_layers": self.model.period})
        return short.model_dump_json(include={*DecoderConfig.model_fields})

    def products(self) -> LinearShapes:
        """Returns the shapes of the first block, which is of the most frequent type, and of the head."""
        return LinearShapes(self._shapes(0), (self.width, vocabulary_of(self.model)))

    def _shapes(self, layer: int) -> Shapes:
        """Returns the shapes of the linear layers of a block."""
        model = self.model
        d, f, kv = model.d_model, model.d_ff, model.kv_heads * model.head_dim
        if not model.attends(layer):
            matrices = [(d, 2 * kv + d), (d, d), (d, model.n_heads), (d, model.n_heads), (d, d), (d, f), (f, d)]
        else:
            matrices = [(d, 2 * d if model.decoder.gated_attention else d), (d, kv), (d, kv), (d, d), (d, f), (f, d)]
        if model.activation == "swiglu":
            matrices.append((d, f))
        return shapes_of(matrices)

    @property
    def _attending_layers(self) -> int:
        return sum(map(self.model.attends, range(self.layers)))

    def work(self, tokens: float) -> StepWork:
        """Counts 6 FLOPs per token and matmul parameter, plus causal attention and gated delta nets.

        If tokens are selected, the output head computes the loss of all of them first, and has 6 for the selected ones.
        """
        share = self.training.distillation.token_share
        of_head = 6.0 if share == 1 else 2.0 + 6.0 * share
        attended = 12.0 * self._attending_layers * (self.window + 1) / 2
        recurrence = RECURRENT_FLOPS * (self.layers - self._attending_layers) * self.model.head_dim
        return StepWork(
            matmul=6.0 * self.trained_matrices() * tokens,
            attention=(attended + recurrence) * self.width * tokens,
            loss=of_head * vocabulary_of(self.model) * self.width * tokens,
            muon=_muon_flops(self._one_period(), self.layers),
        )

    def traffic(self, execution: Execution) -> StepTraffic:
        total, narrow = self.trained(), self._narrow_bytes(execution)
        update = 2 * (FULL * total + self.moment_bytes(execution)) + execution.compute_dtype.itemsize * total + narrow
        return StepTraffic(update, 2.0 * execution.accumulation * self.layers * self.saved_bytes(execution))

    def trained_matrices(self) -> int:
        return sum(numbers_of(self._shapes(layer)) for layer in range(self.layers))

    def saved_bytes(self, execution: Execution) -> int:
        attending = self._attending_layers / self.layers
        per_token = attending * self._attention_block_bytes(execution)
        if self.model.has_states:
            per_token += (1 - attending) * self._delta_block_bytes(execution)
        return int(execution.tokens(self.window) * per_token)

    def _delta_block_bytes(self, execution: Execution) -> int:
        """Returns the bytes per token of a block with a gated delta net; without kernels, it saves two states."""
        model, precision, compute = self.model, execution.compute_dtype_name, execution.compute_dtype.itemsize
        code = "torch" if execution.kernels == "torch" else "native"
        width, _, feed_forward = _SAVED_BYTES[model.activation, code, precision]
        if code == "torch":
            per_unit = _PLAIN_DELTA_BYTES[precision] + 2 * FULL * model.head_dim
        else:  # values and gates, before and after the recurrence and the norm, in place of queries and outputs
            per_unit = width + FULL + 4 * compute
        keys = 4 * compute * model.kv_heads * model.head_dim if code == "native" else 0
        return per_unit * model.d_model + keys + feed_forward * model.d_ff

    def _attention_block_bytes(self, execution: Execution) -> int:
        model = self.model
        activation = "gelu" if model.activation == "relu" else model.activation
        code = "torch" if execution.kernels == "torch" else "native"  # compiled blocks save no more than native ones
        width, kv, feed_forward = _SAVED_BYTES[activation, code, execution.compute_dtype_name]
        qk_norm = _QK_NORM_BYTES[code, execution.compute_dtype_name] if model.decoder.qk_norm else 0
        width += _GATE_BYTES[code, execution.compute_dtype_name] if model.decoder.gated_attention else 0
        per_token = (width + qk_norm + FULL) * model.d_model + feed_forward * model.d_ff
        per_token += (kv + qk_norm) * model.kv_heads * model.head_dim
        per_token += _STATISTICS_BYTES[code][model.decoder.qk_norm] * model.n_heads
        if execution.kernels == "torch":
            per_token += self._sdpa_bytes(execution.compute_dtype.itemsize)
        return per_token

    def _sdpa_bytes(self, compute: int) -> int:
        """Returns the bytes per token that torch's attention saves in addition to its inputs and output."""
        model = self.model
        if not model.attention_dropout:
            return self.window * compute  # the attention mask
        # The scores before softmax, after it and after dropout in fp32, and keys and values repeated per query head.
        copies = 2 * (model.n_heads - model.kv_heads) * model.head_dim * compute
        copies += 6 * model.d_model if compute < FULL else 0  # and fp32 copies of queries, keys and values
        return 3 * model.n_heads * self.window * FULL + copies

    def head_bytes(self, execution: Execution) -> int:
        tokens, distillation = execution.tokens(self.window), self.training.distillation
        copies = 0.0  # bytes: hidden states of all tokens with a target, those of the selected ones and their gradient
        if distillation.selects_tokens:
            copies = (1 + 2 * distillation.token_share) * tokens * self.width * execution.compute_dtype.itemsize
        return cross_entropy_bytes(execution, tokens, self.products().head, trained=True) + int(copies)

    def weight_bytes(self, execution: Execution) -> int:
        norms_alone = self.training.master_weights == "bf16"
        return FULL * (self.parameters()["norms"] if norms_alone else self.trained()) + self._narrow_bytes(execution)

    def _narrow_bytes(self, execution: Execution) -> int:
        """Returns the bytes of the bf16 copies of weights for matmuls; 0 if the precision is fp32."""
        compute = execution.compute_dtype.itemsize
        return compute * (self.trained() - self.parameters()["norms"]) if compute < FULL else 0


@lru_cache(maxsize=64)
def _counted(one_period: str, layers: int) -> dict[str, int]:
    model = TransformerLM(DecoderConfig.model_validate_json(one_period), seed=None)
    return count_parameters(model, _PARTS, layers)


@lru_cache(maxsize=64)
def _muon_flops(one_period: str, layers: int) -> float:
    """Returns the FLOPs with which Muon orthogonalizes the blocks of rows of each linear layer."""
    model = TransformerLM(DecoderConfig.model_validate_json(one_period), seed=None)
    of_blocks = [muon_flops(_orthogonalized(block)) for block in model.blocks]
    return sum(of_blocks[layer % len(of_blocks)] for layer in range(layers))


def _orthogonalized(block: nn.Module) -> Shapes:
    linears = [module for module in block.modules() if isinstance(module, Linear)]
    return shapes_of(
        (one.in_features, one.out_features // one.row_blocks) for one in linears for _ in range(one.row_blocks)
    )
