"""Parameters, memory and FLOPs of training a transformers model, from its shape.

N tokens of a micro-batch, D width, F feed-forward width, T tokens of the longest example, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import nn

from sansgpu.config import ModelConfig
from sansgpu.kernels.cross_entropy import CHUNK_ROWS
from sansgpu.machine.memory import Execution, Memory
from sansgpu.models.costing import (
    COMPUTE,
    FULL,
    MOMENTS,
    activation_bytes,
    beside_gradients,
    copy_bytes,
    counting_mode,
    gradient_bytes,
    master_bytes,
    numbers_of,
)
from sansgpu.models.costs import LinearShapes, StepTraffic, StepWork
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

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.embedding + self.head + self.blocks + self.adapter

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
        products=tuple(counting_mode((int(w.shape[1]), int(w.shape[0])) for w in matrices.values()).items()),
    )


def parameters_by_part(shape: PretrainedShape) -> dict[str, int]:
    """Returns the number of parameters of each part."""
    parts = {"embedding": shape.embedding, "blocks": shape.blocks, "head": shape.head, "adapter": shape.adapter}
    return {name: count for name, count in parts.items() if count}


def pretrained_memory(
    shape: PretrainedShape, model: ModelConfig, tokens: int, how: Execution, masters: str, state: str
) -> Memory:
    """Estimates peak memory of a step in bytes; `tokens` per micro-batch. `benchmarks.memory` compares real runs."""
    compute, summed = COMPUTE[how.precision], how.accumulation > 1
    frozen, trained, matrices = shape.total - shape.trained, shape.trained, shape.trained_matrices
    width, inner = _SAVED_BYTES[how.precision]
    up_projections = dict(shape.products).get((shape.width, shape.inner), 1)
    saved = tokens * (width * shape.width + inner * up_projections * shape.inner + 8 * shape.heads)
    rows, table = min(tokens, CHUNK_ROWS), shape.outputs * shape.width
    logits = rows * shape.outputs * compute + tokens * shape.width * (2 * compute + 2 * FULL)
    if model.adapter == "none" and shape.outputs == shape.vocabulary:
        logits += table * (FULL + (compute if tokens > CHUNK_ROWS else 0) + (FULL if summed else 0))
    moments = int(MOMENTS[state] * trained)
    gradients = gradient_bytes(matrices, trained - matrices, how)
    activations = activation_bytes(shape.layers, saved, tokens * shape.width, model.gradient_checkpointing)
    needed = {
        "weights": master_bytes(trained, how.precision, masters) + compute * frozen,
        "gradients": gradients,
        "optimizer": moments,
        "activations": beside_gradients(activations, gradients),
        "logits": logits,
        "snapshot": copy_bytes(trained, moments, masters, how),
    }
    return Memory(**needed, overhead=_PROCESS_BYTES)


def pretrained_work(shape: PretrainedShape, example_tokens: float, tokens: float, learned: float = 1.0) -> StepWork:
    """Returns the FLOPs of a step of `tokens`, in examples of `example_tokens`; the share `learned` are targets.

    Counts 6 per token for each trained weight, and 4 for each frozen one, which needs no weight gradient.
    """
    matrices = numbers_of(dict(shape.products)) * shape.layers
    in_blocks = 6.0 if shape.trained > shape.adapter + shape.head else 4.0
    head = 6.0 if in_blocks == 6.0 else 4.0
    return StepWork(
        matmul=(in_blocks * matrices + 6.0 * shape.adapter) * tokens,
        attention=12.0 * shape.layers * shape.width * (example_tokens + 1) / 2 * tokens,
        loss=head * shape.outputs * shape.width * tokens * learned,
        muon=0.0,
    )


def pretrained_traffic(shape: PretrainedShape, memory: Memory, how: Execution) -> StepTraffic:
    """Counts weights and moments read and written once by the update, and saved activations written and read once."""
    update = 2.0 * (memory.optimizer + FULL * shape.trained) + COMPUTE[how.precision] * 2 * shape.trained
    return StepTraffic(update, 2.0 * how.accumulation * memory.activations)


def pretrained_products(shape: PretrainedShape) -> LinearShapes:
    return LinearShapes(dict(shape.products), (shape.width, shape.outputs))
