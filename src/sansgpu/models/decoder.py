"""The decoder that is trained from scratch.

It computes several architectures, all of which transformers loads without custom code; see architectures.py.

B batch, T time, D width, H query heads, K key-value heads, d head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sansgpu.config.model import ModelConfig
from sansgpu.kernels.attention import attention, causal_ranges
from sansgpu.kernels.block_quantization import Matrix, QuantizedWeight
from sansgpu.kernels.cross_entropy import DEFAULT_LOSS_OPTIONS, LossOptions, linear_cross_entropy
from sansgpu.kernels.embedding import embed
from sansgpu.kernels.feed_forward import feed_forward
from sansgpu.kernels.frozen_linear import quantized_linear
from sansgpu.kernels.linear import Linear, linear, linear_each
from sansgpu.kernels.norm import LayerNorm, OffsetRMSNorm, RMSNorm, residual
from sansgpu.kernels.pointwise import Activation, dropout
from sansgpu.kernels.rotary import rotate_heads
from sansgpu.models.architectures import DecoderConfig
from sansgpu.models.modules import INIT_STD, Table, compile_blocks, integer_of_model, materialize_empty
from sansgpu.models.quantized_layers import QuantizedEmbedding, matrix_of

if TYPE_CHECKING:  # with kernels that other architectures do not need
    from sansgpu.models.gated_delta import RowStates, StateCache

# Values of model.activation. GELU is the tanh approximation, as in GPT-2.
ACTIVATIONS = {
    "swiglu": Activation.SWIGLU,
    "gelu": Activation.GELU_TANH,
    "relu2": Activation.RELU_SQUARED,
    "relu": Activation.RELU,
}
IGNORED_LABEL = -100  # label that the loss skips: the default ignore_index of torch and transformers


class CausalLMOutput(NamedTuple):
    """The output of a decoder that is called with labels."""

    loss: torch.Tensor  # mean over the labels that are not ignored: ()
    logits: torch.Tensor  # (B, T, V)


class KeyValueCache:
    """The keys and values of one layer for all tokens so far, in preallocated tensors (B, K, T, d)."""

    def __init__(self, batch: int, heads: int, length: int, head_dim: int, like: torch.Tensor) -> None:
        self.keys = like.new_empty(batch, heads, length, head_dim)
        self.values = like.new_empty(batch, heads, length, head_dim)
        self.length = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values of t tokens, (B, K, t, d); returns those of all tokens so far."""
        end = self.length + keys.shape[2]
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        """Appends k and v (B, K, t, d); returns the attention of q (B, H, t, d) over the keys in `ranges`."""
        return attention(q, *self.append(k, v), ranges)


class LayerCache(Protocol):
    """The interface of a layer's cache: `KeyValueCache` here, or `LayerSlots` in models/generation/kv_cache.py."""

    @property
    def length(self) -> int:
        """Number of cached tokens, which the model adds to positions and key ranges; 0 if the cache does so itself."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
        """Adds the keys and values of new tokens to the cache, and returns the attention of their queries."""


def _kept_tokens(attention_mask: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Returns which tokens are not padding, (B, T) bool. Raises ValueError if the mask hides tokens inside a row."""
    if attention_mask.shape != inputs.shape:
        shapes = f"{tuple(attention_mask.shape)}, but input_ids has {tuple(inputs.shape)}"
        raise ValueError(f"attention_mask has shape {shapes}; pass one value per token, 0 for padding")
    kept = attention_mask != 0
    begins = kept & ~F.pad(kept, (1, 0))[:, :-1]
    if (begins.sum(1) > 1).any():
        raise ValueError("attention_mask has zeros between the tokens of a row; padding must be at its start or end")
    return kept


def _apart(document_ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Returns the document ids (B, T), with an unused id for padding, so that no other token attends to it."""
    return torch.where(kept, document_ids, document_ids.min() - 1)


def _norm(config: DecoderConfig, width: int) -> LayerNorm | RMSNorm:
    eps = config.decoder.norm_eps
    return _rms_norm(config, width) if config.decoder.norm == "rmsnorm" else LayerNorm(width, eps=eps)


def _rms_norm(config: DecoderConfig, width: int) -> RMSNorm:
    return (OffsetRMSNorm if config.decoder.offset_norms else RMSNorm)(width, config.decoder.norm_eps)


class Attention(nn.Module):
    """Grouped-query attention, whose outputs may be multiplied by a gate that the query projection computes, too."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.n_heads, config.kv_heads, config.head_dim
        self.dropout = config.attention_dropout
        bias = config.biased != "none"
        blocks = 2 * self.heads if config.decoder.gated_attention else self.heads  # each query is followed by its gate
        self.q = Linear(config.d_model, blocks * self.head_dim, bias=bias)
        self.k = Linear(config.d_model, self.kv_heads * self.head_dim, bias=bias)
        self.v = Linear(config.d_model, self.kv_heads * self.head_dim, bias=bias)
        self.o = Linear(self.heads * self.head_dim, config.d_model, bias=bias)
        self.q.row_blocks, self.k.row_blocks = blocks, self.kv_heads
        self.q_norm = _rms_norm(config, self.head_dim) if config.decoder.qk_norm else None
        self.k_norm = _rms_norm(config, self.head_dim) if config.decoder.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        ranges: torch.Tensor,
        cache: LayerCache | None,
    ) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        batch, time, _ = x.shape
        projected = linear_each(x, self.q, self.k, self.v)
        q, *gate = projected[0].view(batch, time, self.heads, -1).split(self.head_dim, dim=-1)
        k, v = (y.view(batch, time, -1, self.head_dim) for y in projected[1:])
        v = v.transpose(1, 2)
        if rotary is None:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        else:
            q, k = rotate_heads(q, k, *rotary, self.q_norm, self.k_norm)
        if cache is None:
            y = attention(q, k, v, ranges, self.dropout if self.training else 0.0)
        else:
            y = cache.attend(q, k, v, ranges)
        y = y.transpose(1, 2)
        for one in gate:
            y = y * one.sigmoid()
        merged: torch.Tensor = self.o(y.reshape(batch, time, -1))
        return merged


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202), or two linear layers with ReLU squared (arXiv 2109.08668), GELU or ReLU between."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        bias = config.biased == "all"
        self.activation = ACTIVATIONS[config.activation]
        self.gate = Linear(config.d_model, config.d_ff, bias=bias) if self.activation is Activation.SWIGLU else None
        self.up = Linear(config.d_model, config.d_ff, bias=bias)
        self.down = Linear(config.d_ff, config.d_model, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        return feed_forward(x, self.activation, self.up, self.down, self.gate)


class DecoderBlock(nn.Module):
    """One pre-norm transformer block, with attention or a gated delta net."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = _norm(config, config.d_model)
        if config.attends(layer):
            self.attention = Attention(config)
        else:
            from sansgpu.models.gated_delta import GatedDeltaNet

            self.net = GatedDeltaNet(config)
        self.feed_forward_norm = _norm(config, config.d_model)
        self.feed_forward = FeedForward(config)
        self.dropout = config.dropout
        self.adds_last = config.gradient_checkpointing  # so that one tensor is saved per block instead of two

    @property
    def attends(self) -> bool:
        """Returns whether the block has attention; otherwise it has a gated delta net."""
        return "attention" in self._modules

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        ranges: torch.Tensor,
        cache: LayerCache | StateCache | None = None,
        branch: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the block on the residual stream `x` and the output `branch` of the last block, both (B, T, D).

        Returns the new stream and the output of the feed-forward network. The next norm adds the latter to the stream
        in the same kernel; it is None if this block has already added it.
        """
        x, inputs = self.attention_norm.branch(x, branch, self.dropout)
        y = self.attention(inputs, rotary, ranges, cache) if self.attends else self.net(inputs, ranges, cache)
        x, inputs = self.feed_forward_norm.branch(x, y, self.dropout)
        y = self.feed_forward(inputs)
        if self.adds_last or torch.compiler.is_compiling():  # blocks share one graph only if all return the same types
            return residual(x, y, self.dropout, self.training), None
        return x, y


class TransformerLM(nn.Module):
    """A decoder-only language model. A call returns the logits or, with labels, the loss and the logits.

    If `seed` is None, the weights are on the meta device, to count them or to load them with `assign=True`.
    """

    quantized_dtype = torch.float32  # the dtype in which a model with quantized matrices computes

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        super().__init__()
        assert isinstance(config, DecoderConfig)
        if config.vocab_size is None:
            raise ValueError("model.vocab_size must be set to at least the size of the tokenizer")
        self.config = config.model_copy()  # so that later assignments to `config` do not change this model
        self.before_block: Callable[[], None] = lambda: None  # called before each block in training; may raise
        rotary = config.decoder.positions == "rope"
        with torch.device("meta"):  # weights are drawn below, from a separate generator
            self.embedding = Table(config.vocab_size, config.d_model)
            self.position = None if rotary else Table(config.max_seq_len, config.d_model)
            self.blocks = nn.ModuleList(DecoderBlock(config, layer) for layer in range(config.n_layers))
            self.norm = _norm(config, config.d_model)
            self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        if seed is not None:
            materialize_empty(self)
            self._initialize(torch.Generator().manual_seed(seed))
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        self.frequencies: torch.Tensor | None
        self.register_buffer("frequencies", frequencies if rotary else None, persistent=False)

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        """Initializes like GPT-2. In some architectures the last matrix of each residual branch starts at zero."""
        for module in self.modules():
            if isinstance(module, (LayerNorm, RMSNorm)):
                module.fill_scale(1.0)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                if not name.endswith("norm.weight"):
                    parameter.zero_()
                continue
            std = INIT_STD
            if name.endswith(("attention.o.weight", "net.out.weight", "feed_forward.down.weight")):
                std = 0.0 if self.config.decoder.zero_init else INIT_STD / (2 * self.config.n_layers) ** 0.5
            parameter.normal_(0.0, std, generator=generator) if std else parameter.zero_()
        for module in self.modules():
            if isinstance(module, DecoderBlock) and not module.attends:
                module.net.initialize(generator)

    def summed_loss(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ) -> torch.Tensor:
        """Returns the cross-entropy summed over targets (B, T) other than -100, without storing all logits at once."""
        hidden = self.hidden(inputs, positions, document_ids)
        options = replace(options, integer=integer_of_model(self))
        return linear_cross_entropy(hidden.flatten(0, 1), self.head_matrix, targets.flatten(), options)

    def compile_blocks(self) -> None:
        """Compiles the blocks, which share one graph, with torch.compile. This pays off on a GPU."""
        compile_blocks(self)

    @property
    def head_weight(self) -> torch.Tensor:
        """The weight of the output head, (V, D); for a model from a quantized GGUF file, use `head_matrix`."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def head_matrix(self) -> Matrix:
        """The weight of the output head, (V, D), which may be quantized."""
        return matrix_of(self.embedding if self.head is None else self.head)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes: that of its matrices, or `quantized_dtype` if they are quantized."""
        weight = self.head_matrix
        return self.quantized_dtype if isinstance(weight, QuantizedWeight) else weight.dtype

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes logits from the final hidden states: (N, D) -> (N, V)."""
        weight = self.head_matrix
        if isinstance(weight, QuantizedWeight):
            return quantized_linear(hidden.to(self.dtype), weight)
        return linear(hidden.to(weight.dtype), weight)

    def hidden(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        caches: Sequence[LayerCache | StateCache] | None = None,
    ) -> torch.Tensor:
        """Returns the final hidden states, after the last norm: (B, T) -> (B, T, D).

        With `document_ids` (B, T), tokens attend only to tokens of their own document. With `caches`, one per layer,
        the inputs continue the cached tokens.
        """
        time = inputs.shape[1]
        start = max((cache.length for cache in caches or ()), default=0)
        if positions is None:
            positions = torch.arange(start, start + time, device=inputs.device)[None]
        ranges = causal_ranges(torch.zeros_like(inputs) if document_ids is None else document_ids)
        if caches:
            ranges[..., 1] += start  # all queries see the cached tokens
        quantized = isinstance(self.embedding, QuantizedEmbedding)
        x = self.embedding(inputs) if quantized else embed(inputs, self.embedding.weight)
        if self.position is not None:
            x = x + embed(positions, self.position.weight)
        x = dropout(x, self.config.dropout, self.training)
        rotary, branch = self.rotary(positions), None
        for index, block in enumerate(self.blocks):
            if self.training:
                self.before_block()
            if caches:
                # bypasses torch.compile, because the number of keys changes with each token
                x, branch = type(block).forward(block, x, rotary, ranges, caches[index], branch)
            elif self.config.gradient_checkpointing and self.training:
                x, branch = checkpoint(block, x, rotary, ranges, use_reentrant=False)
            else:
                x, branch = block(x, rotary, ranges, None, branch)
        return self.norm(x) if branch is None else self.norm.after(x, branch, self.config.dropout)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns cos and sin of the rotary angles, (1 or B, 1, T, d)."""
        if self.frequencies is None:
            return None
        angles = positions[:, None, :, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        caches: Sequence[LayerCache | StateCache] | None = None,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | CausalLMOutput:
        """Returns logits: (B, T) -> (B, T, V). With `labels` (B, T), returns the loss and the logits.

        As in transformers, `labels` are usually the inputs themselves: the model shifts them, ignores -100 and returns
        the mean cross-entropy. The last token of a document does not predict the first one of the next document.

        `attention_mask` (B, T) is 0 for padding, which may be at the start and the end of a row. Padding does not
        change the results of the other tokens. Its own labels are ignored, and its logits have no meaning.
        """
        if attention_mask is not None:
            if caches:
                raise ValueError("attention_mask is not supported with key-value caches; pass inputs without padding")
            kept = _kept_tokens(attention_mask, input_ids)
            positions = (kept.cumsum(1) - 1).clamp(min=0) if positions is None else positions
            document_ids = kept.long() if document_ids is None else _apart(document_ids, kept)
            labels = None if labels is None else labels.masked_fill(~kept, IGNORED_LABEL)
        hidden, weight = self.hidden(input_ids, positions, document_ids, caches), self.head_matrix
        logits: torch.Tensor
        if isinstance(weight, QuantizedWeight):
            logits = self.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        else:
            logits = F.linear(hidden, weight)
        if labels is None:
            return logits
        targets = labels[:, 1:]
        if document_ids is not None:
            targets = targets.masked_fill(document_ids[:, 1:] != document_ids[:, :-1], IGNORED_LABEL)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED_LABEL)
        return CausalLMOutput(loss, logits)

    @property
    def parameter_count(self) -> int:
        """Returns the number of parameters; tied parameters count once."""
        return sum(p.numel() for p in self.parameters())

    def new_caches(self, batch: int) -> list[KeyValueCache | RowStates]:
        """Returns an empty cache per layer for `batch` sequences of up to max_seq_len tokens."""
        from sansgpu.models.gated_delta import RowStates

        c = self.config
        like = torch.empty(0, dtype=self.dtype, device=self.norm.weight.device)
        sizes = batch, c.kv_heads, c.max_seq_len, c.head_dim
        return [KeyValueCache(*sizes, like) if c.attends(n) else RowStates() for n in range(c.n_layers)]
