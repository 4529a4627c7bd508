"""A decoder's forward pass for new tokens of several sequences, in a single call of C++.

If Python called each kernel of a generation step, the calls would take longer than the computation of a small model.
The keys, values and logits of a token are the same to the last bit, whichever other tokens a call computes.

N new tokens, L of which get logits, D width, H query heads, K key-value heads, d head dim, F inner width, V vocabulary,
S tokens of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sansgpu.kernels import library
from sansgpu.kernels.block_quantization import Matrix, QuantizedWeight, stored
from sansgpu.kernels.c_functions import constants, structs
from sansgpu.kernels.frozen_linear import PackedCodes, bytes_of_codes, memory_for_copies
from sansgpu.kernels.matmul import Integer, MatmulPrecision
from sansgpu.kernels.norm import RMSNorm
from sansgpu.kernels.packed_cache import PackedCache

TILE = constants()["STEP_TILE"]  # outputs of a packed tile
CODE_TILES = constants()["CODE_TILES"]  # plus the number of a block format: the format of its packed codes
INT8_TILES = constants()["INT8_TILES"]  # the format of weights that are packed as 8-bit integers


@dataclass(frozen=True)
class StepWeight:
    """The parameters of a linear layer: a matrix (outputs, inputs), a bias (outputs,) and a LoRA adapter.

    The adapter is A (R, inputs), B (outputs, R) and the factor of their product.
    """

    matrix: torch.Tensor | QuantizedWeight
    bias: torch.Tensor | None = None
    adapter: tuple[torch.Tensor, torch.Tensor, float] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        if isinstance(self.matrix, QuantizedWeight):
            return self.matrix.outputs, self.matrix.inputs
        return self.matrix.shape[0], self.matrix.shape[1]

    def is_taken(self, dtype: torch.dtype) -> bool:
        """Returns True if the C++ code supports this weight with activations in `dtype`."""
        plain = [] if isinstance(self.matrix, QuantizedWeight) else [self.matrix]
        stored = self.matrix.data if isinstance(self.matrix, QuantizedWeight) else self.matrix
        return (
            stored.is_cpu
            and stored.is_contiguous()
            and all(matrix.dtype == dtype for matrix in plain)
            and self.shape[1] % 2 == 0
        )


@dataclass(frozen=True)
class StepLayer:
    """A pre-norm block with RMSNorm, attention with rotary embedding, and SwiGLU, as in Llama, Qwen and Mistral."""

    norm: RMSNorm
    qkv: tuple[StepWeight, StepWeight, StepWeight]
    head_norms: tuple[RMSNorm, RMSNorm] | None  # Qwen3 normalizes queries and keys
    out: StepWeight
    second_norm: RMSNorm
    gate: StepWeight
    up: StepWeight
    down: StepWeight

    @property
    def weights(self) -> tuple[StepWeight, ...]:
        return (*self.qkv, self.out, self.gate, self.up, self.down)


def step_layer(
    norm: Any, second_norm: Any, head_norms: Sequence[Any], weights: Sequence[StepWeight | None]
) -> StepLayer | None:
    """Returns a layer, or None if the C++ code does not support one of its parts.

    `head_norms` are the norms of queries and keys, or None. `weights` are the projections of queries, keys and values,
    the output projection of attention, and the gate, up and down projections; unsupported ones are None.
    """
    known = [weight for weight in weights if weight is not None]
    normed = [one for one in head_norms if one is not None]
    if len(known) < len(weights) or not all(isinstance(one, RMSNorm) for one in (norm, second_norm, *normed)):
        return None
    q, k, v, out, gate, up, down = known
    pair = (normed[0], normed[1]) if len(normed) == 2 else None
    return StepLayer(norm, (q, k, v), pair, out, second_norm, gate, up, down)


def _takes(
    layers: Sequence[StepLayer], last_norm: RMSNorm, head: StepWeight, head_dim: int, dtype: torch.dtype
) -> bool:
    """Returns True if the C++ code supports these layers in `dtype`."""
    weights = [head, *(weight for one in layers for weight in one.weights)]
    norms = [norm for one in layers for norm in (one.norm, one.second_norm, *(one.head_norms or ()))] + [last_norm]
    return (
        library.takes(torch.empty(0, dtype=dtype))
        and all(weight.is_taken(dtype) for weight in weights)
        and all(norm.weight.dtype == torch.float32 and norm.eps == last_norm.eps for norm in norms)
        and head_dim % 2 == 0
    )


class DecoderStep:
    """The layers of a decoder, whose weights are copied to the packed layout of the C++ code.

    The copies of quantized weights have their codes, which are multiplied with activations of 16 bits; without
    `packs_codes`, they are not copied, but dequantized in every step. With `integer` int8, activations have 8 bits, and
    weights that are not quantized are rounded to 8 bits as in `MatmulPrecision.INT8`.
    """

    def __init__(
        self,
        layers: Sequence[StepLayer],
        last_norm: RMSNorm,
        head: StepWeight,
        head_dim: int,
        dtype: torch.dtype,
        integer: Integer | None = None,
        packs_codes: bool = True,
    ) -> None:
        first = layers[0]
        heads, kv_heads = (first.qkv[place].shape[0] // head_dim for place in (0, 1))
        self._sizes = {"D": head.shape[1], "H": heads, "K": kv_heads, "d": head_dim, "F": first.gate.shape[0]}
        self._last_norm, self._vocabulary, self._dtype = last_norm, head.shape[0], dtype
        self._precision = MatmulPrecision.of(dtype, "int8") if integer == "int8" else None
        self._parts = 1 if integer == "int8" else 2
        self._tensors: list[torch.Tensor] = []  # keeps the tensors alive that C++ has pointers to
        weights = [weight for one in layers for weight in one.weights] + [head]
        self._codes = PackedCodes(_quantized(weights)) if packs_codes else None
        self._layers = tuple(self._layer(one) for one in layers)
        self._head = self._weight(head)

    def exact(self) -> DecoderStep:
        """Returns a step that shares the weights, and multiplies 16-bit activations with them even in int8.

        For few sequences it takes hardly longer, because reading the weights takes most of the time.
        """
        other = copy(self)
        other._parts = 2
        return other

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[PackedCache],
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        """Adds tokens to sequences; returns the logits (L, V) of the tokens that follow the `chosen` ones (L,).

        x (N, D) are the tokens' embeddings, cos and sin (N, d) their rotary angles, and `slots` and `positions` (N,)
        int64 say where the caches have them. The tokens of a sequence follow each other. `chosen` are ascending indices
        of tokens.
        """
        slots, positions = slots.contiguous(), positions.contiguous()
        count, capacity = len(positions), caches[0].length
        x, cos, sin = (values.float().contiguous().view(count, -1) for values in (x.clone(), cos, sin))
        fits = int(positions.max()) < capacity and int(slots.max()) < caches[0].slots
        if not fits or x.shape[1] != self._sizes["D"] or cos.shape[1] != self._sizes["d"]:
            raise ValueError(
                f"a decoding step of shape {tuple(x.shape)} does not fit key-value caches with {caches[0].slots} slots "
                f"of {capacity} tokens."
            )
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.keys, layer.values = cache.keys.data_ptr(), cache.values.data_ptr()
        sizes = structs()["StepSizes"](
            N=count, L=len(chosen), S=capacity, layers=len(self._layers), parts=self._parts, **self._sizes
        )
        logits = torch.empty(len(chosen), self._vocabulary, dtype=self._dtype)
        library.call(
            "decoder_step", self._dtype == torch.bfloat16, sizes, self._last_norm.eps, self._layers,
            self._last_norm.weight, self._head, x, cos, sin, slots, positions, chosen, logits,
        )  # fmt: skip
        return logits

    def new_caches(self, slots: int, length: int) -> list[PackedCache]:
        """Returns a key-value cache for each layer, with `slots` sequences of up to `length` tokens."""
        heads, dim = self._sizes["K"], self._sizes["d"]
        return [PackedCache(slots, length, heads, dim, self._dtype) for _ in self._layers]

    def _layer(self, layer: StepLayer) -> Any:
        """Returns the struct StepLayer of native.h, without the caches."""
        q_norm, k_norm = layer.head_norms or (None, None)
        return structs()["StepLayer"](
            norm=self._pointer(layer.norm.weight),
            qkv=tuple(self._weight(weight) for weight in layer.qkv),
            q_norm=None if q_norm is None else self._pointer(q_norm.weight),
            k_norm=None if k_norm is None else self._pointer(k_norm.weight),
            out=self._weight(layer.out),
            second_norm=self._pointer(layer.second_norm.weight),
            gate_up=(self._weight(layer.gate), self._weight(layer.up)),
            down=self._weight(layer.down),
        )

    def _weight(self, weight: StepWeight) -> Any:
        """Returns the struct StepWeight of native.h."""
        matrix = weight.matrix
        data, format = stored(matrix)
        if isinstance(matrix, QuantizedWeight):
            if self._codes is not None:
                data, format = self._codes.pack(matrix), CODE_TILES + format
        elif self._precision is not None:
            data, format = _packed_integers(matrix, self._precision), INT8_TILES
        else:
            data = _packed(matrix)
        struct = structs()["StepWeight"](
            data=self._pointer(data),
            format=format,
            N=weight.shape[0],
            bias=None if weight.bias is None else self._pointer(weight.bias.detach().float()),
        )
        if weight.adapter is not None:
            first, second, scale = weight.adapter
            pad = len(first) % 2  # to an even rank, because the C++ code multiplies pairs of bf16
            struct.rank = len(first) + pad
            matrices = F.pad(first.detach().float() * scale, (0, 0, 0, pad)), F.pad(second.detach(), (0, pad))
            tiles = (_packed(matrix.to(self._dtype).contiguous()) for matrix in matrices)
            struct.first, struct.second = (self._pointer(matrix) for matrix in tiles)
        return struct

    def _pointer(self, tensor: torch.Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()


def step_of(
    layers: Sequence[StepLayer | None],
    last_norm: Any,
    head: StepWeight,
    head_dim: int,
    dtype: torch.dtype,
    integer: Integer | None = None,
    may_fill_memory: bool = False,
) -> DecoderStep | None:
    """Returns a DecoderStep for the layers, or None if C++ does not support them or packed copies are too large.

    If only the copies of quantized weights are too large, the step dequantizes these weights each time. With
    `may_fill_memory`, any size is allowed.
    """
    found = [layer for layer in layers if layer is not None]
    if len(found) < len(layers) or not isinstance(last_norm, RMSNorm):
        return None
    if not _takes(found, last_norm, head, head_dim, dtype):
        return None
    weights = [head, *(weight for one in found for weight in one.weights)]
    allowed = memory_for_copies(may_fill_memory)
    size = sum(_packed_bytes(weight.matrix, integer) for weight in weights)
    if size > allowed:
        return None
    packs_codes = size + bytes_of_codes(_quantized(weights)) <= allowed
    return DecoderStep(found, last_norm, head, head_dim, dtype, integer, packs_codes)


def _quantized(weights: Sequence[StepWeight]) -> list[QuantizedWeight]:
    return [weight.matrix for weight in weights if isinstance(weight.matrix, QuantizedWeight)]


def _packed_bytes(matrix: Matrix, integer: Integer | None) -> int:
    """Returns about how many bytes a packed copy of a weight has that is not quantized."""
    if isinstance(matrix, QuantizedWeight):
        return 0
    return matrix.numel() if integer == "int8" else matrix.nbytes


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight packed in tiles."""
    rows, terms = weight.shape
    packed = weight.new_empty(-(-rows // TILE) * TILE * terms, requires_grad=False)
    precision = MatmulPrecision.of(weight.dtype)
    library.call("pack_step_weight", int(precision), weight.detach(), rows, terms, packed)
    return packed


def _packed_integers(weight: torch.Tensor, precision: MatmulPrecision) -> torch.Tensor:
    """Returns a weight packed in tiles of 8-bit integers."""
    rows, terms = weight.shape
    packed = torch.empty(-(-rows // TILE) * library.call("int8_tile_bytes", terms), dtype=torch.int8)
    library.call("pack_step_weight", int(precision), weight.detach(), rows, terms, packed)
    return packed
