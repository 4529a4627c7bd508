"""Estimates what training a module with repeated blocks costs, from the shapes of its parameters.

D width, F feed-forward width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Self

from torch import nn

from sansgpu.machine.execution import Execution
from sansgpu.models.costing import (
    FULL,
    Costs,
    LinearShapes,
    StepTraffic,
    StepWork,
    cross_entropy_bytes,
    muon_flops,
    shapes_of,
)
from sansgpu.models.modules import blocks_of

if TYPE_CHECKING:  # with the kernels of recurrent layers, which other runs need not import
    from sansgpu.models.recurrent_layers import RecurrentSize

# Bytes that a block saves per token for its backward pass, by precision: (bytes per unit of D, bytes per unit of F and
# (D, F) matrix). Measured on Qwen2 and BERT without torch.compile.
_SAVED_BYTES = {"bf16": (38, 4), "fp32": (36, 8)}
# The same for blocks that `patch_model` has replaced with fused ones. Those of decoders also save `attention_values`.
_FUSED_SAVED_BYTES = {
    "decoder": {"bf16": (12, 2), "fp32": (12, 4)},
    "sandwich": {"bf16": (16, 2), "fp32": (20, 4)},  # also the outputs of attention and feed-forward layers
    "encoder": {"bf16": (20, 2), "fp32": (32, 4)},
    "relative": {"bf16": (52, 2), "fp32": (42, 4)},  # DeBERTa and MPNet; their attention weights are extra
}
# Bytes that recurrent layers save per token and channel. Unless blocks are fused, theirs save only half as much per
# unit of D as others, because attention saves the other half.
_RECURRENT_SAVED_BYTES = {
    "delta": {"bf16": 24, "fp32": 32},
    "heads": {"bf16": 18, "fp32": 22},
    "normed heads": {"bf16": 32, "fp32": 36},
    "scan": {"bf16": 15, "fp32": 28},
}
# Per token and element of a state: its decay, writing and reading, which take 2 each, and twice that for gradients.
RECURRENT_FLOPS = 18.0
_ATTENTION_WEIGHT_BYTES = 8  # saved per pair of tokens and head in "relative" blocks: results of softmax and dropout

FusedBlocks = Literal["decoder", "sandwich", "encoder", "relative"]


@dataclass(frozen=True)
class QuantizedWeights:
    """The number of frozen weights that stay quantized in memory, and their size in bytes."""

    count: int = 0
    bytes: int = 0

    def part(self, share: float) -> QuantizedWeights:
        return QuantizedWeights(round(self.count * share), round(self.bytes * share))


@dataclass(frozen=True)
class ModuleShape:
    """The sizes and parameter counts that determine a model's costs. Tied parameters count once."""

    layers: int
    width: int
    inner: int
    heads: int  # attention heads; 0 without attention
    vocabulary: int
    outputs: int  # features of the output head, such as the vocabulary size or the number of classes
    embedding: int
    head: int  # all weights outside the blocks and embeddings; 0 if the head is tied to the embedding
    blocks: int
    adapter: int
    trained: int
    trained_inside: int  # trained weights in blocks
    trained_matrices: int  # matrices in blocks; only their gradients have the compute dtype
    products: tuple[tuple[tuple[int, int], int], ...]
    matrix_weights: float  # weights of the matrices of a block, on average
    fused: FusedBlocks | None  # the type of fused blocks that `patch_model` has put in, if it has
    recurrent: tuple[RecurrentSize, ...] = ()  # the recurrent layers of all blocks
    attending: float = 1.0  # share of the blocks that have attention
    attention_values: int = 0  # queries, keys, values and results of a token; queries and keys twice if normalized
    packs: bool = True  # several examples can share a row
    shares: bool = False  # a beginning that examples of a row share is computed once
    trained_layers: int = 0  # the last blocks, the only ones that are trained; 0: all blocks
    shortens: bool = True  # the model can be built with fewer blocks
    quantized_blocks: QuantizedWeights = QuantizedWeights()
    quantized_tables: QuantizedWeights = QuantizedWeights()  # in the token embedding and the output head

    def with_layers(self, layers: int) -> ModuleShape:
        """Returns the shape of the same model, truncated to at most `layers` blocks if it can be."""
        layers = layers if self.shortens else self.layers
        share = min(layers, self.layers) / self.layers
        return replace(
            self,
            layers=min(layers, self.layers),
            trained_layers=min(layers, self.trained_layers),
            blocks=round(self.blocks * share),
            adapter=round(self.adapter * share),
            trained=self.trained - round((1 - share) * self.trained_inside),
            trained_inside=round(self.trained_inside * share),
            trained_matrices=round(self.trained_matrices * share),
            recurrent=self.recurrent[: round(len(self.recurrent) * share)],
            quantized_blocks=self.quantized_blocks.part(share),
        )


def count_parameters(model: nn.Module, parts: Mapping[str, str], layers: int) -> dict[str, int]:
    """Counts the parameters of each part of a model whose blocks are repeated until there are `layers` of them.

    `parts` maps the name of a part to a regular expression for the start of its parameters' names. Tied parameters
    count once. Omits parts without parameters.
    """
    counts, period = dict.fromkeys(parts, 0), len(blocks_of(model))
    for name, parameter in model.named_parameters():
        part = next(part for part, pattern in parts.items() if re.match(pattern, name))
        block = re.match(r"blocks\.(\d+)\.", name)
        counts[part] += (1 if block is None else len(range(int(block[1]), layers, period))) * parameter.numel()
    return {part: count for part, count in counts.items() if count}


def module_shape(model: nn.Module, width: int, heads: int, vocabulary: int, outputs: int | None = None) -> ModuleShape:
    """Counts the parameters of a model, which may be on the meta device.

    `outputs`, the output size of the head, defaults to that of the last matrix outside the blocks and embeddings, or
    to the vocabulary if there is none.
    """
    from sansgpu.models.recurrent_layers import recurrent_size  # imports kernels

    blocks = blocks_of(model)
    inside = {id(p) for block in blocks for p in block.parameters()}
    named = list(model.named_parameters())
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = _matrices(blocks[0])
    recurrent = [module for module in blocks[0].modules() if recurrent_size(module) is not None]
    mixing = {key for module in recurrent for key in _matrices(module)}
    others = [weight for key, weight in matrices.items() if key not in mixing]
    heads_after = [p for _, p in named if p.ndim == 2 and id(p) not in embeddings | inside]
    return ModuleShape(
        layers=len(blocks),
        width=width,
        inner=max((max(weight.shape) for weight in others), default=0 if matrices else width),
        heads=heads,
        vocabulary=vocabulary,
        outputs=outputs or (int(heads_after[-1].shape[0]) if heads_after else vocabulary),
        embedding=sum(p.numel() for _, p in named if id(p) in embeddings),
        head=sum(p.numel() for n, p in named if id(p) not in embeddings | inside and "lora_" not in n),
        blocks=sum(p.numel() for n, p in named if id(p) in inside and "lora_" not in n),
        adapter=sum(p.numel() for n, p in named if "lora_" in n),
        trained=sum(p.numel() for _, p in named if p.requires_grad),
        trained_inside=sum(p.numel() for _, p in named if id(p) in inside and p.requires_grad),
        trained_matrices=sum(p.numel() for _, p in named if id(p) in inside and p.requires_grad and p.ndim > 1),
        products=tuple(shapes_of((int(w.shape[1]), int(w.shape[0])) for w in matrices.values()).items()),
        matrix_weights=sum(w.numel() for block in blocks for w in _matrices(block).values()) / len(blocks),
        fused=getattr(blocks[0], "fused_as", None),
        recurrent=tuple(size for block in blocks for m in block.modules() if (size := recurrent_size(m)) is not None),
        attention_values=max(map(_attention_values, blocks)),
    )


def _attention_values(block: nn.Module) -> int:
    """Returns the values per token that the attention of a decoder's fused block saves; 0 without attention."""
    attention = next((m for m in block.modules() if type(m).__name__.endswith("Attention")), None)
    if attention is None or not (matrices := list(_matrices(attention).values())):
        return 0
    *projections, out = matrices
    width, projected = int(out.shape[1]), sum(int(matrix.shape[0]) for matrix in projections)
    normalizes = any(name.endswith("q_norm") for name, _ in attention.named_children())
    return projected + width + ((projected + width) // 2 if normalizes else 0)


def _matrices(block: nn.Module) -> dict[int, nn.Parameter]:
    """Returns the matrices of a block, keyed by identity, because an adapter layer and its base layer share one."""
    weights = (getattr(module, "weight", None) for module in block.modules())
    return {id(weight): weight for weight in weights if isinstance(weight, nn.Parameter) and weight.ndim == 2}


@dataclass(frozen=True)
class ModuleCosts(Costs):
    """Estimates the costs of any model with the given shape."""

    shape: ModuleShape = field(kw_only=True)

    @property
    def layers(self) -> int:
        return self.shape.layers

    @property
    def width(self) -> int:
        return self.shape.width

    @property
    def vocabulary(self) -> int:
        return self.shape.vocabulary

    @property
    def trained_layers(self) -> int:
        return self.shape.trained_layers or self.shape.layers

    def with_layers(self, layers: int) -> Self:
        return replace(self, shape=self.shape.with_layers(layers))

    def parameters(self) -> dict[str, int]:
        shape = self.shape
        parts = {"embedding": shape.embedding, "blocks": shape.blocks, "head": shape.head, "adapter": shape.adapter}
        return {name: count for name, count in parts.items() if count}

    def products(self) -> LinearShapes:
        return LinearShapes(dict(self.shape.products), (self.width, self.shape.outputs))

    def work(self, tokens: float) -> StepWork:
        """Counts 6 FLOPs per token and trained weight, and 4 per frozen one, which needs no gradient.

        In blocks before the trained ones, through which nothing is backpropagated, it is 2.
        """
        shape, per_weight = self.shape, self._flops_per_weight
        matrices = shape.matrix_weights * self.pass_layers
        attended = (self.example_tokens + 1) / 2 if shape.heads else 0.0  # mean number of keys per query
        recurrence = RECURRENT_FLOPS * sum(layer.states for layer in shape.recurrent) / shape.layers
        attention = 12.0 * shape.attending * shape.width * attended
        return StepWork(
            matmul=(per_weight * matrices + 6.0 * shape.adapter) * tokens,
            attention=(attention + recurrence) * self.pass_layers * tokens,
            loss=per_weight * shape.outputs * shape.width * tokens * self.target_ratio,
            muon=self.trained_layers * muon_flops(dict(shape.products)),
        )

    @property
    def _flops_per_weight(self) -> float:
        """FLOPs per token and weight of a matrix in a trained block."""
        return 6.0 if self.shape.trained > self.shape.adapter + self.shape.head else 4.0

    @property
    def forward_share(self) -> float:
        return 2.0 / self._flops_per_weight

    def traffic(self, execution: Execution) -> StepTraffic:
        memory, trained = self.memory(execution), self.trained()
        update = 2.0 * (memory.optimizer + FULL * trained) + execution.compute_dtype.itemsize * 2 * trained
        return StepTraffic(update, 2.0 * execution.accumulation * memory.activations)

    def trained(self) -> int:
        return self.shape.trained

    def trained_matrices(self) -> int:
        return self.shape.trained_matrices

    def saved_bytes(self, execution: Execution) -> int:
        shape = self.shape
        fused = shape.fused if execution.kernels != "torch" else None
        width, inner = (_FUSED_SAVED_BYTES[fused] if fused else _SAVED_BYTES)[execution.compute_dtype_name]
        up_projections = dict(shape.products).get((shape.width, shape.inner), 1)
        attention = shape.attending if shape.recurrent and shape.inner else not shape.recurrent
        if fused in ("decoder", "sandwich"):
            per_token = width * shape.width + attention * shape.attention_values * execution.compute_dtype.itemsize
        else:
            per_token = width * shape.width * (1 + attention) / 2
        per_token += inner * up_projections * shape.inner + 8 * shape.heads
        for layer in shape.recurrent:
            saved = _RECURRENT_SAVED_BYTES[layer.kind][execution.compute_dtype_name]
            per_token += saved * layer.channels / shape.layers
        if shape.fused == "relative":
            per_token += _ATTENTION_WEIGHT_BYTES * shape.heads * self.window
        return int(self.micro_batch_tokens(execution) * per_token)

    def head_bytes(self, execution: Execution) -> int:
        return cross_entropy_bytes(execution, self.micro_batch_tokens(execution), self.products().head, trained=True)
