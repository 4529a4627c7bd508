"""Costs of training a transformers model.

N tokens of a micro-batch, D width, F feed-forward width, T tokens of the longest example, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import nn

from sansgpu.config import ModelConfig
from sansgpu.machine.memory import Execution
from sansgpu.models.costing import (
    COMPUTE,
    FULL,
    Costs,
    LinearShapes,
    StepTraffic,
    StepWork,
    cross_entropy_bytes,
    numbers_of,
    shapes_of,
)
from sansgpu.models.modules import blocks_of
from sansgpu.models.pretrained import Head, meta_model

# Bytes per token that a block saves for its backward pass, per unit of D, and per unit of F for each (D, F) matrix, by
# precision. Measured on the layouts of Qwen2 and BERT, not compiled.
_SAVED_BYTES = {"bf16": (38, 4), "fp32": (36, 8)}
_PROCESS_BYTES = 430 << 20  # the process with torch, transformers and peft


@dataclass(frozen=True)
class PretrainedShape:
    """Sizes and parameter counts of a model, on which its costs depend; tied parameters count once."""

    layers: int
    width: int
    inner: int
    heads: int
    vocabulary: int
    outputs: int  # features of the output head: vocabulary size, or 2 for question answering (start and end)
    embedding: int
    head: int  # 0 if tied to the embedding
    blocks: int
    adapter: int
    trained: int
    trained_matrices: int  # in blocks; only their gradients have the compute dtype
    products: tuple[tuple[tuple[int, int], int], ...]

    def with_layers(self, layers: int) -> PretrainedShape:
        """Returns the shape with at most `layers` blocks."""
        share = min(layers, self.layers) / self.layers
        removed = (1 - share) * (self.trained - self.head - self.embedding if self.adapter == 0 else self.adapter)
        return replace(
            self,
            layers=min(layers, self.layers),
            blocks=round(self.blocks * share),
            adapter=round(self.adapter * share),
            trained=self.trained - round(removed),
            trained_matrices=round(self.trained_matrices * share),
        )


def pretrained_shape(model: ModelConfig, head: Head) -> PretrainedShape:
    """Returns the shape of a model with its adapter. Raises ConfigError if the model cannot be loaded."""
    return _shape(model.model_dump_json(), head)


@lru_cache(maxsize=8)
def _shape(model_json: str, head: Head) -> PretrainedShape:
    model = meta_model(ModelConfig.model_validate_json(model_json), head)
    config: Any = model.config.get_text_config()
    blocks = blocks_of(model)
    inside = {id(p) for block in blocks for p in block.parameters()}
    named = list(model.named_parameters())
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    # Keyed by identity: an adapter layer exposes the weight of its base layer as its own.
    matrices: dict[int, nn.Parameter] = {}
    for module in blocks[0].modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2:
            matrices[id(weight)] = weight
    adapter = sum(p.numel() for n, p in named if "lora_" in n)
    return PretrainedShape(
        layers=len(blocks),
        width=int(config.hidden_size),
        inner=max((max(weight.shape) for weight in matrices.values()), default=int(config.hidden_size)),
        heads=int(config.num_attention_heads),
        vocabulary=int(config.vocab_size),
        outputs=2 if head == "qa" else int(config.vocab_size),
        embedding=sum(p.numel() for _, p in named if id(p) in embeddings),
        head=sum(p.numel() for n, p in named if id(p) not in embeddings | inside and "lora_" not in n),
        blocks=sum(p.numel() for n, p in named if id(p) in inside and "lora_" not in n),
        adapter=adapter,
        trained=sum(p.numel() for _, p in named if p.requires_grad),
        trained_matrices=sum(p.numel() for _, p in named if id(p) in inside and p.requires_grad and p.ndim > 1),
        products=tuple(shapes_of((int(w.shape[1]), int(w.shape[0])) for w in matrices.values()).items()),
    )


@dataclass(frozen=True)
class PretrainedCosts(Costs):
    """The costs of a transformers model of a given shape."""

    shape: PretrainedShape = field(kw_only=True)

    @property
    def layers(self) -> int:
        return self.shape.layers

    @property
    def width(self) -> int:
        return self.shape.width

    def with_layers(self, layers: int) -> PretrainedCosts:
        return replace(self, shape=self.shape.with_layers(layers))

    def parameters(self) -> dict[str, int]:
        shape = self.shape
        parts = {"embedding": shape.embedding, "blocks": shape.blocks, "head": shape.head, "adapter": shape.adapter}
        return {name: count for name, count in parts.items() if count}

    def products(self) -> LinearShapes:
        return LinearShapes(dict(self.shape.products), (self.width, self.shape.outputs))

    def work(self, tokens: float) -> StepWork:
        """Counts 6 FLOPs per token for each trained weight, and 4 for each frozen one, which needs no gradient."""
        shape = self.shape
        per_weight = 6.0 if shape.trained > shape.adapter + shape.head else 4.0
        matrices = numbers_of(dict(shape.products)) * shape.layers
        return StepWork(
            matmul=(per_weight * matrices + 6.0 * shape.adapter) * tokens,
            attention=12.0 * shape.layers * shape.width * (self.example_tokens + 1) / 2 * tokens,
            loss=per_weight * shape.outputs * shape.width * tokens * self.target_ratio,
            muon=0.0,
        )

    def traffic(self, execution: Execution) -> StepTraffic:
        memory, trained = self.memory(execution), self.trained()
        update = 2.0 * (memory.optimizer + FULL * trained) + COMPUTE[execution.precision] * 2 * trained
        return StepTraffic(update, 2.0 * execution.accumulation * memory.activations)

    def trained(self) -> int:
        return self.shape.trained

    def trained_matrices(self) -> int:
        return self.shape.trained_matrices

    def saved_bytes(self, execution: Execution) -> int:
        shape, (width, inner) = self.shape, _SAVED_BYTES[execution.precision]
        up_projections = dict(shape.products).get((shape.width, shape.inner), 1)
        per_token = width * shape.width + inner * up_projections * shape.inner + 8 * shape.heads
        return execution.tokens(self.window) * per_token

    def head_bytes(self, execution: Execution) -> int:
        trained = self.model.adapter == "none" and self.shape.outputs == self.shape.vocabulary
        return cross_entropy_bytes(execution, execution.tokens(self.window), self.products().head, trained)

    def weight_bytes(self, execution: Execution) -> int:
        frozen = sum(self.parameters().values()) - self.trained()
        return super().weight_bytes(execution) + COMPUTE[execution.precision] * frozen

    def overhead_bytes(self, execution: Execution, needed: int) -> int:
        return _PROCESS_BYTES
