"""What a model of transformers costs to train, by its shape.

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
    counted,
    gradient_bytes,
    master_bytes,
    numbers_of,
)
from sansgpu.models.costs import Products, StepTraffic, StepWork
from sansgpu.models.modules import blocks_of
from sansgpu.models.pretrained import Head, shape_only

# What a block keeps of each token for its backward pass, times D, and F for each matrix that leads there. Measured
# on Qwen2's and BERT's layouts, not compiled.
_KEPT = {"bf16": (38, 4), "fp32": (36, 8)}
_PROCESS_BYTES = 430 << 20  # with transformers and peft


@dataclass(frozen=True)
class PretrainedShape:
    """What the costs depend on. Parameters are counted once where they are tied."""

    layers: int
    width: int
    inner: int
    heads: int
    vocabulary: int
    outputs: int  # of the head: the vocabulary, or an answer's begin and end
    embedding: int
    head: int  # of the output, where it is not the embedding
    blocks: int
    adapter: int
    trained: int
    trained_matrices: int  # in blocks, which alone leave gradients in the type of products
    products: tuple[tuple[tuple[int, int], int], ...]

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.head + self.blocks + self.adapter

    def with_layers(self, layers: int) -> PretrainedShape:
        """The same with so many blocks, or as many as it has."""
        share = min(layers, self.layers) / self.layers
        spared = (1 - share) * (self.trained - self.head - self.embedding if self.adapter == 0 else self.adapter)
        return replace(
            self,
            layers=min(layers, self.layers),
            blocks=round(self.blocks * share),
            adapter=round(self.adapter * share),
            trained=self.trained - round(spared),
            trained_matrices=round(self.trained_matrices * share),
        )


def pretrained_shape(model: ModelConfig, head: Head) -> PretrainedShape:
    """The shape of a model, with its adapter. Raises ConfigError where it cannot be loaded."""
    return _shape(model.model_dump_json(), head)


@lru_cache(maxsize=8)
def _shape(model_json: str, head: Head) -> PretrainedShape:
    model = shape_only(ModelConfig.model_validate_json(model_json), head)
    config: Any = model.config.get_text_config()
    blocks = blocks_of(model)
    inside = {id(p) for block in blocks for p in block.parameters()}
    named = list(model.named_parameters())
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    # A layer with an adapter shows the weight of the layer inside it as its own.
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
        products=tuple(counted((int(w.shape[1]), int(w.shape[0])) for w in matrices.values()).items()),
    )


def parameters_by_part(shape: PretrainedShape) -> dict[str, int]:
    """Parameters, and how many of them are trained apart from the rest."""
    parts = {"embedding": shape.embedding, "blocks": shape.blocks, "head": shape.head, "adapter": shape.adapter}
    return {name: count for name, count in parts.items() if count}


def pretrained_memory(
    shape: PretrainedShape, model: ModelConfig, tokens: int, how: Execution, masters: str, state: str
) -> Memory:
    """Bytes at the peak of a step of micro-batches of `tokens`. Measured against real runs by `benchmarks.memory`."""
    compute, summed = COMPUTE[how.precision], how.accumulation > 1
    frozen, trained, matrices = shape.total - shape.trained, shape.trained, shape.trained_matrices
    width, inner = _KEPT[how.precision]
    leading = dict(shape.products).get((shape.width, shape.inner), 1)
    kept = tokens * (width * shape.width + inner * leading * shape.inner + 8 * shape.heads)
    rows, table = min(tokens, CHUNK_ROWS), shape.outputs * shape.width
    logits = rows * shape.outputs * compute + tokens * shape.width * (2 * compute + 2 * FULL)
    if model.adapter == "none" and shape.outputs == shape.vocabulary:
        logits += table * (FULL + (compute if tokens > CHUNK_ROWS else 0) + (FULL if summed else 0))
    moments = int(MOMENTS[state] * trained)
    gradients = gradient_bytes(matrices, trained - matrices, how)
    activations = activation_bytes(shape.layers, kept, tokens * shape.width, model.gradient_checkpointing)
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
    """FLOPs of a step of `tokens` in examples of `example_tokens`, of which a share is `learned`.

    A frozen weight needs no gradient: 4 a token where a trained one takes 6.
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
    """Weights and moments once through the update, and what blocks keep written once and read once."""
    update = 2.0 * (memory.optimizer + FULL * shape.trained) + COMPUTE[how.precision] * 2 * shape.trained
    return StepTraffic(update, 2.0 * how.accumulation * memory.activations)


def pretrained_products(shape: PretrainedShape) -> Products:
    """The shapes of its matrix products."""
    return Products(dict(shape.products), (shape.width, shape.outputs))
