"""Estimates what training a transformers model costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from sansgpu.config.model import ModelConfig
from sansgpu.machine.execution import Execution
from sansgpu.models.attention_windows import attending_share
from sansgpu.models.costing import StepWork, cross_entropy_bytes
from sansgpu.models.formats.weights import matrix_formats
from sansgpu.models.huggingface.adapters import add_adapter, lower_layers
from sansgpu.models.huggingface.pretrained import Head, meta_model, shortened_configs
from sansgpu.models.huggingface.probes import can_pack, may_share
from sansgpu.models.huggingface.source import base_precision, stored_weights
from sansgpu.models.kept_states import activation_form, bytes_per_token
from sansgpu.models.module_costs import ModuleCosts, ModuleShape, QuantizedWeights, module_shape

_PROCESS_BYTES = 510 << 20  # a process that has imported torch, transformers and peft, with their buffers


def pretrained_shape(model: ModelConfig, head: Head) -> ModuleShape:
    """Returns the shape of a model, including its adapter. Raises ConfigError if its config cannot be loaded."""
    return _shape(model.model_dump_json(include={*ModelConfig.model_fields}), head)


@lru_cache(maxsize=8)
def _shape(model_json: str, head: Head) -> ModuleShape:
    from sansgpu.models.huggingface.patches import patch_model  # imports transformers, which is slow

    settings = ModelConfig.model_validate_json(model_json)
    model = meta_model(settings, head)
    quantized_blocks, quantized_tables = _quantized(settings, model)
    if settings.adapter != "none":
        with torch.device("meta"):
            add_adapter(model, settings, 0)
    lower_layers(model, settings)
    packs = can_pack(model)
    patch_model(model)
    shares = packs and may_share(model)
    config: Any = model.config.get_text_config()
    vocabulary = int(config.vocab_size)
    outputs = _outputs(head, vocabulary)
    shape = module_shape(model, int(config.hidden_size), _heads(config), vocabulary, outputs)
    shortens = any(True for _ in shortened_configs(settings, head, 1))
    shape = replace(shape, packs=packs, shares=shares, shortens=shortens, attending=attending_share(config))
    trained = settings.trained_blocks(shape.layers) if settings.freezes_at_start else shape.layers
    shape = replace(shape, trained_layers=trained)
    return replace(shape, quantized_blocks=quantized_blocks, quantized_tables=quantized_tables)


def _heads(config: Any) -> int:
    """Returns the largest number of attention heads of a layer; 0 for state space models such as Mamba."""
    try:
        return int(getattr(config, "num_attention_heads", 0))
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError: the layers have different numbers
        return max(int(layer.num_attention_heads) for layer in config.per_layer_config)


def _quantized(settings: ModelConfig, model: nn.Module) -> list[QuantizedWeights]:
    """Returns the weights that stay quantized in the blocks of a model, and in its embedding and output head."""
    precision = base_precision(settings)
    if precision is None:
        return [QuantizedWeights(), QuantizedWeights()]
    stored = stored_weights(settings) if precision == "file" else {}
    formats = matrix_formats(model, precision, stored).values()
    parts = ([matrix for matrix in formats if matrix.is_table == is_table] for is_table in (False, True))
    return [QuantizedWeights(sum(m.weights for m in part), sum(m.bytes for m in part)) for part in parts]


def _outputs(head: Head, vocabulary: int) -> int:
    """Returns the number of logits per token."""
    if head.type in ("causal", "masked"):
        return vocabulary
    if head.type == "none":
        return 1  # the loss compares embeddings of texts, which is little work per token
    return len(head.labels) or 2  # 2 for the start and end of an answer, and transformers' default for classifiers


@dataclass(frozen=True)
class PretrainedCosts(ModuleCosts):
    """Estimates the costs of a transformers model, whose weights may be frozen if it has an adapter."""

    pack: bool = True  # pack examples if the model supports it; otherwise they are padded to the longest

    @property
    def shares_beginnings(self) -> bool:
        return self.pack and self.shape.shares

    def micro_batch_tokens(self, execution: Execution) -> int:
        return execution.tokens(self.window, padded=not (self.pack and self.shape.packs))

    def work(self, tokens: float) -> StepWork:
        return replace(super().work(tokens), muon=0.0)

    @property
    def skips_frozen(self) -> bool:
        return self.model.freezes_at_start and bool(self.model.keep_activations)

    def kept_token_bytes(self, execution: Execution) -> int:
        return bytes_per_token(activation_form(self.model, execution.precision), self.width)

    def head_bytes(self, execution: Execution) -> int:
        shape, all_trained = self.shape, not self.model.freezes_at_start
        is_table = shape.outputs == shape.vocabulary and (all_trained or shape.head > 0)  # a tied head may be frozen
        trained = self.model.adapter == "none" and is_table
        return cross_entropy_bytes(execution, self.micro_batch_tokens(execution), self.products().head, trained)

    def weight_bytes(self, execution: Execution) -> int:
        quantized = self.shape.quantized_blocks, self.shape.quantized_tables
        wide = sum(self.parameters().values()) - self.trained() - sum(part.count for part in quantized)
        frozen = execution.compute_dtype.itemsize * wide + sum(part.bytes for part in quantized)
        return super().weight_bytes(execution) + frozen

    def overhead_bytes(self, execution: Execution, needed: int) -> int:
        return _PROCESS_BYTES
